"""Rope scaling: other frequencies for RoPE, so that a model reads beyond the length it was trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from archlab.arch_dsl.language.spec import Count, Positive, Range
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Primitive


class RopeScaling(Primitive):
    """Replaces the frequencies theta^(-2i / dims) of RoPE."""

    noun: ClassVar[str] = "rope scaling"
    by_length: ClassVar[bool] = False  # whether the frequencies depend on how long the sequence is

    def frequencies(self, theta: float, dims: int, positions: Tensor) -> Tensor:
        """Angles per position `[dims / 2]` in float32, on the device of `positions`."""
        raise TypeError(f"{type(self).__name__} has no frequencies")

    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0


def frequencies(theta: float | Tensor, dims: int, device: torch.device) -> Tensor:
    """theta^(-2i / dims) `[dims / 2]` in float32 at least (arXiv:2104.09864, eq. 15)."""
    steps = torch.arange(0, dims, 2, device=device, dtype=torch.float32)
    return theta ** (-steps / dims)


@RopeScaling.register("linear")
class LinearScaling(RopeScaling):
    """w_i / factor: position interpolation (arXiv:2306.15595, eq. 4)."""

    examples = ({"factor": 2.0},)

    factor: Positive

    def frequencies(self, theta: float, dims: int, positions: Tensor) -> Tensor:
        return frequencies(theta, dims, positions.device) / self.factor


class _OnBase(RopeScaling):
    """Scales the base theta, by a power that fewer than 4 channels do not have."""

    factor: Positive

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.width <= 2:
            yield "", f"{self.type} needs at least 4 rotated channels, and here are {ctx.width}"


@RopeScaling.register("ntk")
class NTKScaling(_OnBase):
    """w_i of the base theta factor^(dims / (dims - 2)): NTK-aware interpolation (arXiv:2309.00071, eq. 16)."""

    examples = ({"factor": 2.0},)

    def frequencies(self, theta: float, dims: int, positions: Tensor) -> Tensor:
        return frequencies(theta * self.factor ** (dims / (dims - 2)), dims, positions.device)


@RopeScaling.register("dynamic_ntk")
class DynamicNTKScaling(_OnBase):
    """w_i of the base theta (factor n / original - factor + 1)^(dims / (dims - 2)) for a length n above `original`,
    below it unchanged: dynamic NTK interpolation (arXiv:2309.00071, section 3.3).

    n is one more than the largest position of the call; while decoding, what was read before keeps its frequencies.
    """

    examples = ({"factor": 2.0, "original": 5},)

    by_length: ClassVar[bool] = True
    original: Count

    def frequencies(self, theta: float, dims: int, positions: Tensor) -> Tensor:
        length = nn.functional.pad(positions, (0, 1), value=self.original - 1).max().float() + 1
        grown = self.factor * length / self.original - (self.factor - 1)
        return frequencies(theta * grown ** (dims / (dims - 2)), dims, positions.device)


@RopeScaling.register("yarn")
class YaRN(RopeScaling):
    """(1 - r_i) w_i + r_i w_i / factor, where r_i ramps from 0 to 1: channels that turn more than `beta_fast` times in
    `original` positions stay, those below `beta_slow` are interpolated (arXiv:2309.00071, eq. 17-23).

    Cosines and sines are multiplied by `attention_factor`, by default 0.1 ln(factor) + 1 (eq. 22). `truncate` rounds
    the ends of the ramp outwards to whole channels, as the published code does.
    """

    examples = ({"factor": 4.0, "original": 2000, "truncate": False},)

    factor: Annotated[float, Range(min=1)]
    original: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    truncate: bool = True

    def frequencies(self, theta: float, dims: int, positions: Tensor) -> Tensor:
        unchanged = frequencies(theta, dims, positions.device)
        low, high = (self._channel(turns, theta, dims) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        high = min(high, dims - 1)
        low = min(max(low, 0), high)
        channels = torch.arange(dims // 2, device=positions.device, dtype=torch.float32)
        ramp = ((channels - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return unchanged / self.factor * ramp + unchanged * (1 - ramp)

    def _channel(self, turns: float, theta: float, dims: int) -> float:
        """The index i, as a real number, of the channel that turns that often in `original` positions."""
        return dims * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(self) -> float:
        return self.attention_factor or 0.1 * math.log(self.factor) + 1

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.beta_fast < self.beta_slow:
            yield "beta_fast", f"must be at least beta_slow {self.beta_slow:g}, found {self.beta_fast:g}"


@RopeScaling.register("llama3")
class Llama3Scaling(RopeScaling):
    """s_i w_i + (1 - s_i) w_i / factor with s_i = (n_i - low) / (high - low) within [0, 1], where n_i = original w_i /
    2 pi counts the turns in `original` positions: Llama 3.1 (arXiv:2407.21783; its published code)."""

    examples = ({"factor": 8.0, "original": 100},)

    factor: Positive
    original: Count
    low: Positive = 1.0
    high: Positive = 4.0

    def frequencies(self, theta: float, dims: int, positions: Tensor) -> Tensor:
        unchanged = frequencies(theta, dims, positions.device)
        turns = self.original * unchanged / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept) * unchanged / self.factor + kept * unchanged

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.high <= self.low:
            yield "high", f"must be greater than low {self.low:g}, found {self.high:g}"
