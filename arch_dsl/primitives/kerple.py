"""KERPLE: a learned logarithmic penalty on distance."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Score
from archlab.arch_dsl.parts.layers import parameter, uniform
from archlab.arch_dsl.primitives.scores import distances

_LEAST = 1e-2  # the learned numbers are kept above it, as in the authors' code


@Score.register("kerple")
class Kerple(Score):
    """s_ij - a_h log(1 + b_h |i - j|) with learned a_h, b_h > 0 per head: the logarithmic kernel of KERPLE
    (arXiv:2205.09921, eq. 6).

    a starts uniform in [0, 2], b in [0, 1].
    """

    version: ClassVar[int] = 2
    positional: ClassVar[bool] = True
    fading: ClassVar[bool] = True

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        heads = ctx.heads or 1
        kept = (2 * heads + 1) * (2 * tokens - 1)  # the logarithm, its argument, and the distances
        return Cost(parameters=2 * heads, activations=kept)


class _Kerple(Module, of=Kerple):
    def __init__(self, spec: Kerple, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.a = parameter((ctx.heads or 1,), uniform(0.0, 2.0))
        self.b = parameter((ctx.heads or 1,), uniform(0.0, 1.0))

    def forward(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        positions = call.positions_of(q.shape[1], q.device).to(self.a.dtype)
        keys = call.key_positions(positions, k.shape[1])
        distance = (positions[:, None] - keys[None, :]).abs()
        a, b = (value.clamp(min=_LEAST)[:, None, None] for value in (self.a, self.b))
        return -a * torch.log1p(b * distance)

    def relative(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """The bias by distance `[heads, 2 keys - 1]`."""
        a, b = (value.clamp(min=_LEAST)[:, None] for value in (self.a, self.b))
        return -a * torch.log1p(b * distances(k).abs().to(self.a.dtype))
