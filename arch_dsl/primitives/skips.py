"""Skips: what stood in the stream before an earlier layer, mixed in again before a later one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Primitive
from archlab.arch_dsl.parts.layers import constant, parameter


class Skip(Primitive):
    """Acts on the stream before every layer, and mixes in what stood there before an earlier one.

    It is built for each layer, with its `depth`; its module's `forward(stream, call)` keeps the shape. Where there are
    several residual streams, it acts on each alike.
    """

    noun: ClassVar[str] = "skip"

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.n_layers == 1:
            yield "", "needs a second layer: it mixes in what stood before an earlier one"


@Skip.register("x0_mix")
class X0Mix(Skip):
    """x <- a x + b x_0 before each layer, x_0 being what enters the first one: the x0 lambdas of modded-nanogpt
    (github.com/KellerJordan/modded-nanogpt). a and b are learned numbers of each layer; a starts at 1, b at `start`."""

    examples = ({}, {"start": 0.1})
    start: float = 0.0

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(parameters=2, activations=tokens * ctx.channels)


class _X0Mix(Module, of=X0Mix):
    def __init__(self, spec: X0Mix, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.own, self.first = parameter((1,), constant(1.0)), parameter((1,), constant(spec.start))
        self.enters = ctx.depth == 0

    def forward(self, stream: Tensor, call: Call) -> Tensor:
        if self.enters:
            call.across["x0"] = stream
        return self.own * stream + self.first * call.across["x0"]


@Skip.register("mirror")
class Mirror(Skip):
    """x <- x + w y before layer n_layers - 1 - i, y being what layer i < n_layers / 2 gave: the skips of a U-net
    (arXiv:1505.04597, section 2), as in modded-nanogpt. w is a learned number of each, and starts at `start`.

    After other skips in the list, y is what these made of it.
    """

    examples = ({}, {"start": 0.3})
    start: float = 1.0

    def source(self, ctx: BuildContext) -> int | None:
        """The layer whose output is added before this one."""
        other = ctx.n_layers - 1 - ctx.depth
        return other if other < ctx.n_layers // 2 else None

    def read_later(self, ctx: BuildContext) -> bool:
        """Whether what the layer before this one gave is added later, or here."""
        return 0 < ctx.depth <= ctx.n_layers // 2

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        source = self.source(ctx)
        if source is None:
            return Cost()
        return Cost(parameters=1, activations=tokens * ctx.channels if source == ctx.depth - 1 else 0)


class _Mirror(Module, of=Mirror):
    def __init__(self, spec: Mirror, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        source = spec.source(ctx)
        self.kept = f"layer {ctx.depth - 1}" if spec.read_later(ctx) else None
        self.source = None if source is None else f"layer {source}"
        if source is not None:
            self.weight = parameter((1,), constant(spec.start))

    def forward(self, stream: Tensor, call: Call) -> Tensor:
        if self.kept is not None:
            call.across[self.kept] = stream
        if self.source is None:
            return stream
        return stream + self.weight * call.across[self.source]
