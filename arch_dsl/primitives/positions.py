"""Positions that are added to the embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from archlab.arch_dsl.language.spec import Positive, Range, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Position
from archlab.arch_dsl.parts.layers import normal, table
from archlab.arch_dsl.primitives.rope_scaling import frequencies
from archlab.arch_dsl.primitives.rotary import angles


@Position.register("learned")
class Learned(Position):
    """x_t + P[t + offset] with a learned table P `[max_positions + offset, d_model]` (arXiv:1706.03762, section 3.5).

    OPT has an offset of 2, for rows that stood for padding.
    """

    offset: Annotated[int, Range(min=0)] = added(0)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        size = ((ctx.max_positions or tokens) + self.offset) * ctx.d_model
        return Cost(parameters=size, embeddings=size)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.max_positions is None:
            yield "", "learned positions need max_positions, which nothing gives here"


class _Learned(Module, of=Learned):
    def __init__(self, spec: Learned, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        assert ctx.max_positions is not None
        self.offset = spec.offset
        self.table = table((ctx.max_positions + spec.offset, ctx.d_model), normal(ctx.std))

    def forward(self, x: Tensor, call: Call) -> Tensor:
        if call.positions is None and call.state is None:
            return x + self.table[self.offset : self.offset + x.shape[1]]
        return x + self.table[call.positions_of(x.shape[1], x.device) + self.offset]


@Position.register("sinusoidal")
class Sinusoidal(Position):
    """x_t + (sin(t w_0), …, cos(t w_0), …) with w_i = theta^(-2i / d_model) (arXiv:1706.03762, section 3.5)."""

    theta: Positive = 10_000.0

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.d_model % 2:
            yield "", f"sinusoids come in pairs; d_model is {ctx.d_model}, which is odd"


class _Sinusoidal(Module, of=Sinusoidal):
    def __init__(self, spec: Sinusoidal, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.theta = spec.theta

    def forward(self, x: Tensor, call: Call) -> Tensor:
        turned = angles(call.positions_of(x.shape[1], x.device), frequencies(self.theta, x.shape[2], x.device))
        return x + torch.cat([turned.sin(), turned.cos()], dim=-1).to(x.dtype)
