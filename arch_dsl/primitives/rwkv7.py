"""RWKV-7: a time mix whose state each token decays, removes from and adds to, channel by channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Annotated, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archlab import kernels
from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import ProjectionNotation, Projections
from archlab.arch_dsl.language.spec import Count, Range
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Gate, Norm, Scale, check_sites, place_of, site_cost
from archlab.arch_dsl.parts.layers import Initializer, Linear, constant, parameter, undecayed, writing
from archlab.arch_dsl.parts.saved_for_backward import by_periods, kept_by
from archlab.arch_dsl.parts.state import shifted
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule, linear
from archlab.arch_dsl.primitives.norms import LayerNorm
from archlab.arch_dsl.primitives.token_shift import between, kernel_of_shifts, share, shifted_size
from archlab.kernels.activations import at_least_float32
from archlab.kernels.wkv7 import WIDEST

NAMES = ("receptance", "key", "value", "output")
STRONGEST = -0.6065306597126334  # -exp(-1/2): log w is this times a sigmoid
RANKS = {"decay": 2.5, "rate": 2.5, "value": 1.7, "gate": 5.0}  # times the root of d_model, in steps of 32
SHARES = {"receptance": 0.2, "decay": 0.9, "key": 0.7, "value": 0.7, "rate": 0.9, "gate": 0.2}

Rank = Annotated[int, Range(min=0)]


@Branch.register("rwkv7")
class RWKV7(Sublayer):
    """S_t = Diag(w_t) S_(t-1) - (a_t * kappa_t) (S_(t-1)^T kappa_t)^T + k_t v_t^T per head, of which S_t^T r_t is read
    and gated, then one output map: the time mix of RWKV-7 (arXiv:2503.14456, section 4).

    All maps read mu x_t + (1 - mu) x_(t-1) with a learned mu of their own. The log decay is -exp(-1/2) sigmoid(d), the
    rate a sigmoid, the gate sigmoid(x W_1) W_2; d, the rate and the value's share come from maps of low rank with a
    bias, the decay's with a tanh between. The key that removes is kappa = k * xi / |k * xi|, the one that is written
    k * (1 + (a - 1) alpha). Values are mixed with those of the first layer that has this branch, v + (v_1 - v) *
    sigmoid(share). `bonus` adds (r . (rho * k)) v to what is read.

    Ranks are by default those of its code, which follow d_model. At 0 a map is left out: decay and rate are then
    learned constants, values their own, the outputs not gated. `decay` and `rate` say whether they are one per channel
    or one per head. All start as published but for the four large maps, which start as a model's do; those named in
    `zero` start at zero (as published: output). `sdpa` acts on what each head reads, before the bonus. The state runs
    on from document to document.
    """

    ops: ClassVar[tuple[str, ...]] = ("wkv7", "token_shift")
    recurrent: ClassVar[bool] = True
    by_layer: ClassVar[bool] = True
    examples = (
        {"head_dim": 8, "pre": ["rmsnorm"]},
        {"head_dim": 8, "decay_rank": 3, "rate_rank": 4, "value_rank": 2, "gate_rank": 5, "zero": ["output"],
         "sdpa": [{"type": "rmsnorm"}, {"type": "gate"}], "pre": ["rmsnorm"], "post": ["gate"]},
        {"head_dim": 8, "decay_rank": 0, "rate_rank": 0, "value_rank": 0, "gate_rank": 0, "bonus": False},
        {"head_dim": 8, "decay": "head", "rate": "head", "pre": ["rmsnorm"]},
    )  # fmt: skip
    head_dim: Count = 64
    decay: Literal["channel", "head"] = "channel"
    decay_rank: Rank | None = None
    rate: Literal["channel", "head"] = "channel"
    rate_rank: Rank | None = None
    value_rank: Rank | None = None
    gate_rank: Rank | None = None
    bonus: bool = True
    zero: Annotated[Projections, ProjectionNotation(*NAMES)] = False
    sdpa: tuple[Norm | Gate | Scale, ...] = (LayerNorm(per_head=True, eps=64e-5),)

    def resolve(self, ctx: BuildContext) -> Self:
        root = ctx.d_model**0.5
        ranks = {name: max(round(factor * root / 32) * 32, 32) for name, factor in RANKS.items()}
        given = {name: getattr(self, f"{name}_rank") for name in RANKS}
        if ctx.n_layers == 1:
            ranks["value"] = 0
        return self.replace(**{f"{n}_rank": ranks[n] if rank is None else rank for n, rank in given.items()})

    def rank(self, name: str) -> int:
        """The rank of a map; the spec must be resolved."""
        found: int = getattr(self, f"{name}_rank")
        return found

    def mixes(self) -> list[str]:
        """What reads a mix with the token before of its own; the spec must be resolved."""
        return [name for name in SHARES if name in NAMES or self.rank(name)]

    def grain(self, name: str, ctx: BuildContext) -> int:
        """How many decays or rates there are."""
        return ctx.d_model if getattr(self, name) == "channel" else ctx.d_model // self.head_dim

    def heads(self, ctx: BuildContext) -> BuildContext:
        """The context of what heads read."""
        return ctx.where(heads=ctx.d_model // self.head_dim, width=self.head_dim, held=False)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """The FLOPs of the recurrent form, 2 for each element of the state to read, to remove and twice to write; in
        `flops_model` one more for the decay, which is no product of matrices."""
        spec, size, d_model = self.resolve(ctx), tokens * ctx.d_model, ctx.d_model
        heads, mixes = d_model // self.head_dim, spec.mixes()
        kept = self.read(ctx, tokens) + shifted_size(d_model, tokens)
        parts = {"shift": Cost(parameters=len(mixes) * d_model, activations=kept, cache=d_model)}
        for name in NAMES[:3]:
            parts[f"{name}_projection"] = self.map_cost(name, tokens, d_model, d_model, size)
        parts |= spec.low_rank_costs(ctx, tokens)
        gate = parts.pop("gate", Cost())
        elements = d_model * self.head_dim
        state = by_periods(partial(_kept, heads, self.head_dim), tokens, PERIOD)
        parts["wkv"] = Cost(  # of keys k, k xi and its length, twice; a - 1, and what k is multiplied by
            parameters=2 * d_model,
            flops_matmul=8 * tokens * elements,
            flops_model=9 * tokens * elements,
            activations=4 * size + 2 * tokens * heads + state,
            cache=elements,
        )
        parts["sdpa"] = site_cost(self.sdpa, self.heads(ctx), "sdpa", tokens)
        if self.bonus:  # r, k, their product, its sum with rho, v
            parts["bonus"] = Cost(parameters=d_model, activations=4 * size + tokens * heads)
        if spec.gate_rank:
            parts["gate"] = gate.keeping(2 * size)
        parts["output_projection"] = self.map_cost("output", tokens, d_model, d_model, size)
        return Cost.total(self.outer_cost(ctx, tokens) | parts)

    def low_rank_costs(self, ctx: BuildContext, tokens: int) -> dict[str, Cost]:
        """The maps of low rank, by what they give; the spec must be resolved."""
        found = {}
        for name in RANKS:
            outputs = self.grain(name, ctx) if name in ("decay", "rate") else ctx.d_model
            rank, bias = self.rank(name), name != "gate"
            opened = {"gate": 0, "value": 2}.get(name, 1) * outputs  # sigmoids, and values before they are mixed
            if rank and not (name == "value" and self.is_first(ctx)):
                read = tokens * ctx.d_model if name != "value" else 0  # that of values is read by their own map
                inner = Cost.product(tokens, ctx.d_model, rank).keeping(read)
                outer = Cost.product(tokens, rank, outputs, bias).keeping(tokens * (rank + opened))
                found[name] = Cost.total({"inner": inner, "outer": outer})
            elif name in ("decay", "rate"):
                found[name] = Cost(parameters=outputs, activations=outputs)
            elif rank and not self.bonus:
                found[name] = Cost(activations=tokens * outputs)  # the first layer's values
        return found

    def is_first(self, ctx: BuildContext) -> bool:
        """Whether no layer before this one has it."""
        owner: str = ctx.shared.setdefault(f"first {place_of(ctx)}", ctx.path)
        return owner == ctx.path

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        found = super().check(ctx, path)
        if ctx.d_model % self.head_dim:
            return found
        return found + check_sites(self, {"sdpa": self.heads(ctx)}, path)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.d_model % self.head_dim:
            yield "head_dim", f"heads of {self.head_dim} channels do not make up d_model {ctx.d_model}"
        if self.value_rank and ctx.n_layers == 1:
            yield "value_rank", "is that of a map which mixes in the first layer's values, and there is no second layer"


PERIOD = 32  # the tokens of a chunk of the recurrence


@lru_cache(maxsize=4096)
def _kept(heads: int, width: int, tokens: int) -> int:
    """What the recurrence keeps for the backward pass as it is computed on a CPU."""
    names = ("r", "k", "v", "log_decay", "removal", "rate")
    recur = kernels.select("wkv7", kernels.Device.parse("cpu"), torch.float32)
    return kept_by(recur.call, dict.fromkeys(names, (1, tokens, heads, width)))


def kept(x: Tensor, call: Call) -> Tensor:
    """0 at padding, which leaves the state as it is."""
    return x if call.padding is None else x.masked_fill(call.padding[..., None, None], 0)


class _LowRank(nn.Module):
    """act(x W_1) W_2 + b; without a rank b alone."""

    def __init__(self, ctx: BuildContext, rank: int, outputs: int, start: Initializer | None) -> None:
        super().__init__()
        self.inner = Linear(ctx.d_model, rank, std=0.0) if rank else None
        self.outer = Linear(rank, outputs, std=0.1 * outputs**-0.5) if rank else None
        self.base = parameter((outputs,), start) if start is not None else None

    def forward(self, x: Tensor) -> Tensor:
        assert self.inner is not None and self.outer is not None
        out: Tensor = self.outer(self.inner(x))
        return out if self.base is None else out + self.base


class _Shifted(_LowRank):
    """The same of a mix of its own of the copy and the one before it, with an activation between."""

    def __init__(
        self, spec: RWKV7, ctx: BuildContext, name: str, outputs: int, start: Initializer | None, activation: str
    ) -> None:
        super().__init__(ctx, spec.rank(name), outputs, start)
        self.mix = _mix(ctx, name) if spec.rank(name) else None
        self.activation = function_of(activation)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, before: Tensor | None, shift: Callable[..., Tensor] | None
    ) -> Tensor:
        if self.mix is None or self.inner is None or self.outer is None:
            assert self.base is not None
            return self.base
        out: Tensor = self.outer(self.activation(self.inner(between(before, hidden, self.mix, shift))))
        return out if self.base is None else out + self.base


def _mix(ctx: BuildContext, name: str) -> nn.Parameter:
    """mu of one map."""
    return parameter((ctx.d_model,), share(ctx.d_model, SHARES[name] * (1 - ctx.depth / ctx.n_layers)))


class _RWKV7(SublayerModule, of=RWKV7):
    # B batch, T time, H heads, D head_dim; C channels of all heads
    def __init__(self, spec: RWKV7, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        width, first = ctx.d_model, spec.is_first(ctx)
        self.receptance_projection = linear(spec, "receptance", width, width, ctx.std)
        self.key_projection = linear(spec, "key", width, width, ctx.std)
        self.value_projection = linear(spec, "value", width, width, ctx.std * ctx.gain)
        self.output_projection = writing(linear(spec, "output", width, width, ctx.residual_std))
        self.receptance_share, self.key_share, self.value_share = (_mix(ctx, name) for name in NAMES[:3])
        spans = {name: spec.head_dim if getattr(spec, name) == "channel" else 1 for name in ("decay", "rate")}
        decays, rates = _decays(ctx, spans["decay"]), _rates(spans["rate"])
        self.decay = _Shifted(spec, ctx, "decay", spec.grain("decay", ctx), decays, "tanh")
        self.rate = _Shifted(spec, ctx, "rate", spec.grain("rate", ctx), rates, "identity")
        self.gate = _Shifted(spec, ctx, "gate", width, None, "sigmoid") if spec.gate_rank else None
        self.shared_value = (
            _LowRank(ctx, spec.rank("value"), width, _ramp(width, 0.73, -0.4))
            if (spec.value_rank and not first)
            else None
        )
        self.removal, self.replacement = (
            parameter((width,), _ramp(width, 0.71, -0.1)),
            parameter((width,), constant(1.02)),
        )
        self.bonus = undecayed((width // spec.head_dim, spec.head_dim), constant(-0.04)) if spec.bonus else None
        self.add_sites(spec, {"sdpa": spec.heads(ctx)})
        self.wkv, self.shift = ctx.select("wkv7", wide=spec.head_dim > WIDEST), kernel_of_shifts(ctx)
        self.head_dim, self.carried = spec.head_dim, place_of(ctx)
        self.gives = bool(spec.value_rank) and first

    def update(self, stream: Tensor, call: Call) -> Tensor:
        hidden = self.pre(stream, call, iter(()))
        gates = [*self.sdpa.projections(), *self.post.projections()]
        products = iter(self.products(hidden, gates) if gates else ())
        fused = self.shift is not None and call.held is None and call.padding is None
        before = None if fused else shifted(hidden, call, self.path, what=".shift")
        return self.post(self.mixed(hidden, before, products, call), call, products)  # type: ignore[no-any-return]

    def mixed(self, hidden: Tensor, before: Tensor | None, products: Iterator[Tensor], call: Call) -> Tensor:
        """The update from the normed copy and the one before it `[batch, time, d_model]`, None with a `shift`."""
        r_BTC = self.receptance_projection(between(before, hidden, self.receptance_share, self.shift))
        k_BTC = self.key_projection(between(before, hidden, self.key_share, self.shift))
        log_w = self.per_head(STRONGEST * at_least_float32(self.decay(hidden, before, self.shift)).sigmoid(), r_BTC)
        rate = self.per_head(self.rate(hidden, before, self.shift).sigmoid(), r_BTC)
        removal = F.normalize(self.heads_of(k_BTC * self.removal), dim=-1)
        r_BTHD, v_BTHD = self.heads_of(r_BTC), self.heads_of(self.values(hidden, before, call))
        k_BTHD = self.heads_of(k_BTC * (1 + (rate.flatten(-2) - 1) * self.replacement))
        if call.watch is not None:
            call.watch.tell("decay", f"{self.path}.decay", call.padding, log_f=log_w)
        state = None if call.held is None else call.held.get(self.path)
        o_BTHD, last = self.wkv(r_BTHD, kept(k_BTHD, call), v_BTHD, kept(log_w, call), kept(removal, call), rate, state)
        if call.held is not None:
            call.held[self.path] = last
        if call.watch is not None:
            call.watch.tell("heads", self.path, call.padding, output=o_BTHD)
        o_BTHD = self.sdpa(o_BTHD, call, products)
        if self.bonus is not None:
            o_BTHD = o_BTHD + (r_BTHD * k_BTHD * self.bonus).sum(-1, keepdim=True) * v_BTHD
        o_BTC = o_BTHD.flatten(-2)
        if self.gate is not None:
            o_BTC = o_BTC * self.gate(hidden, before, self.shift)
        return self.output_projection(o_BTC)  # type: ignore[no-any-return]

    def values(self, hidden: Tensor, before: Tensor | None, call: Call) -> Tensor:
        """Values with their share of the first layer's, which that layer leaves in the call."""
        x = between(before, hidden, self.value_share, self.shift)
        own: Tensor = self.value_projection(x)
        if self.gives:
            call.across[self.carried] = own
        if self.shared_value is None:
            return own
        return torch.lerp(own, call.across[self.carried], self.shared_value(x).sigmoid().to(own.dtype))

    def heads_of(self, x: Tensor) -> Tensor:
        """`[batch, time, heads, head_dim]` of all channels."""
        return x.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-any-return]

    def per_head(self, x: Tensor, like: Tensor) -> Tensor:
        """`[batch, time, heads, head_dim]` of what is one per channel or per head, of each token or of all."""
        heads = like.shape[-1] // self.head_dim
        whole: Tensor = x.unflatten(-1, (heads, -1)).expand(*like.shape[:2], heads, self.head_dim)
        return whole


