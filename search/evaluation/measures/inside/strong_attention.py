"""How far back the attention reaches that is more than a share: what is left of it where weak weights are left out."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from archlab.arch_dsl.language.spec import Fraction, added
from archlab.arch_dsl.primitives.self_attention import SelfAttention
from archlab.search.evaluation.by_layer import ByLayer, grids
from archlab.search.evaluation.family import Found, Measure
from archlab.search.evaluation.sample import Diagnostic, Observer, Weighed


@Measure.register("strong_attention")
class StrongAttention(Diagnostic):
    """The mean over queries i of sum a_(i, j) over the keys with a_(i, j) > `above`: the share of attention that lies
    in single strong weights, per layer and head, and over these.

    The map has it by distance, the mean over queries and heads per layer: |i - j| = 1, 2 to 3, 4 to 7, …, each named by
    its least. It stands beside the map of `forget_gate`, as the figures of arXiv:2503.02130 have the decays of a head
    beside its attention above 0.5.
    """

    needs = (SelfAttention,)
    lacks = "no softmax attention over its own tokens"
    main: ClassVar[str] = "above"
    above: Fraction = added(default=0.5)

    @property
    def ending(self) -> str:
        return super().ending + self.unusual("above")

    def observer(self) -> Observer:
        return _Strong(self.above)


class _Strong(Observer):
    weighs: ClassVar[bool] = True

    def __init__(self, above: float) -> None:
        self.above = above
        self.shares, self.far = ByLayer(), ByLayer()

    def weigh(self, weighed: Weighed) -> None:
        if weighed.places is None:
            return
        i, j = weighed.places
        rows = weighed.counts[:, None].expand_as(weighed.visible)
        strong = torch.where((weighed.probabilities > self.above) & (j >= 0), weighed.probabilities, 0.0)
        self.shares.heads(weighed.place, weighed.layer, strong.sum(-1), rows)
        distance = (i[:, None] - j).abs()
        far = (distance > 0) & (j >= 0)
        power = torch.frexp(distance[far].float()).exponent - 1
        pairs = (strong.double() * rows[..., None]).sum((0, 1))[far]
        sums = pairs.new_zeros(int(j[-1]).bit_length()).index_add(0, power.long(), pairs)
        self.far.add(weighed.place, weighed.layer, sums, float(rows.sum()))

    def found(self, windows: int) -> Found:
        name, rows = "strong_attention", self.far.means
        most = max(map(len, rows.values()), default=0)
        wide = {key: [*row, *[math.nan] * (most - len(row))] for key, row in rows.items()}  # an encoder reads less
        maps = grids(wide, f"{name}_map", "distance", windows, [2**power for power in range(most)])
        return Found({name: self.shares.mean}, grids=self.shares.grids(name, "head", windows) | maps)
