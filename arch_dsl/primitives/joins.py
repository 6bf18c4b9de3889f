"""Joins: how an update comes back to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Positive
from archlab.arch_dsl.parts import fused
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Join, Module, Norm, build_shared, check_part, shared_cost
from archlab.arch_dsl.parts.layers import Linear
from archlab.arch_dsl.parts.learned_vector import OVER_ROOT, LearnedVector, StartOfParameter, number
from archlab.arch_dsl.primitives.lengths import unit
from archlab.arch_dsl.primitives.norms import RMSNorm


@Join.register("add")
class Add(Join):
    """stream + update: the residual connection (arXiv:1512.03385, eq. 1)."""


class _Add(Module, of=Add):
    plain = True  # nothing but the sum, so that the next norm can be computed with it

    def forward(self, stream: Tensor, update: Tensor, call: Call) -> Tensor:
        return stream + update


@Join.register("weighted")
class Weighted(Join):
    """a stream + b update with the fixed numbers `stream` a and `update` b."""

    examples = ({"stream": 0.6},)

    stream: float = 1.0
    update: float = 1.0

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if not self.update:
            yield "update", "must not be 0, which leaves the branch without effect"


class _Weighted(Module, of=Weighted):
    def __init__(self, spec: Weighted, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.weights = (spec.stream, spec.update)

    def forward(self, stream: Tensor, update: Tensor, call: Call) -> Tensor:
        a, b = self.weights
        return a * stream + b * update


@Join.register("highway")
class Highway(Join):
    """update * T + stream * (1 - T) with T = sigmoid(stream W + b) per channel: highway networks (arXiv:1505.00387,
    eq. 3). The bias starts at `start`; below 0 a new model mostly keeps its stream."""

    start: float = -1.0

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost.product(tokens, ctx.width, ctx.width, bias=True).keeping(2 * tokens * ctx.width)


class _Highway(Module, of=Highway):
    def __init__(self, spec: Highway, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.gate = Linear(ctx.width, ctx.width, std=ctx.std, bias=True, start=spec.start)

    def forward(self, stream: Tensor, update: Tensor, call: Call) -> Tensor:
        gate: Tensor = self.gate(stream).sigmoid()
        return stream + gate * (update - stream)


@Join.register("nlerp")
class NLerp(Join):
    """norm(h + |a| (norm(update) - h)) with h = norm(stream) and norm(x) = x / sqrt(sum(x^2) + eps): a step on the unit
    sphere towards the update, of a learned size a for each channel: nGPT (arXiv:2410.01131, eq. 10 and 11).

    Normalised linear interpolation, in the place of the spherical one. a starts at `init`, its parameter at `scale`, as
    in `learned_scale`. As in the authors' code the size is |a|, and the stream is normed too: all but the first one, of
    embeddings, is so already.
    """

    examples = ({}, {"scale": 0.5, "eps": 0.01})

    init: Positive = 0.05
    scale: StartOfParameter = OVER_ROOT
    eps: Positive = 1e-8

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        # The update, its way from the stream, the sum before its norm, three lengths; the steps and their sizes.
        return Cost(parameters=ctx.width, activations=tokens * (3 * ctx.width + 3) + 2 * ctx.width)


class _NLerp(Module, of=NLerp):
    def __init__(self, spec: NLerp, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.step = LearnedVector((ctx.width,), spec.init, number(spec.scale, ctx))
        self.eps = spec.eps

    def forward(self, stream: Tensor, update: Tensor, call: Call) -> Tensor:
        h = unit(stream, self.eps)
        moved = h + self.step().abs() * (unit(update, self.eps) - h)
        return unit(moved, self.eps).to(stream.dtype)


class NormJoin(Join):
    """A join that ends in a norm."""

    norm: Norm = RMSNorm()

    def summed(self, ctx: BuildContext, scale: float = 1.0) -> nn.Module:
        """scale stream + update and then the norm, in one pass where a kernel does it."""
        norm = build_shared(self.norm, ctx.at(self.norm.type))
        add_norm = fused.sum_with(norm, f"{ctx.path}.{self.norm.type}", "with the sum before it", ctx)
        return _AddNorm(norm, scale) if add_norm is None else _OnePass(norm, scale, add_norm)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return shared_cost(self.norm, ctx.at(f"join.{self.norm.type}"), tokens)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        return check_part(self.norm, ctx, f"{path}.norm")


@Join.register("add_norm")
class AddNorm(NormJoin):
    """norm(stream + update): post-norm, as in the original transformer (arXiv:1706.03762, section 3.1)."""

    examples = ({}, {"norm": "layernorm"})

    def build(self, ctx: BuildContext) -> nn.Module:
        return self.summed(ctx)


@Join.register("deepnorm")
class DeepNorm(NormJoin):
    """norm(a stream + update) with a = (2 n_layers)^(1/4), that of a decoder (arXiv:2203.00555, figure 2).

    The initial values that belong to it are `init: {residual: deepnorm}`.
    """

    def build(self, ctx: BuildContext) -> nn.Module:
        return self.summed(ctx, float((2 * ctx.n_layers) ** 0.25))


class _AddNorm(nn.Module):
    def __init__(self, norm: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.scale = norm, scale

    def forward(self, stream: Tensor, update: Tensor, call: Call) -> Tensor:
        joined: Tensor = self.norm(torch.add(update, stream, alpha=self.scale), call)
        return joined


class _OnePass(_AddNorm):
    def __init__(self, norm: nn.Module, scale: float, add_norm: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__(norm, scale)
        self.add_norm = add_norm

    def forward(self, stream: Tensor, update: Tensor, call: Call) -> Tensor:
        kind, weight, bias, eps = self.norm.factors()  # type: ignore[operator]
        return self.add_norm(stream, update, weight, bias, eps, kind, self.scale)[1]


@Join.register("residual_dual")
class ResidualDual(NormJoin):
    """norm(stream + update), and update added to a second stream that no norm touches, which `dual` at `final` adds at
    the end: ResiDual (arXiv:2304.14802)."""

    def build(self, ctx: BuildContext) -> nn.Module:
        return _ResidualDual(build_shared(self.norm, ctx.at(self.norm.type)))


class _ResidualDual(_AddNorm):
    def forward(self, stream: Tensor, update: Tensor, call: Call) -> Tensor:
        call.across["dual"] = call.across.get("dual", stream) + update
        joined: Tensor = self.norm(stream + update, call)
        return joined
