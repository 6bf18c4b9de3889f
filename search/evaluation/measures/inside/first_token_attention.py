"""How much attention the first token gets: the attention sink."""

from __future__ import annotations

from typing import ClassVar

from archlab.arch_dsl.language.spec import added
from archlab.arch_dsl.primitives.heads import MultiHead
from archlab.search.evaluation.by_layer import ByLayer
from archlab.search.evaluation.family import Found, Measure
from archlab.search.evaluation.sample import Diagnostic, Observer, Weighed


class OfProbabilities(Diagnostic):
    """A measure of what softmax attention weighs."""

    needs = (MultiHead,)
    lacks = "no softmax attention, and so no probabilities"


@Measure.register("first_token_attention")
class FirstTokenAttention(OfProbabilities):
    """The mean over queries i of a_(i, 0), the attention probability of the first token, per layer and head; their
    mean over heads and layers (F-Attn, arXiv:2505.06708, section 4.3).

    Beside it `first_token_attention_uniform`, what it would be if every query gave all that it may read the same: for
    causal attention over windows of T tokens the mean of 1 / (i + 1). Where a mask keeps documents apart, the first
    token is that of the query's own document; soft prompts count as tokens, learned keys (`memory`) and sinks do not.
    A query that can read one key alone, as the first one of causal attention, gives it all whatever was learned (but
    for sinks): it counts only with `first_query`. Whether the paper has it there is not said.
    """

    first_query: bool = added(default=False)

    @property
    def ending(self) -> str:
        return super().ending + "_with_first_query" * self.first_query

    def observer(self) -> Observer:
        return _First(self.first_query)


class _First(Observer):
    weighs: ClassVar[bool] = True

    def __init__(self, first_query: bool) -> None:
        self.first_query = first_query
        self.shares, self.uniform = ByLayer(), ByLayer()

    def weigh(self, weighed: Weighed) -> None:
        rows = weighed.counts[:, None].expand_as(weighed.visible)
        if not self.first_query:
            rows = rows & (weighed.visible > 1)
        first = weighed.first[:, None, :, None].expand(*weighed.visible.shape, 1)
        share = weighed.probabilities.gather(-1, first)[..., 0]
        even = weighed.seen.gather(-1, first)[..., 0].double() / weighed.visible
        self.shares.heads(weighed.place, weighed.layer, share, rows)
        self.uniform.heads(weighed.place, weighed.layer, even, rows)

    def found(self, windows: int) -> Found:
        name = "first_token_attention"
        values = {name: self.shares.mean, f"{name}_uniform": self.uniform.mean}
        return Found(values, grids=self.shares.grids(name, "head", windows))
