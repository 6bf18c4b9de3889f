"""How much attention stays near."""

from __future__ import annotations

from typing import ClassVar

from archlab.arch_dsl.language.spec import Count, added
from archlab.arch_dsl.primitives.self_attention import SelfAttention
from archlab.search.evaluation.by_layer import ByLayer
from archlab.search.evaluation.family import Found, Measure
from archlab.search.evaluation.sample import Diagnostic, Observer, Weighed


@Measure.register("local_attention")
class LocalAttention(Diagnostic):
    """The mean over queries i of sum a_(i, j) over |i - j| <= (`width` - 1) / 2: the share of attention within so many
    tokens around the query, per layer and head, and over these (arXiv:2510.26622, which has a width of 5).

    Beside it `local_attention_uniform`, what it would be if every query gave all that it may read the same.
    """

    needs = (SelfAttention,)
    lacks = "no softmax attention over its own tokens"
    main: ClassVar[str] = "width"
    width: Count = added(default=5)

    @property
    def ending(self) -> str:
        return super().ending + self.unusual("width")

    def observer(self) -> Observer:
        return _Local((self.width - 1) // 2)


class _Local(Observer):
    weighs: ClassVar[bool] = True

    def __init__(self, reach: int) -> None:
        self.reach = reach
        self.shares, self.uniform = ByLayer(), ByLayer()

    def weigh(self, weighed: Weighed) -> None:
        if weighed.places is None:
            return
        i, j = weighed.places
        near = ((i[:, None] - j).abs() <= self.reach) & (j >= 0)
        rows = weighed.counts[:, None].expand_as(weighed.visible)
        share = (weighed.probabilities * near).sum(-1)
        even = (weighed.seen & near).sum(-1).double() / weighed.visible
        self.shares.heads(weighed.place, weighed.layer, share, rows)
        self.uniform.heads(weighed.place, weighed.layer, even, rows)

    def found(self, windows: int) -> Found:
        name = "local_attention"
        values = {name: self.shares.mean, f"{name}_uniform": self.uniform.mean}
        return Found(values, grids=self.shares.grids(name, "head", windows))
