"""Decays: by how much the state of a linear recurrence fades from one token to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archlab.arch_dsl.language.spec import Count, NotNegative, Positive, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Decay, Module, place_of
from archlab.arch_dsl.parts.layers import Initializer, Linear, constant, equal_to, parameter, steps, undecayed
from archlab.kernels.activations import at_least_float32

Decays = tuple[Tensor, Tensor | None]


@Decay.register("constant")
class Constant(Decay):
    """f_h = 1 - 2^(-5 - h) for head h = 0, 1, …: retention (RetNet, arXiv:2307.08621, eq. 8).

    With `learned` f_h is sigmoid(b_h), and starts there.
    """

    examples = ({}, {"learned": True})

    learned: bool = False

    def build(self, ctx: BuildContext) -> nn.Module:
        if self.learned:
            return _Learned(self, ctx)
        return _Fixed(torch.log1p(-_retention(ctx.heads or 1)))

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        heads = ctx.heads or 1
        return Cost(parameters=heads, activations=heads) if self.learned else Cost()


def _retention(heads: int) -> Tensor:
    """2^(-5 - h) `[heads]` in float64."""
    return torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float64))


class _Decay(Module):
    def projections(self) -> list[Linear]:
        return []


class _Projected(_Decay):
    projection: Linear

    def projections(self) -> list[Linear]:
        return [self.projection]


class _Fixed(nn.Module):
    log_f: Tensor

    def __init__(self, log_f: Tensor) -> None:
        super().__init__()
        self.register_buffer("log_f", log_f.float(), persistent=False)

    def projections(self) -> list[Linear]:
        return []

    def forward(self, products: Iterator[Tensor], call: Call) -> Decays:
        return self.log_f, None


class _Learned(_Decay):
    def __init__(self, spec: Constant, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        # f / (1 - f) is 2^(5 + h) - 1
        start = torch.log(1 / _retention(ctx.heads or 1) - 1).float()
        self.logit = parameter(start.shape, equal_to(start))

    def forward(self, products: Iterator[Tensor], call: Call) -> Decays:
        return F.logsigmoid(self.logit), None


@Decay.register("lightning")
class Lightning(Decay):
    """log f_h = -2^(-8 (h + 1) / heads) (1 - i / (n_layers - 1 + e) + e) with e = 1e-5, for head h = 0, 1, … of layer
    i = 0, 1, …: fixed decays, slower in later layers (lightning attention of MiniMax-01, arXiv:2501.08313, section 2.2,
    and its code)."""

    by_layer: ClassVar[bool] = True

    def build(self, ctx: BuildContext) -> nn.Module:
        return _Fixed(-_slopes(ctx.heads or 1) * (1 - ctx.depth / (ctx.n_layers - 1 + 1e-5) + 1e-5))


def _slopes(heads: int) -> Tensor:
    """2^(-8 (h + 1) / heads) `[heads]` in float64, the slopes of ALiBi."""
    return torch.exp2(-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)


@Decay.register("mamba2")
class Mamba2(Decay):
    """log f_h = -exp(a_h) dt_h with the step dt_h = softplus(w_h . x + b_h), by which values are multiplied too
    (Mamba-2, arXiv:2405.21060, section 7.1 and its code).

    With `step: false` values stay as they are (gated DeltaNet, arXiv:2412.06464, section 3.4). exp(a) starts uniform
    between `a_min` and `a_max`, softplus(b) between `dt_min` and `dt_max`, uniform in its logarithm. With `factor` c
    the step is softplus(c w_h . x + b_h) (Falcon-H1, arXiv:2507.22448, section 3.2.3). A step is at least `floor`
    (`dt_limit` of Mamba-2's code).
    """

    examples = ({}, {"step": False, "factor": 0.5}, {"floor": 0.5})

    step: bool = True
    a_min: NotNegative = 1.0
    a_max: Positive = 16.0
    dt_min: Positive = 1e-3
    dt_max: Positive = 0.1
    factor: Positive = added(default=1.0)
    floor: NotNegative = added(default=0.0)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        heads = ctx.heads or 1
        # the argument of softplus, the step, exp(a) and -exp(a)
        kept = (2 + bool(self.floor)) * tokens + 2
        return Cost.product(tokens, ctx.hidden, heads).keeping(kept * heads, parameters=2 * heads)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        return _bounds(self)


def _bounds(spec: Mamba2 | KDA) -> Iterator[tuple[str, str]]:
    for low, high in (("a_min", "a_max"), ("dt_min", "dt_max")):
        if getattr(spec, high) < getattr(spec, low):
            yield high, f"must be at least {low} {getattr(spec, low):g}"


class _Mamba2(_Projected, of=Mamba2):
    def __init__(self, spec: Mamba2, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        heads = ctx.heads or 1
        self.projection = Linear(ctx.hidden, heads, std=ctx.std)
        self.a = parameter((heads,), _log_uniform(spec.a_min, spec.a_max))
        self.bias = parameter((heads,), steps(spec.dt_min, spec.dt_max))
        self.step, self.factor, self.floor = spec.step, spec.factor, spec.floor

    def forward(self, products: Iterator[Tensor], call: Call) -> Decays:
        product = at_least_float32(next(products))
        step = F.softplus((product if self.factor == 1 else self.factor * product) + self.bias)
        if self.floor:
            step = step.clamp(min=self.floor)
        return -self.a.exp() * step, step if self.step else None


def _log_uniform(low: float, high: float) -> Initializer:
    return lambda value, generator: value.uniform_(low, high, generator=generator).clamp_(min=1e-6).log_()


@Decay.register("low_rank")
class LowRank(Decay):
    """log f = logsigmoid(x W_1 W_2 + b) / temperature, per channel of the keys, with W_1 to `rank` channels: gated
    linear attention (arXiv:2312.06635, section 4.4)."""

    examples = ({}, {"rank": 3, "temperature": 4.0})
    channels: ClassVar[bool] = True

    rank: Count = 16
    temperature: Positive = 16.0

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        inner = Cost.product(tokens, ctx.hidden, self.rank)
        outer = Cost.product(tokens, self.rank, ctx.channels, bias=True).keeping(
            tokens * (self.rank + 2 * ctx.channels)
        )
        return Cost.total({"inner": inner, "outer": outer})


class _LowRank(_Projected, of=LowRank):
    def __init__(self, spec: LowRank, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        heads = ctx.heads or 1
        self.projection = Linear(ctx.hidden, spec.rank, std=ctx.std)
        self.outer = Linear(spec.rank, heads * ctx.width, std=ctx.std, bias=True)
        self.heads, self.temperature = heads, spec.temperature

    def forward(self, products: Iterator[Tensor], call: Call) -> Decays:
        logits = at_least_float32(self.outer(next(products))).unflatten(-1, (self.heads, -1))
        return F.logsigmoid(logits) / self.temperature, None


@Decay.register("kda")
class KDA(Decay):
    """log f = -exp(a_h) softplus(x W_1 W_2 + b), per channel of the keys, with W_1 to `rank` channels: Kimi Delta
    Attention (arXiv:2510.26692, section 4, and its code). The rank is by default that of a key's channels.

    exp(a) starts uniform between `a_min` and `a_max`, softplus(b) between `dt_min` and `dt_max`, uniform in its
    logarithm.
    """

    examples = ({}, {"rank": 3})
    channels: ClassVar[bool] = True

    rank: Count | None = None
    a_min: NotNegative = 1.0
    a_max: Positive = 16.0
    dt_min: Positive = 1e-3
    dt_max: Positive = 0.1

    def resolve(self, ctx: BuildContext) -> Self:
        return self.replace(rank=self.rank or ctx.width)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        rank, heads = self.rank or ctx.width, ctx.heads or 1
        inner = Cost.product(tokens, ctx.hidden, rank)
        # the argument of softplus, the step, exp(a) and -exp(a)
        kept = tokens * (rank + 2 * ctx.channels) + 2 * heads
        outer = Cost.product(tokens, rank, ctx.channels, bias=True).keeping(kept, parameters=heads)
        return Cost.total({"inner": inner, "outer": outer})

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        return _bounds(self)


class _KDA(_Projected, of=KDA):
    def __init__(self, spec: KDA, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        heads, rank = ctx.heads or 1, spec.rank or ctx.width
        self.projection = Linear(ctx.hidden, rank, std=ctx.std)
        self.outer = Linear(rank, heads * ctx.width, std=ctx.std)
        self.bias = parameter((heads * ctx.width,), steps(spec.dt_min, spec.dt_max))
        self.a = undecayed((heads, 1), _log_uniform(spec.a_min, spec.a_max))
        self.heads = heads

    def forward(self, products: Iterator[Tensor], call: Call) -> Decays:
        step = F.softplus(at_least_float32(self.outer(next(products))) + self.bias).unflatten(-1, (self.heads, -1))
        return -self.a.exp() * step, None


@Decay.register("lower_bounded")
class LowerBounded(Decay):
    """f = l + (1 - l) sigmoid(x W), per channel of the keys, with a bound l that grows with depth (HGRN2,
    arXiv:2404.07904, section 3.1; HGRN, arXiv:2311.04823, section 3.3).

    The bounds of layer i are P_1 + … + P_i, and so 0 in the first layer, i = 0. P is the softmax over layers of a table
    `[layers, heads * head_dim]` that they share; it starts at 0.
    """

    by_layer: ClassVar[bool] = True
    channels: ClassVar[bool] = True

    def build(self, ctx: BuildContext) -> nn.Module:
        key = _table_key(ctx)
        if key not in ctx.shared:
            ctx.shared[key] = _Table(self, ctx)
        return _LowerBounded(self, ctx)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        table = ctx.n_layers * ctx.channels
        owner = ctx.shared.setdefault(_table_key(ctx), ctx.path) == ctx.path
        # the softmax, l, -l and log l; of the decays the argument of logsigmoid, the second term, and the sum
        kept = table + 3 * ctx.channels + 3 * tokens * ctx.channels
        return Cost.product(tokens, ctx.hidden, ctx.channels).keeping(kept, parameters=table if owner else 0)


def _table_key(ctx: BuildContext) -> str:
    return f"{place_of(ctx)}.table of {ctx.channels}"


class _Table(Module):
    def __init__(self, spec: LowerBounded, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.weight = parameter((ctx.n_layers, ctx.channels), constant(0.0))


class _LowerBounded(_Projected):
    def __init__(self, spec: LowerBounded, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.heads, self.depth = ctx.heads or 1, ctx.depth
        self.table: _Table = ctx.shared[_table_key(ctx)]
        self.projection = Linear(ctx.hidden, self.heads * ctx.width, std=ctx.std)

    def forward(self, products: Iterator[Tensor], call: Call) -> Decays:
        bound = at_least_float32(self.table.weight).softmax(0)[1 : self.depth + 1].sum(0)
        log_share = F.logsigmoid(at_least_float32(next(products)))
        log_f = torch.logaddexp(bound.log(), torch.log1p(-bound) + log_share)
        return log_f.unflatten(-1, (self.heads, -1)), None


def each_token(log_f: Tensor, v: Tensor) -> Tensor:
    """Decays `[1, time, heads]` where all tokens have the same `[heads]`, else as they are."""
    return log_f.expand(1, v.shape[1], -1) if log_f.ndim == 1 else log_f


def over_tokens(log_f: Tensor | None, v: Tensor) -> Tensor:
    """Decays of every token, `[batch, time, heads]` or with channels, for v `[batch, time, heads, value_dim]`."""
    if log_f is None:
        return at_least_float32(v.new_zeros(v.shape[:3]))
    return log_f.expand(v.shape[:3]) if log_f.ndim == 1 else log_f


def stepped(v: Tensor, step: Tensor | None) -> Tensor:
    """Values `[batch, time, heads, value_dim]` times the steps of their tokens `[batch, time, heads]`."""
    return v if step is None else (v * step[..., None]).to(v.dtype)


def only_where(kept: Tensor, log_f: Tensor | None, v: Tensor) -> Tensor | None:
    """Decays that leave the state as it is at tokens that are not kept `[batch, time]`."""
    if log_f is None:
        return None
    wide = over_tokens(log_f, v)
    return torch.where(kept[:, :, None, None] if wide.ndim == 4 else kept[:, :, None], wide, 0)


def forgetting(starts: Tensor, log_f: Tensor | None, v: Tensor) -> Tensor:
    """Decays that forget all that was before where a document starts `[batch, time]`."""
    wide = over_tokens(log_f, v)
    return wide.masked_fill(starts[:, :, None, None] if wide.ndim == 4 else starts[:, :, None], float("-inf"))
