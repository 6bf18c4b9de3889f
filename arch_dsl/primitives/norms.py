"""Norms over the last dimension, or over the channels of all heads together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from archlab.arch_dsl.language.spec import Count, Positive, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Norm
from archlab.arch_dsl.parts.fused import Factors
from archlab.arch_dsl.parts.layers import constant, undecayed


class HeadNorm(Norm):
    """What norms share that know of heads.

    With `per_head` every head has a weight and a bias of its own (arXiv:2503.02130, section 4). With `over: heads` the
    channels of all heads are one vector (OLMo 2, arXiv:2501.00656).
    """

    statistics: ClassVar[int] = 1  # numbers per vector that the backward pass needs
    keeps_normed: ClassVar[bool] = True  # and for the gradient of the weight what it multiplies

    def shape(self, ctx: BuildContext) -> tuple[int, ...]:
        """The shape of the weight and of the bias."""
        if getattr(self, "per_head", False):
            return (ctx.heads or 1, ctx.width)
        return (ctx.channels,) if getattr(self, "over", "head") == "heads" else (ctx.width,)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        weight = bool(getattr(self, "weight", False))
        count = weight + bool(getattr(self, "bias", False))
        vectors = tokens * (getattr(self, "groups", 1) if getattr(self, "over", "head") == "heads" else ctx.heads or 1)
        kept = ctx.elements(tokens) + self.statistics * vectors
        if weight and (self.keeps_normed or getattr(self, "per_head", False)):
            kept += ctx.where(held=False).elements(tokens)
        return Cost(parameters=count * math.prod(self.shape(ctx)), activations=kept)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        per_head, over = getattr(self, "per_head", False), getattr(self, "over", "head")
        if ctx.heads is None and per_head:
            yield "per_head", "weights per head need heads, and this site has none"
        elif per_head and not (getattr(self, "weight", False) or getattr(self, "bias", False)):
            yield "per_head", f"says whose weights are whose, and this {self.type} has none"
        if ctx.heads is None and over == "heads":
            yield "over", "a norm over all heads needs heads, and this site has none"
        elif per_head and over == "heads":
            yield "over", "a norm over all heads has a weight per channel already; leave out per_head"
        if getattr(self, "unit_offset", False) and not getattr(self, "weight", False):
            yield "unit_offset", "is added to the weight, and this norm has none"


def weights(shape: tuple[int, ...], start: float) -> nn.Parameter:
    """Weights or biases of a norm."""
    return undecayed(shape, constant(start))


@Norm.register("rmsnorm")
class RMSNorm(HeadNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight: root mean square norm (arXiv:1910.07467, eq. 4).

    With `unit_offset` the factor is 1 + weight, and the weight starts at 0 (Gemma, arXiv:2403.08295). With `groups` the
    heads are so many vectors of equally many heads (the code of Mamba-2, arXiv:2405.21060: a vector for each of its
    groups of heads).
    """

    examples = (
        {}, {"per_head": True}, {"over": "heads"}, {"over": "heads", "groups": 2}, {"unit_offset": True},
        {"weight": False},
    )  # fmt: skip

    ops: ClassVar[tuple[str, ...]] = ("rms_norm",)
    eps: Positive = 1e-6
    weight: bool = added(default=True)
    unit_offset: bool = added(default=False)
    per_head: bool = added(default=False)
    over: Literal["head", "heads"] = added(default="head")
    groups: Count = added(default=1)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        yield from super().wrong(ctx)
        if self.groups > 1 and self.over != "heads":
            yield "groups", "are of heads that one vector holds otherwise, as with over: heads"
        elif ctx.heads is not None and ctx.heads % self.groups:
            yield "groups", f"{self.groups} groups do not divide {ctx.heads} heads"


class _HeadNorm(Module):
    """Weights per head act after the op, which has none for them."""

    kind: ClassVar[str]
    bias: nn.Parameter | None

    def __init__(self, spec: RMSNorm | LayerNorm, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.offset = 1.0 if getattr(spec, "unit_offset", False) else 0.0
        self.weight = weights(spec.shape(ctx), 1.0 - self.offset) if spec.weight else None
        self.bias = weights(spec.shape(ctx), 0.0) if getattr(spec, "bias", False) else None
        self.eps, self.per_head, self.joined = spec.eps, spec.per_head, spec.over == "heads"

    def factor(self) -> Tensor | None:
        """What the normed vector is multiplied by: the weight, and 1 with it where that is asked for."""
        return self.weight if self.weight is None or not self.offset else self.offset + self.weight

    def factors(self) -> Factors:
        """What a kernel needs that computes this norm with its neighbour."""
        return Factors(self.kind, self.factor(), self.bias, self.eps)

    def asked(self) -> dict[str, Any]:
        """What such a kernel is asked for."""
        return {"kind": self.kind, "weight": self.weight is not None, "bias": self.bias is not None}


class _RMSNorm(_HeadNorm, of=RMSNorm):
    kind = "rms"

    def __init__(self, spec: RMSNorm, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        apart = spec.per_head or spec.groups > 1  # from the weight
        self.norm: Callable[..., Tensor] = ctx.select("rms_norm", weight=spec.weight and not apart)
        self.groups = spec.groups

    def forward(self, x: Tensor, call: Call) -> Tensor:
        weight = self.factor()
        if self.per_head:
            return affine(self.norm(x, None, self.eps), weight)
        flat = x.flatten(-2) if self.joined else x
        if self.groups > 1:
            normed = self.norm(flat.unflatten(-1, (self.groups, -1)), None, self.eps)
            return affine(normed.flatten(-2), weight).view_as(x)
        return self.norm(flat, weight, self.eps).view_as(x)


@Norm.register("layernorm")
class LayerNorm(HeadNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias: layer norm (arXiv:1607.06450, eq. 3).

    With `unit_offset` the factor is 1 + weight, and the weight starts at 0 (Nemotron-4, arXiv:2402.16819).
    """

    examples = (
        {}, {"bias": False}, {"per_head": True}, {"over": "heads"}, {"unit_offset": True},
        {"weight": False, "per_head": True},
    )  # fmt: skip

    ops: ClassVar[tuple[str, ...]] = ("layer_norm",)
    statistics: ClassVar[int] = 2
    keeps_normed: ClassVar[bool] = False
    eps: Positive = 1e-5
    weight: bool = added(default=True)
    unit_offset: bool = added(default=False)
    bias: bool = True
    per_head: bool = added(default=False)
    over: Literal["head", "heads"] = added(default="head")


class _LayerNorm(_HeadNorm, of=LayerNorm):
    kind = "layer"

    def __init__(self, spec: LayerNorm, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        given = {"weight": spec.weight and not spec.per_head, "bias": spec.bias and not spec.per_head}
        self.norm: Callable[..., Tensor] = ctx.select("layer_norm", **given)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        weight = self.factor()
        if self.per_head:
            return affine(self.norm(x, None, None, self.eps), weight, self.bias)
        flat = x.flatten(-2) if self.joined else x
        return self.norm(flat, weight, self.bias, self.eps).view_as(x)


Norm.alias("groupnorm", type="layernorm", per_head=True)  # a group per head


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """x * weight + bias in the dtype of x; either may be missing."""
    if weight is not None:
        x = x * weight.to(x.dtype)
    return x if bias is None else x + bias.to(x.dtype)
