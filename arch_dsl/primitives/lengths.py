"""Norms that set the length of a vector, and the function that stands in for a norm."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from archlab.arch_dsl.language.spec import Positive
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Norm
from archlab.arch_dsl.parts.layers import constant, parameter
from archlab.arch_dsl.primitives.norms import HeadNorm, affine, weights
from archlab.kernels.activations import at_least_float32


@Norm.register("l2")
class L2(HeadNorm):
    """y = x / sqrt(sum(x^2) + eps): length one, as queries and keys have in QKNorm (arXiv:2010.04245) and under the
    delta rule (arXiv:2406.06484, section 3.3)."""

    learned: ClassVar[bool] = False  # whether the length is
    eps: Positive = 1e-6
    over: Literal["head", "heads"] = "head"


Norm.alias("l2norm", type="l2")


@Norm.register("scalenorm")
class ScaleNorm(L2):
    """y = g x / sqrt(sum(x^2) + eps) with one learned g (arXiv:1910.05895, section 2.3).

    g starts at the root of the width.
    """

    learned: ClassVar[bool] = True

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return super().cost(ctx, tokens).keeping(ctx.where(held=False).elements(tokens), parameters=1)


class _Length(Module, of=L2):
    def __init__(self, spec: L2, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        start = float(spec.shape(ctx)[0] ** 0.5)
        self.length = parameter((1,), constant(start)) if spec.learned else None
        self.eps, self.dims = spec.eps, (-2, -1) if spec.over == "heads" else (-1,)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return affine(unit(x, self.eps, self.dims), self.length).to(x.dtype)


def unit(x: Tensor, eps: float, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """x / sqrt(sum(x^2) + eps), in float32 at least."""
    wide = at_least_float32(x)
    return wide * torch.rsqrt(wide.square().sum(dims, keepdim=True) + eps)


@Norm.register("dynamic_tanh")
class DynamicTanh(HeadNorm):
    """y = tanh(a x) * weight + bias with one learned a, without statistics (arXiv:2503.10622, section 4).

    a starts at `alpha`.
    """

    examples = ({}, {"per_head": True}, {"weight": False, "bias": False})

    statistics: ClassVar[int] = 0
    alpha: Positive = 0.5
    weight: bool = True
    bias: bool = True
    per_head: bool = False

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return super().cost(ctx, tokens).keeping(0, parameters=1)


class _DynamicTanh(Module, of=DynamicTanh):
    def __init__(self, spec: DynamicTanh, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.alpha = parameter((1,), constant(spec.alpha))
        self.weight = weights(spec.shape(ctx), 1.0) if spec.weight else None
        self.bias = weights(spec.shape(ctx), 0.0) if spec.bias else None

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return affine(torch.tanh(self.alpha.to(x.dtype) * x), self.weight, self.bias)
