"""Norms over the last dimension."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from arch_dsl.context import BuildContext, Call, Cost
from arch_dsl.families import Norm
from arch_dsl.layers import constant, parameter
from arch_dsl.spec import Positive


@Norm.register("rmsnorm")
class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight: root mean square norm (arXiv:1910.07467, eq. 4)."""

    ops: ClassVar[tuple[str, ...]] = ("rms_norm",)
    eps: Positive = 1e-6

    def build(self, ctx: BuildContext) -> nn.Module:
        return _RMSNorm(self, ctx)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(parameters=ctx.width)


class _RMSNorm(nn.Module):
    def __init__(self, spec: RMSNorm, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = parameter((ctx.width,), constant(1.0))
        self.eps = spec.eps
        self.norm = ctx.select("rms_norm")

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return self.norm(x, self.weight, self.eps)


@Norm.register("layernorm")
class LayerNorm(Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias: layer norm (arXiv:1607.06450, eq. 3)."""

    eps: Positive = 1e-5
    bias: bool = True

    def build(self, ctx: BuildContext) -> nn.Module:
        return _LayerNorm(self, ctx)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(parameters=ctx.width * (2 if self.bias else 1))


class _LayerNorm(nn.Module):
    def __init__(self, spec: LayerNorm, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = parameter((ctx.width,), constant(1.0))
        self.bias = parameter((ctx.width,), constant(0.0)) if spec.bias else None
        self.eps = spec.eps

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
