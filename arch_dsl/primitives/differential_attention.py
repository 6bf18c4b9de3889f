"""Differential attention: each head weighs by the difference of two softmaxes, and what both would read cancels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn

from archlab.arch_dsl.language.notation import WordOr
from archlab.arch_dsl.language.spec import Fraction
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Module, Scale, Weights
from archlab.arch_dsl.parts.layers import normal, parameter
from archlab.arch_dsl.primitives.attention import Attention, _Attention, _PositionAttention
from archlab.arch_dsl.primitives.weights import Softmax
from archlab.kernels.activations import at_least_float32


def lambda_by_depth(depth: int) -> float:
    """0.8 - 0.6 exp(-0.3 depth), with depth 0 in the first layer (arXiv:2410.05258, section 2.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


@Branch.register("differential_attention")
class DifferentialAttention(Attention):
    """(softmax(scale q_1 k_1^T + scores) - lambda softmax(scale q_2 k_2^T + scores)) v per head, then one output map:
    differential attention (arXiv:2410.05258, eq. 1), with lambda = exp(l_q1 . l_k1) - exp(l_q2 . l_k2) + lambda_init
    (eq. 2).

    A head has two queries and two keys of `head_dim` channels, by default d_model / (2 heads), and a value of twice as
    many. The four vectors l `[head_dim]` are learned, and all heads of a layer share them; they start at N(0, 0.1^2).
    `lambda_init: depth` is 0.8 - 0.6 exp(-0.3 depth), with depth 0 in the first layer.

    The other fields are those of `attention`. The sites `query` and `key` act on `[batch, time, 2 heads, head_dim]`,
    `value` and `sdpa` on `[batch, time, heads, 2 head_dim]`; scores have 2 heads for each head. The paper normalises
    each head's output, and multiplies it by 1 - lambda_init: `sdpa: [rmsnorm, differential_scale]` (eq. 3).
    """

    maps: ClassVar[int] = 2
    order: ClassVar[tuple[str, ...]] = (
        "pre", "post", "join", "heads", "kv_heads", "head_dim", "bias", "zero", "scale", "lambda_init", "queries",
        "kv", "query", "key", "value", "mask", "scores", "sdpa", "memory", "switch", "share",
    )  # fmt: skip
    weights: ClassVar[Weights] = Softmax()  # type: ignore[misc]  # no field: a difference of two softmaxes
    value_dim: ClassVar[None] = None  # type: ignore[misc]  # no field: two head_dim
    examples = (
        {"heads": 2, "kv_heads": 1, "query": ["rope"], "key": ["rope"]},
        {"heads": 2, "head_dim": 6, "bias": True, "sdpa": ["rmsnorm", "differential_scale"], "scores": ["forget_gate"]},
        {"heads": 2, "bias": ["query", "output"], "zero": ["output"], "scale": 1.0, "queries": "positions"},
        {"heads": 2, "kv_heads": 1, "lambda_init": 0.5, "memory": 3, "mask": {"type": "window", "size": 4}},
    )
    lambda_init: Annotated[float | str, WordOr("depth", Fraction, "from 0 to 1", {"minimum": 0, "maximum": 1}, 0.3)] = (
        "depth"
    )

    def build(self, ctx: BuildContext) -> nn.Module:
        kind = _DifferentialAttention if self.queries == "hidden" else _PositionDifferentialAttention
        return kind(self.resolve(ctx), ctx)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        spec = self.resolve(ctx)
        own = Cost(parameters=4 * spec.sizes().head_dim, activations=tokens * spec.widths()["output"])
        return Cost.total(super().cost(ctx, tokens).children | {"lambda": own})

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        yield from super().wrong(ctx)
        if self.share == "stack" and self.lambda_init == "depth":
            yield "share", "lets layers share a lambda_init that follows the depth of each; give lambda_init a number"


class _Difference(Module):
    """What heads of two softmaxes have more than others."""

    # B batch, T time, S keys, H heads, K heads of values, G heads per head of values, D head_dim
    def __init__(self, spec: DifferentialAttention, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        assert spec.head_dim is not None and spec.kv_heads is not None
        self.lambda_init = lambda_by_depth(ctx.depth) if isinstance(spec.lambda_init, str) else spec.lambda_init
        self.group = spec.heads // spec.kv_heads
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            parameter((spec.head_dim,), normal(0.1)) for _ in range(4)
        )

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, given: dict[str, Any]) -> Tensor:
        """q `[B, K 2 G, T, D]`, k `[B, K 2, S, D]` and v `[B, K, S, 2 D]` give `[B, H, T, 2 D]`."""
        both = super().weigh(q, k, v.repeat_interleave(2, 1), gate, given)  # type: ignore[misc]
        first, second = both.unflatten(1, (-1, 2, self.group)).unbind(2)
        one = (at_least_float32(self.lambda_q1) * at_least_float32(self.lambda_k1)).sum().exp()
        two = (at_least_float32(self.lambda_q2) * at_least_float32(self.lambda_k2)).sum().exp()
        share = (one - two + self.lambda_init).to(both.dtype)
        return (first - share * second).flatten(1, 2)  # type: ignore[no-any-return]


class _DifferentialAttention(_Difference, _Attention):
    pass


class _PositionDifferentialAttention(_Difference, _PositionAttention):
    pass


@Scale.register("differential_scale")
class DifferentialScale(Scale):
    """y = x (1 - lambda) with lambda = 0.8 - 0.6 exp(-0.3 depth), and depth 0 in the first layer: what the differential
    transformer has after the norm of each head (arXiv:2410.05258, eq. 3)."""

    by_layer: ClassVar[bool] = True

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.site in ("embed", "final", "logits"):
            yield "", f"differential_scale needs the depth of a layer, and {ctx.site} is in none"


class _DifferentialScale(Module, of=DifferentialScale):
    def __init__(self, spec: DifferentialScale, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.factor = 1 - lambda_by_depth(ctx.depth)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return x * self.factor


# arXiv:2410.05258, section 2.1; the norm has a weight in the authors' code
Branch.alias(
    "diff_attention",
    type="differential_attention",
    sdpa=[{"type": "rmsnorm", "eps": 1e-5}, "differential_scale"],
)
