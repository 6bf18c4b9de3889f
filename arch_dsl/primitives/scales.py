"""Scales: every element by a fixed or a learned factor, or through a cap."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from archlab.arch_dsl.language.notation import Activation
from archlab.arch_dsl.language.spec import Count, Positive, Range, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Elementwise, Module, Scale, Score
from archlab.arch_dsl.parts.learned_vector import LearnedVector, StartOfParameter, StartOfVector, number
from archlab.arch_dsl.parts.saved_for_backward import kept_of


@Scale.register("scale")
class Factor(Scale):
    """y = x * by * width^width_power, with width that of the site.

    Embeddings by the root of their width: `width_power: 0.5` (arXiv:1706.03762, section 3.4). Logits by one over the
    root of d_model: `width_power: -0.5` (PaLM, arXiv:2204.02311, section 5).

    With `every` a query at position t = 0, 1, … is also multiplied by 1 + growth log(1 + floor((t + first) / every)),
    so that attention over many positions stays sharp (arXiv:2501.19399, section 3.2; its form in the code of Llama 4).
    There positions are counted from `first: 1`, in Ministral 3 from 0.
    """

    examples = ({"by": 0.6}, {"by": -0.7, "width_power": -0.5}, {"growth": 0.7, "every": 2, "first": 1})

    by: float = 1.0
    width_power: float = 0.0
    growth: Positive = added(default=0.1)
    every: Count | None = added(default=None)
    first: Annotated[int, Range(min=0)] = added(default=0)

    def factor(self, ctx: BuildContext) -> float:
        """What elements are multiplied by."""
        return self.by * float(ctx.width**self.width_power)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(activations=tokens if self.every else 0)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if not self.by:
            yield "by", "must not be 0, which erases what it scales"
        if self.every is not None and ctx.site != "query":
            yield "every", f"grows with the position of a query: it stands at query, and not at {ctx.site}"
        for name in ("growth", "first"):
            if self.every is None and getattr(self, name) != getattr(Factor(), name):
                yield name, "is about factors that grow with the position; give after how many it does as `every`"


class _Factor(Module, of=Factor):
    def __init__(self, spec: Factor | DepthScale, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.factor = spec.factor(ctx)
        self.growth = (spec.growth, spec.every, spec.first) if isinstance(spec, Factor) and spec.every else None

    def forward(self, x: Tensor, call: Call) -> Tensor:
        if self.growth is None:
            return x * self.factor
        growth, every, first = self.growth
        positions = call.positions_of(x.shape[1], x.device) + first
        grown = 1 + growth * (positions // every).float().log1p()
        return x * (self.factor * grown).to(x.dtype)[..., None, None]


@Scale.register("depth_scale")
class DepthScale(Scale):
    """y = x / sqrt(depth + 1), with depth 0 in the first layer: LayerNorm Scaling, after a norm (arXiv:2502.05795)."""

    by_layer: ClassVar[bool] = True

    module = _Factor

    def factor(self, ctx: BuildContext) -> float:
        """What elements are multiplied by."""
        return float((ctx.depth + 1) ** -0.5)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.site in ("embed", "final", "logits"):
            yield "", f"depth_scale needs the depth of a layer, and {ctx.site} is in none"


@Scale.register("learned_scale")
class LearnedScale(Scale):
    """y = x * s^power with a learned s for each channel, of each head where there are heads, of each token's logit at
    `logits`. s starts at `init`: nGPT (arXiv:2410.01131, section 2.5).

    The parameter is s scale / init, so it starts at `scale`: an optimizer that moves it by its learning rate, as Adam
    does, moves s by init / scale times that. nGPT's s_z is `scale: 1/sqrt(d_model)` at `logits` (eq. 3); its s_u is one
    at the site `linear` of a `glu`, and s_v sqrt(d_model) one at `preactivation` with `init: sqrt(d_model)` (eq. 20 and
    21). Its s_qk, which queries and keys share (eq. 15 and 16), is `power: 2` at `query` alone, after the rotation.
    """

    examples = ({"scale": 0.5}, {"init": 2.0, "power": 2})

    init: StartOfVector = 1.0
    scale: StartOfParameter = 1.0
    power: Count = 1

    def shape(self, ctx: BuildContext) -> tuple[int, ...]:
        """That of s."""
        if ctx.site == "logits":
            return (ctx.vocab,)
        return (ctx.width,) if ctx.heads is None else (ctx.heads, ctx.width)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        count = math.prod(self.shape(ctx))
        kept = tokens * ctx.vocab if ctx.site == "logits" else ctx.elements(tokens)
        return Cost(parameters=count, activations=kept + (1 if self.power == 1 else 2) * count)  # s and its power too


class _LearnedScale(Module, of=LearnedScale):
    def __init__(self, spec: LearnedScale, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.learned = LearnedVector(spec.shape(ctx), number(spec.init, ctx), number(spec.scale, ctx))
        self.power = spec.power

    def forward(self, x: Tensor, call: Call) -> Tensor:
        factor: Tensor = self.learned()
        return x * (factor if self.power == 1 else factor.pow(self.power)).to(x.dtype)


@Scale.register("feature_map")
class FeatureMap(Scale):
    """y = act(x): the map of queries and keys to features of linear attention (arXiv:2006.16236, section 3.2), there
    elu(x) + 1, which keeps them positive."""

    examples = ({}, {"function": "softplus(x)"})

    function: Activation = "elu(x) + 1"

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(activations=kept_of(self.function)[0] * ctx.elements(tokens))


class _FeatureMap(Elementwise, of=FeatureMap):
    pass


# bounds of queries, keys and values: `clip_qkv` of MPT and DBRX, there 8 (and of OLMo, arXiv:2402.00838, section 2.1)
Scale.alias("clamp", type="feature_map", function="clamp(x, -8, 8)")


@Score.register("softcap")
class Softcap(Score, Scale):
    """y = cap * tanh(x / cap): bounded by the cap, near 0 the identity (Gemma 2, arXiv:2408.00118, section 2)."""

    examples = ({"cap": 2.0},)

    kind: ClassVar[Literal["bias", "softcap", "sinks"]] = "softcap"
    cap: Positive

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        if ctx.site == "scores":
            return Cost()  # the attention counts it
        return Cost(activations=tokens * (ctx.vocab if ctx.site == "logits" else ctx.channels))


class _Softcap(Module, of=Softcap):
    def __init__(self, spec: Softcap, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.cap = spec.cap

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)


def logit_form(maps: Sequence[Scale], width: int) -> tuple[float, float | None] | None:
    """Scale s and cap c of logits c tanh(s x / c), or s x without a cap; None where the maps are no such form.

    A factor f after the cap is one before it and on it: f c tanh(s x / c) = (f c) tanh(f s x / (f c)).
    """
    scale, cap = 1.0, None
    for item in maps:
        if type(item) is Factor:
            factor = item.by * float(width**item.width_power)
            scale, cap = scale * factor, None if cap is None else cap * abs(factor)
        elif type(item) is Softcap and cap is None:
            cap = item.cap
        else:
            return None
    return scale, cap
