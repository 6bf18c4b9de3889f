"""Positions: added to the embeddings, or rotated into queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arch_dsl.context import BuildContext, Call, Cost
from arch_dsl.errors import Problem
from arch_dsl.families import Position, Rotary
from arch_dsl.layers import normal, parameter
from arch_dsl.spec import Fraction, Positive


@Position.register("learned")
class Learned(Position):
    """x_t + P[t] with a learned table P `[max_positions, d_model]` (arXiv:1706.03762, section 3.5)."""

    def build(self, ctx: BuildContext) -> nn.Module:
        return _Learned(ctx)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(parameters=(ctx.max_positions or tokens) * ctx.d_model)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        if ctx.max_positions is None:
            return [Problem(path, "learned positions need max_positions, which nothing gives here", self.mark())]
        return []


class _Learned(nn.Module):
    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        assert ctx.max_positions is not None
        self.table = parameter((ctx.max_positions, ctx.d_model), normal(ctx.std))

    def forward(self, x: Tensor, call: Call) -> Tensor:
        if call.positions is None:
            return x + self.table[: x.shape[1]]
        return x + self.table[call.positions]


@Position.register("sinusoidal")
class Sinusoidal(Position):
    """x_t + (sin(t w_0), …, cos(t w_0), …) with w_i = theta^(-2i / d_model) (arXiv:1706.03762, section 3.5)."""

    theta: Positive = 10_000.0

    def build(self, ctx: BuildContext) -> nn.Module:
        return _Sinusoidal(self.theta)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        if ctx.d_model % 2:
            return [Problem(path, f"sinusoids come in pairs; d_model is {ctx.d_model}, which is odd", self.mark())]
        return []


class _Sinusoidal(nn.Module):
    def __init__(self, theta: float) -> None:
        super().__init__()
        self.theta = theta

    def forward(self, x: Tensor, call: Call) -> Tensor:
        angles = _angles(call.positions_of(x.shape[1], x.device), x.shape[2], self.theta)
        return x + torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)


@Rotary.register("rope")
class Rope(Rotary):
    """(a, b) -> (a cos - b sin, a sin + b cos) at angle t theta^(-2i / dims): RoPE (arXiv:2104.09864, eq. 34).

    Channel i is paired with channel i + dims / 2. `fraction` of the head is rotated, the rest passes unchanged.
    """

    theta: Positive = 10_000.0
    fraction: Fraction = 1.0

    def dims(self, head_dim: int) -> int:
        """How many channels of a head are rotated."""
        return round(self.fraction * head_dim)

    def build(self, ctx: BuildContext) -> nn.Module:
        return _Rope(self, ctx)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        dims = self.dims(ctx.width)
        if dims < 2 or dims % 2:
            message = f"rope rotates pairs of channels; {self.fraction:g} of head_dim {ctx.width} are {dims} channels"
            return [Problem(path, message, self.mark("fraction"))]
        return []


class _Rope(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, spec: Rope, ctx: BuildContext) -> None:
        super().__init__()
        self.dims, self.theta = spec.dims(ctx.width), spec.theta
        angles = _angles(torch.arange(ctx.max_positions or 0), self.dims, self.theta)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        # x: [batch, time, heads, head_dim]
        cos, sin = (table[:, None, :].to(x.dtype) for table in self._tables(x, call))
        half = self.dims // 2
        a, b, rest = x.split([half, half, x.shape[-1] - self.dims], dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)

    def _tables(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """cos and sin `[time, dims / 2]`: from the tables for positions that the recipe trains on, else computed."""
        length = x.shape[1]
        if call.positions is None and length <= self.cos.shape[0]:
            return self.cos[:length], self.sin[:length]
        angles = _angles(call.positions_of(length, x.device), self.dims, self.theta)
        return angles.cos(), angles.sin()


def _angles(positions: Tensor, dims: int, theta: float) -> Tensor:
    """`[time, dims / 2]` angles t theta^(-2i / dims), in float32 at least."""
    steps = torch.arange(0, dims, 2, device=positions.device, dtype=torch.float32)
    return positions[:, None].float() * theta ** (-steps / dims)
