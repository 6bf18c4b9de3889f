"""Score modifiers that see positions or heads alone: ALiBi, T5's buckets, sinks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from archlab.arch_dsl.language.spec import Count, Positive, Range, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Score
from archlab.arch_dsl.parts.layers import constant, normal, parameter


@Score.register("alibi")
class Alibi(Score):
    """s_ij - by m_h |i - j| with a fixed slope m_h per head: attention with linear biases (arXiv:2108.12409, sec. 3).

    Falcon's code has by = 1 / sqrt(head_dim): it scales the logits after the bias is added.
    """

    version: ClassVar[int] = 2
    positional: ClassVar[bool] = True
    fading: ClassVar[bool] = True
    by: Positive = added(1.0)


class _Alibi(Module, of=Alibi):
    slopes: Tensor

    def __init__(self, spec: Alibi, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        slopes = [spec.by * slope for slope in alibi_slopes(ctx.heads or 1)]
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)

    def forward(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        positions = call.positions_of(q.shape[1], self.slopes.device).to(self.slopes.dtype)
        keys = call.key_positions(positions, k.shape[1])
        return -(keys[None, :] - positions[:, None]).abs() * self.slopes[:, None, None]

    def relative(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """The bias by distance `[heads, 2 keys - 1]`."""
        return -distances(k).abs().to(self.slopes.dtype) * self.slopes[:, None]


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8 h / heads) for a power of two; else that series for the next lower power, filled from the doubled one."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    if power < heads:
        slopes += alibi_slopes(2 * power)[0::2][: heads - power]
    return slopes


@Score.register("t5_buckets")
class T5Buckets(Score):
    """s_ij + B[bucket(i - j), head] with a learned table B `[buckets, heads]`: T5 (arXiv:1910.10683, section 2.1).

    Half of the buckets are one distance wide, the others grow logarithmically up to `max_distance`, beyond which all
    distances are one. Later positions share bucket 0, as in T5's decoder; with `bidirectional`, as in its encoder, half
    of the buckets are theirs. T5 shares the table between layers: `share: stack`.
    """

    examples = ({"buckets": 8, "max_distance": 10}, {"buckets": 16, "max_distance": 10, "bidirectional": True})

    version: ClassVar[int] = 2
    positional: ClassVar[bool] = True
    buckets: Annotated[int, Range(min=2)] = 32
    max_distance: Count = 128
    bidirectional: bool = added(default=False)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        # The buckets of all distances, as integers of 64 bits.
        return Cost(parameters=self.buckets * (ctx.heads or 1), activations=2 * (2 * tokens - 1))

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        sides = 2 if self.bidirectional else 1
        own = self.buckets // sides // 2
        if self.buckets % sides or self.buckets < 2 * sides:
            yield "buckets", f"must be even and at least 4 for two directions, found {self.buckets}"
        elif self.max_distance <= own:
            yield "max_distance", f"must be beyond the {own} distances with an own bucket, found {self.max_distance}"


class _T5Buckets(Module, of=T5Buckets):
    def __init__(self, spec: T5Buckets, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.buckets, self.max_distance, self.bidirectional = spec.buckets, spec.max_distance, spec.bidirectional
        self.table = parameter((spec.buckets, ctx.heads or 1), normal(ctx.std))

    def forward(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        positions = call.positions_of(q.shape[1], q.device)
        keys = call.key_positions(positions, k.shape[1])
        return nn.functional.embedding(self.bucket(positions[:, None] - keys[None, :]), self.table).permute(2, 0, 1)

    def relative(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """The bias by distance `[heads, 2 keys - 1]`."""
        return nn.functional.embedding(self.bucket(distances(k)), self.table).transpose(0, 1)

    def bucket(self, distance: Tensor) -> Tensor:
        if self.bidirectional:
            half = self.buckets // 2
            return t5_bucket(distance.abs(), half, self.max_distance) + half * (distance < 0)
        return t5_bucket(distance, self.buckets, self.max_distance)


def distances(k: Tensor) -> Tensor:
    """All i - j between evenly spaced keys `[batch, keys, …]`, from 1 - keys to keys - 1."""
    return torch.arange(1 - k.shape[1], k.shape[1], device=k.device)


def t5_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance into the past; those into the future share bucket 0."""
    distance = distance.clamp(min=0)
    exact = buckets // 2
    steps = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + steps.long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, far)


@Score.register("sinks")
class Sinks(Score):
    """exp(s_ij) / (exp(sink_h) + sum_j exp(s_ij)): a learned logit per head that no key has (GPT-OSS, arXiv:2508.10925,
    section 2.2)."""

    version: ClassVar[int] = 2
    kind: ClassVar[Literal["bias", "softcap", "sinks"]] = "sinks"

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(parameters=ctx.heads or 1)


class _Sinks(Module, of=Sinks):
    """Holds the logits; attention reads them."""

    def __init__(self, spec: Sinks, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.logits = parameter((ctx.heads or 1,), constant(0.0))