# Initial values by depth and channel, as in the code of the published models (RWKV-v7)


def _ramp(width: int, middle: float, rise: float) -> Initializer:
    """A line through all channels."""
    last, low = max(width - 1, 1), middle - rise / 2
    return lambda value, generator: value.fill_(1.0).cumsum_(0).sub_(1).div_(last).mul_(rise).add_(low)


def _from(values: Callable[[Tensor], Tensor]) -> Initializer:
    """Fills with a function of the index of each number, to four digits, as an export writes each of them."""

    def fill(value: Tensor, generator: torch.Generator) -> None:
        index = torch.arange(value.shape[0], dtype=torch.float64, device="cpu")
        value.copy_(values(index).round(decimals=4))

    return fill


def _line(index: Tensor) -> Tensor:
    """From 0 to 1."""
    return index / max(len(index) - 1, 1)


def _zigzag(index: Tensor, head_dim: int) -> Tensor:
    """From -1 to 1 in each head, each number times its own size; 0 where a head has one."""
    if head_dim == 1:
        return torch.zeros_like(index)
    inside = index % head_dim * (2 / (head_dim - 1)) - 1
    return inside * inside.abs()


def _decays(ctx: BuildContext, head_dim: int) -> Initializer:
    """d: from -5.5 to 0.5, more slowly in deeper layers, and up to 2.5 less or more in each head."""
    power = 1 + (ctx.depth / max(ctx.n_layers - 1, 1)) ** 0.3
    return _from(lambda index: 6 * _line(index) ** power - 5.5 + 2.5 * _zigzag(index, head_dim))


def _rates(head_dim: int) -> Initializer:
    return _from(lambda index: 0.4 * (_line(index) - 0.5) - 0.19 + 0.3 * _zigzag(index, head_dim))
