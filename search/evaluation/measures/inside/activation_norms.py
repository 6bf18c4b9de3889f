"""How large the tensors are that pass the nodes of a model."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from archlab.arch_dsl.parts.watching import Sight
from archlab.search.evaluation.by_layer import by_site
from archlab.search.evaluation.family import Found, Measure
from archlab.search.evaluation.sample import Diagnostic, Observer, at_tokens, place_of


@Measure.register("activation_norms")
class ActivationNorms(Diagnostic):
    """The root mean square of the elements of what passes each node, by layer and node: `stream` after the layer, what
    a branch adds to it (`attention`), what a site makes (`attention.query`).

    `activation_norm` is that of the stream after the last layer, and `activation_norm_growth` how many times as large
    it is as after the first one (arXiv:2502.05795, section 3, has its variance grow with depth). Of an encoder and a
    decoder these are the decoder's.
    """


class _Norms(Observer, of=ActivationNorms):
    kinds: ClassVar[frozenset[str]] = frozenset({"stream", "update", "site"})

    def __init__(self) -> None:
        self.sums: dict[tuple[str, int], tuple[float, int]] = {}

    def see(self, sight: Sight) -> None:
        if sight.layer is None:
            return
        x = at_tokens(sight, "output")
        node = place_of(sight) if sight.path else f"{sight.stack}.stream".strip(".")
        total, count = self.sums.get((node, sight.layer), (0.0, 0))
        square = float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
        self.sums[node, sight.layer] = total + square, count + x.numel()

    def found(self, windows: int) -> Found:
        roots = {key: math.sqrt(total / count) for key, (total, count) in self.sums.items()}
        last = [key for key in roots if key[0] in ("stream", "decoder.stream")]
        ends = [roots[key] for key in sorted(last, key=lambda key: key[1])]
        values = {"activation_norm": ends[-1], "activation_norm_growth": ends[-1] / ends[0] if ends[0] else math.nan}
        return Found(values, grids=by_site(roots, "activation_norms", windows))
