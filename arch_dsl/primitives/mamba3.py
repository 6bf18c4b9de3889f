"""Mamba-3: linear attention that writes by a trapezoidal rule, and turns keys and queries by angles of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab import kernels
from archlab.arch_dsl.language.notation import SizeNotation
from archlab.arch_dsl.language.spec import Count, Fraction, NotNegative, Positive
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Carry, Decay, Gate, Module, Norm, Rotary, Scale
from archlab.arch_dsl.parts.layers import Linear, constant, parameter, steps, undecayed
from archlab.arch_dsl.parts.saved_for_backward import by_periods, kept_by
from archlab.arch_dsl.parts.state import shifted
from archlab.arch_dsl.primitives.decays import Decays, over_tokens
from archlab.arch_dsl.primitives.gates import OutputGate
from archlab.arch_dsl.primitives.linear_attention import PERIOD, LinearAttention, Sizes, _LinearAttention
from archlab.arch_dsl.primitives.norms import RMSNorm
from archlab.kernels.activations import at_least_float32
from archlab.kernels.rotary.reference import turned


@Decay.register("token_rate")
class TokenRate(Decay):
    """log f_h = -max(softplus(v_h . x), floor) dt_h with the step dt_h = softplus(w_h . x + b_h), by which values are
    multiplied too: that of Mamba-2 with a rate of each token (Mamba-3, arXiv:2603.15569, and its code).

    softplus(b) starts between `dt_min` and `dt_max`, uniform in its logarithm. `mamba3` has a `floor` of 1e-4.
    """

    examples = ({}, {"floor": 0.7})
    step: ClassVar[bool] = True

    floor: NotNegative = 0.0
    dt_min: Positive = 1e-3
    dt_max: Positive = 0.1

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        heads = ctx.heads or 1
        # the arguments of both softplus, the step, the rate, and the rate before the floor
        kept = (4 + bool(self.floor)) * tokens * heads
        return Cost.product(tokens, ctx.hidden, 2 * heads).keeping(kept, parameters=heads)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.dt_max < self.dt_min:
            yield "dt_max", f"must be at least dt_min {self.dt_min:g}, found {self.dt_max:g}"


class _TokenRate(Module, of=TokenRate):
    def __init__(self, spec: TokenRate, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        heads = ctx.heads or 1
        self.rate_projection = Linear(ctx.hidden, heads, std=ctx.std)
        self.projection = Linear(ctx.hidden, heads, std=ctx.std)
        self.bias = parameter((heads,), steps(spec.dt_min, spec.dt_max))
        self.floor = spec.floor

    def projections(self) -> list[Linear]:
        return [self.rate_projection, self.projection]

    def forward(self, products: Iterator[Tensor], call: Call) -> Decays:
        rate = F.softplus(at_least_float32(next(products)))
        if self.floor:
            rate = rate.clamp(min=self.floor)
        step = F.softplus(at_least_float32(next(products)) + self.bias)
        return -rate * step, step


@Branch.register("mamba3")
class Mamba3(LinearAttention):
    """h_t = f_t h_(t-1) + (1 - l_t) dt_t f_t k_(t-1) v_(t-1)^T + l_t dt_t k_t v_t^T per head, o_t = scale h_t^T q_t + D
    v_t, gated, and one output map: Mamba-3 (arXiv:2603.15569, and its code) with one input per state.

    Queries are its C, keys B, values x, the gate z. f and the step dt are those of the `decay`; one without steps has
    dt 1. The share l is a sigmoid of a map of the branch's input; with `trapezoid: false` it is 1, as in Mamba-2.

    `offset` adds a learned vector to the query and key of each head, which starts at that number. A share `rotation` of
    their channels is then turned, in pairs 2i and 2i + 1, by the sum of dt_s pi tanh(a_s) over s <= t, with angles a of
    a map that all heads share: the same as complex decays. 0 turns none. The other fields are those of
    `linear_attention`.
    """

    order: ClassVar[tuple[str, ...]] = (
        "pre", "post", "join", "heads", "key_heads", "head_dim", "value_dim", "scale", "decay", "trapezoid", "rotation",
        "offset", "skip", "documents", "bias", "zero", "query", "key", "value", "sdpa", "share",
    )  # fmt: skip
    rule: ClassVar[Literal["add", "delta"]] = "add"  # type: ignore[misc]  # no fields: what Mamba-3 has otherwise
    beta: ClassVar[str] = "sigmoid"  # type: ignore[misc]
    keys: ClassVar[Literal["hidden", "decay"]] = "hidden"  # type: ignore[misc]
    examples = (
        {"value_dim": 8, "head_dim": 6, "pre": ["rmsnorm"]},
        {"heads": 4, "key_heads": 2, "head_dim": 5, "value_dim": 6, "bias": True, "decay": "constant", "scale": 0.5,
         "rotation": 1.0, "documents": True, "pre": ["rmsnorm"]},
        {"heads": 2, "head_dim": 8, "value_dim": 6, "trapezoid": False, "decay": "mamba2", "skip": False,
         "zero": ["output"], "pre": ["rmsnorm"]},
        {"heads": 2, "head_dim": 8, "value_dim": 6, "rotation": 0.0, "offset": None, "pre": ["rmsnorm"]},
    )  # fmt: skip
    heads: Annotated[int | str, SizeNotation()] = "2x"
    key_heads: Count | None = 1
    head_dim: Annotated[int | str | None, SizeNotation(optional=True)] = 128
    value_dim: Annotated[int | str | None, SizeNotation(optional=True)] = 64
    scale: Positive | None = 1.0
    decay: Decay = TokenRate(floor=1e-4)
    trapezoid: bool = True
    rotation: Fraction = 0.5
    offset: float | None = 1.0
    skip: bool = True
    query: tuple[Carry | Gate | Norm | Rotary | Scale, ...] = (RMSNorm(eps=1e-5),)
    key: tuple[Carry | Gate | Norm | Rotary | Scale, ...] = (RMSNorm(eps=1e-5),)
    sdpa: tuple[Norm | Gate | Scale, ...] = (OutputGate(activation="silu"),)

    def angles(self, sizes: Sizes) -> int:
        """How many pairs of channels of a key are turned."""
        return int(self.rotation * sizes.head_dim) // 2

    def keeps_values(self) -> bool:
        return False  # `kept` counts them

    def kept(self, sizes: Sizes, learned: bool, tokens: int) -> int:
        stepping = bool(getattr(self.decay, "step", False))
        asked = (sizes, self.kind, stepping, learned, self.trapezoid, self.angles(sizes))
        return by_periods(partial(_kept, *asked), tokens, PERIOD)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """That of `linear_attention`, and two maps; decoding also holds the last key, value, step and angles."""
        sizes = self.sizes(ctx.d_model)
        heads, angles = sizes.heads, self.angles(sizes)
        parts = dict(super().cost(ctx, tokens).children)
        if self.trapezoid:
            before = heads * (sizes.head_dim + sizes.value_dim + 1)
            parts["share_projection"] = Cost.product(tokens, ctx.d_model, heads).keeping(0, cache=before)
        if angles:
            parts["angle_projection"] = Cost.product(tokens, ctx.d_model, angles).keeping(0, cache=heads * angles)
        if self.offset is not None:
            parts["offset"] = Cost(parameters=2 * heads * sizes.head_dim)
        return Cost.total(parts)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        yield from super().wrong(ctx)
        if self.decay.channels:
            yield "decay", f"must be one for each head, as keys are turned; {self.decay.type} has one for each channel"
        width = self.sizes(ctx.d_model).head_dim
        if self.rotation and int(self.rotation * width) < 2:
            message = f"turns pairs of channels; {self.rotation:g} of head_dim {width} are less than two (0 turns none)"
            yield "rotation", message


def turns(angle: Tensor, step: Tensor, call: Call, path: str) -> Tensor:
    """The sums of dt_s pi tanh(a_s) over s <= t `[B,T,H,A]`, of angles a `[B,T,A]` and steps dt `[B,T,H]`; decoding
    holds the last one, less whole turns."""
    path += ".angle"
    each = math.pi * at_least_float32(angle).tanh()[:, :, None] * step[..., None]
    sums = each.cumsum(1)
    if call.held is not None:
        sums = sums + call.held[path][:, None] if path in call.held else sums
        call.held[path] = sums[:, -1].remainder(2 * math.pi)
    return sums


def directed(x: Tensor, heads: int, offset: Tensor | None, angles: Tensor | None) -> Tensor:
    """Queries or keys `[B,T,G,D]` for each of `heads` `[B,T,H,D]`, with their offset `[H,D]`, turned by `[B,T,H,A]`."""
    x = x.repeat_interleave(heads // x.shape[2], 2)
    wide = at_least_float32(x)
    if offset is not None:
        wide = wide + offset
    if angles is not None:
        wide = turned(wide[..., None, :], angles.cos(), angles.sin(), "interleaved").squeeze(-2)
    return wide.to(x.dtype)


def trapezoidal(
    recur: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, call: Call,
    step: Tensor | None = None, share: Tensor | None = None, angle: Tensor | None = None,
    offsets: tuple[Tensor | None, Tensor | None] = (None, None), scale: float = 1.0, path: str = "",
) -> Tensor:  # fmt: skip
    """q, k `[B,T,G,D]`, v `[B,T,H,V]` and log f `[B,T,H]` or `[H]` give the outputs `[B,T,H,V]`.

    Beside them: the steps dt and the shares l before their sigmoid `[B,T,H]`, the angles before their tanh `[B,T,A]`,
    the offsets of queries and of keys `[H,D]`.

    What token t writes itself is read beside the state, u_t = h_t - l_t dt_t k_t v_t^T. So u_t = f_t (u_(t-1) +
    (l_(t-1) dt_(t-1) + (1 - l_t) dt_t) k_(t-1) v_(t-1)^T), a recurrence over the keys and values of the token before.
    """
    heads = v.shape[2]
    step = torch.ones_like(over_tokens(log_f, v)) if step is None else step
    if call.padding is not None:
        step = step.masked_fill(call.padding[..., None], 0)  # which moves nothing
    angles = None if angle is None else turns(angle, step, call, path)
    q, k = directed(q, heads, offsets[0], angles), directed(k, heads, offsets[1], angles)
    own, weight, k_in, v_in = None, step, k, v
    if share is not None:
        share = at_least_float32(share).sigmoid()
        own = share * step
        k_in, v_in, before = (
            shifted(x.flatten(2), call, path, what=f".{name}").unflatten(2, (heads, -1))
            for name, x in (("key", k), ("value", v), ("step", own[..., None]))
        )
        weight = log_f.exp() * (before.squeeze(-1) + (1 - share) * step)
    written = (v_in * weight[..., None]).to(v.dtype)
    state = None if call.held is None else call.held.get(path)
    out, last = recur(q, k_in, written, log_decay=log_f, state=state, scale=scale)
    if call.held is not None:
        call.held[path] = last
    if own is None:
        return out
    shares = scale * own * (at_least_float32(q) * k).sum(-1)
    return out + (shares[..., None] * v).to(out.dtype)


@lru_cache(maxsize=4096)
def _kept(sizes: Sizes, kind: str, stepping: bool, learned: bool, trapezoid: bool, angles: int, tokens: int) -> int:
    """What the recurrence keeps for the backward pass as it is computed on a CPU."""
    heads, groups, keys, values = sizes
    per_token = (1, tokens, heads)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (1, tokens, groups, keys),
        "k": (1, tokens, groups, keys),
        "v": (*per_token, values),
        "log_f": (heads,) if kind == "constant" else per_token,
    }
    shapes |= {"step": per_token} if stepping else {}
    shapes |= {"share": per_token} if trapezoid else {}
    shapes |= {"angle": (1, tokens, angles)} if angles else {}
    recur = kernels.select("linear_recurrence", kernels.Device.parse("cpu"), torch.float32, decay=kind, delta=False)
    found = kept_by(partial(trapezoidal, recur.call, call=Call()), shapes, fixed="" if learned else "log_f")
    return found - stepping * tokens * heads  # the decay counts its steps


class _Mamba3(_LinearAttention, of=Mamba3):
    def __init__(self, spec: Mamba3, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        sizes = spec.sizes(ctx.d_model)
        angles, each = spec.angles(sizes), (sizes.heads, sizes.head_dim)
        self.share_projection = Linear(ctx.d_model, sizes.heads, std=ctx.std) if spec.trapezoid else None
        self.angle_projection = Linear(ctx.d_model, angles, std=ctx.std) if angles else None
        self.offset_query = None if spec.offset is None else undecayed(each, constant(spec.offset))
        self.offset_key = None if spec.offset is None else undecayed(each, constant(spec.offset))

    def writes(self) -> list[Linear]:
        return [one for one in (self.share_projection, self.angle_projection) if one is not None]

    def opening(self, products: Iterator[Tensor]) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        """The shares and the angles, each before its activation."""
        share = None if self.share_projection is None else next(products)
        return share, None if self.angle_projection is None else next(products)

    def recurrent(  # type: ignore[override]
        self, q_BTGD: Tensor, k_BTGD: Tensor, v_BTHV: Tensor, log_f: Tensor, step: Tensor | None,
        opened: tuple[Tensor | None, Tensor | None], call: Call,
    ) -> Tensor:  # fmt: skip
        known = (step, *opened, (self.offset_query, self.offset_key), self.scale, self.path)
        return trapezoidal(self.recur, q_BTGD, k_BTGD, v_BTHV, log_f, call, *known)
