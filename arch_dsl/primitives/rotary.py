"""Rotary encodings: queries and keys turned by their positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Fraction, Positive, added
from archlab.arch_dsl.parts import fused
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Rotary
from archlab.arch_dsl.parts.fused import Factors
from archlab.arch_dsl.primitives.rope_scaling import RopeScaling, frequencies


@Rotary.register("rope")
class Rope(Rotary):
    """(a, b) -> (a cos - b sin, a sin + b cos) at angle t theta^(-2i / dims): RoPE (arXiv:2104.09864, eq. 34).

    Channel i is paired with channel i + dims / 2, or with `pairs: interleaved` channel 2i with 2i + 1 (GPT-J).
    `fraction` of the head is rotated, the rest passes unchanged. `scaling` replaces the frequencies.
    """

    examples = (
        {},
        {"fraction": 0.5, "theta": 100.0, "pairs": "interleaved", "scaling": {"type": "linear", "factor": 2.0}},
    )

    ops: ClassVar[tuple[str, ...]] = ("rotary",)
    theta: Positive = 10_000.0
    fraction: Fraction = 1.0
    pairs: Literal["half", "interleaved"] = added(default="half")
    scaling: RopeScaling | None = added(default=None)

    def dims(self, head_dim: int) -> int:
        """How many channels of a head are rotated."""
        return round(self.fraction * head_dim)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        computed = self.scaling is not None and self.scaling.by_length  # else cos and sin are tables of the module
        return Cost(activations=tokens * self.dims(ctx.width) if computed else 0)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        dims = self.dims(ctx.width)
        if dims < 2 or dims % 2:
            message = f"rope rotates pairs of channels; {self.fraction:g} of head_dim {ctx.width} are {dims} channels"
            return [Problem(path, message, self.mark("fraction"))]
        inner = self.scaling.check(ctx.at("scaling", width=dims), f"{path}.scaling") if self.scaling else []
        return super().check(ctx, path) or inner

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.scaling is not None and self.theta <= 1:
            yield "theta", f"must be greater than 1 where frequencies are scaled, found {self.theta:g}"


class _Rope(Module, of=Rope):
    cos: Tensor
    sin: Tensor

    def __init__(self, spec: Rope, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.dims, self.theta, self.scaling = spec.dims(ctx.width), spec.theta, spec.scaling
        self.pairs = spec.pairs
        self.rotary: Callable[..., Tensor] = ctx.select("rotary", pairs=spec.pairs, rows=ctx.own_positions)
        whole = spec.scaling is not None and spec.scaling.by_length
        cos, sin = self._computed(torch.arange(0 if whole else ctx.max_positions or 0))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        # x: [batch, time, heads, head_dim]
        cos, sin = self._tables(x, call)
        return self.rotary(x, cos, sin, self.pairs)

    def takes(self, norm: Any, node: str, ctx: BuildContext) -> bool:
        """Whether the norm before it, whose path is `node`, is computed in the same pass."""
        if norm.per_head or norm.joined or norm.asked()["kind"] != "rms":
            return False
        asked = {"pairs": self.pairs, "norm": "plain" if norm.weight is None else "weight", "rows": ctx.own_positions}
        call = fused.one_pass(ctx, node, "rotary", "that of rope after it", **asked)
        self.rotary = call or self.rotary
        return call is not None

    def after(self, norm: Factors, x: Tensor, call: Call) -> Tensor:
        """x `[batch, time, heads, head_dim]` normed, then rotated."""
        cos, sin = self._tables(x, call)
        return self.rotary(x, cos, sin, self.pairs, norm.weight, norm.eps)

    def _tables(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """cos and sin `[time, dims / 2]`, or `[batch, time, dims / 2]` where rows have positions of their own: from the
        tables for positions that the recipe trains on, else computed."""
        length = x.shape[1]
        if call.positions is None and call.state is None and length <= self.cos.shape[0]:
            return self.cos[:length], self.sin[:length]
        return self._computed(call.positions_of(length, x.device))

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.scaling is None:
            turned = angles(positions, frequencies(self.theta, self.dims, positions.device))
            return turned.cos(), turned.sin()
        turned = angles(positions, self.scaling.frequencies(self.theta, self.dims, positions))
        magnitude = self.scaling.magnitude()
        return turned.cos() * magnitude, turned.sin() * magnitude


@Rotary.register("xpos")
class XPos(Rotary):
    """RoPE, then queries times z_i^(t / scale_base) and keys times z_i^(-t / scale_base), with z_i = (2i / head_dim +
    0.4) / 1.4, so that logits decay with the distance: XPos (arXiv:2212.10554, section 3.1).

    Channels 2i and 2i + 1 are a pair.
    """

    ops: ClassVar[tuple[str, ...]] = ("rotary",)
    theta: Positive = 10_000.0
    scale_base: Positive = 512.0

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(activations=tokens * ctx.width)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.width % 2:
            yield "", f"xpos rotates pairs of channels; head_dim is {ctx.width}, which is odd"
            return
        longest = int(80 / -math.log(_SHIFT / (1 + _SHIFT)) * self.scale_base)  # e^80 is near the end of float32
        if (ctx.max_positions or 0) > longest:
            message = f"factors leave float32 after {longest} positions, and here are {ctx.max_positions}; raise it"
            yield "scale_base", message


_SHIFT = 0.4  # gamma of the paper


class _XPos(Module, of=XPos):
    def __init__(self, spec: XPos, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.theta, self.dims = spec.theta, ctx.width
        self.power = (1 if ctx.site == "query" else -1) / spec.scale_base
        self.rotary: Callable[..., Tensor] = ctx.select("rotary", pairs="interleaved", rows=ctx.own_positions)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        # x: [batch, time, heads, head_dim]
        positions = call.positions_of(x.shape[1], x.device)
        turned = angles(positions, frequencies(self.theta, self.dims, x.device))
        channels = torch.arange(0, self.dims, 2, device=x.device, dtype=torch.float32) / self.dims
        base = (channels + _SHIFT) / (1 + _SHIFT)
        factor = base ** (positions[..., None].float() * self.power)
        return self.rotary(x, factor * turned.cos(), factor * turned.sin(), "interleaved")


def angles(positions: Tensor, per_position: Tensor) -> Tensor:
    """Angles `[..., dims / 2]` of positions `[...]`, in float32 at least."""
    return positions[..., None].float() * per_position
