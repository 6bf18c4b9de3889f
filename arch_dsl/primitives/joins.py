"""Joins: how an update comes back to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from arch_dsl.context import BuildContext, Call, Cost
from arch_dsl.families import Join, Norm
from arch_dsl.primitives.norms import RMSNorm


@Join.register("add")
class Add(Join):
    """stream + update: the residual connection (arXiv:1512.03385, eq. 1)."""

    def build(self, ctx: BuildContext) -> nn.Module:
        return _Add()


class _Add(nn.Module):
    def forward(self, stream: Tensor, update: Tensor, call: Call) -> Tensor:
        return stream + update


@Join.register("add_norm")
class AddNorm(Join):
    """norm(stream + update): post-norm, as in the original transformer (arXiv:1706.03762, section 3.1)."""

    norm: Norm = RMSNorm()

    def build(self, ctx: BuildContext) -> nn.Module:
        return _AddNorm(self.norm.build(ctx.at(self.norm.type)))

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return self.norm.cost(ctx, tokens)


class _AddNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, stream: Tensor, update: Tensor, call: Call) -> Tensor:
        joined: Tensor = self.norm(stream + update, call)
        return joined
