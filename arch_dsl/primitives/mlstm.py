"""mLSTM: linear attention that writes by an exponential gate, and divides what it reads by a normalizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab import kernels
from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Decay, Module
from archlab.arch_dsl.parts.layers import Linear, equal_to, parameter
from archlab.arch_dsl.parts.saved_for_backward import by_periods, kept_by, kept_of
from archlab.arch_dsl.primitives.decays import Decays, over_tokens, stepped
from archlab.arch_dsl.primitives.linear_attention import PERIOD, LinearAttention, Sizes, _LinearAttention
from archlab.kernels.activations import at_least_float32


@Decay.register("sigmoid")
class Sigmoid(Decay):
    """log f_h = logsigmoid(act(w_h . x + b_h)) for each head h, with act the `function`: the forget gate of mLSTM
    (arXiv:2405.04517, eq. 26). xLSTM 7B caps it: `function: 15 * tanh(x / 15)` (arXiv:2503.13427, section 3.2).

    w starts at 0, and b evenly spaced from `first` in the first head to `last` in the last one, as in its code.
    """

    examples = ({}, {"function": "2 * tanh(x / 2)", "first": 1.5, "last": 3.0})

    function: Activation = "identity"
    first: float = 3.0
    last: float = 6.0

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        heads = ctx.heads or 1
        kept = (kept_of(self.function)[0] + 2) * tokens * heads  # two of logsigmoid
        return Cost.product(tokens, ctx.hidden, heads, bias=True).keeping(kept)


class _Sigmoid(Module, of=Sigmoid):
    def __init__(self, spec: Sigmoid, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        heads = ctx.heads or 1
        self.projection = Linear(ctx.hidden, heads, std=0.0, bias=True)
        self.projection.bias = parameter((heads,), equal_to(torch.linspace(spec.first, spec.last, heads)))
        self.function = function_of(spec.function)

    def projections(self) -> list[Linear]:
        return [self.projection]

    def forward(self, products: Iterator[Tensor], call: Call) -> Decays:
        return F.logsigmoid(self.function(at_least_float32(next(products)))), None


@Branch.register("mlstm")
class MLSTM(LinearAttention):
    """o_t = scale C_t^T q_t / max(|scale n_t . q_t|, 1) per head, with C_t = f_t C_(t-1) + i_t k_t v_t^T and n_t =
    f_t n_(t-1) + i_t k_t, then one output map: the matrix memory of xLSTM (arXiv:2405.04517, eq. 19 to 27).

    i_t = exp(act(w_h . x + b_h)) with act the `input_gate`; w starts at 0, b at `start`. f is the `decay`, of any kind.
    xLSTM 7B caps both gates: `input_gate: 15 * tanh(x / 15)`, with `start: -10` (arXiv:2503.13427, section 3.2).

    C and n are held divided by exp(m_t), with m_t = max(log f_t + m_(t-1), log i_t, 0), and the normalizer is
    max(|n_t . q_t|, exp(-m_t)): the same outputs, and no factor above 1 (eq. 15). The 0 is not in the paper; it keeps
    exp(-m_t) from overflowing. The other fields are those of `linear_attention`. The paper norms each head's output and
    gates it: `sdpa: [groupnorm, gate]`.
    """

    order: ClassVar[tuple[str, ...]] = (
        "pre", "post", "join", "heads", "key_heads", "head_dim", "value_dim", "scale", "decay", "input_gate", "start",
        "documents", "bias", "zero", "query", "key", "value", "sdpa", "share",
    )  # fmt: skip
    rule: ClassVar[Literal["add", "delta"]] = "add"  # type: ignore[misc]  # no fields: what mLSTM has otherwise
    beta: ClassVar[str] = "sigmoid"  # type: ignore[misc]
    keys: ClassVar[Literal["hidden", "decay"]] = "hidden"  # type: ignore[misc]
    skip: ClassVar[bool] = False  # type: ignore[misc]
    examples = (
        {"heads": 2, "pre": ["rmsnorm"]},
        {"heads": 4, "key_heads": 2, "head_dim": 5, "value_dim": 6, "bias": True, "input_gate": "2 * tanh(x / 2)",
         "pre": ["rmsnorm"]},
        {"heads": 2, "decay": "low_rank", "start": 1.0, "documents": True, "value_dim": 6, "pre": ["rmsnorm"]},
        {"heads": 2, "decay": "constant", "zero": ["output"], "scale": 1.0, "sdpa": ["groupnorm", "gate"]},
    )  # fmt: skip
    decay: Decay = Sigmoid()
    input_gate: Activation = "identity"
    start: float = 0.0

    @property
    def kind(self) -> Literal["token", "channel"]:
        """What the stabilized decay is one for each of."""
        return "channel" if self.decay.channels else "token"

    def state(self, sizes: Sizes) -> int:
        """The elements of C and n of all heads."""
        return sizes.heads * sizes.head_dim * (sizes.value_dim + 1)

    def kept(self, sizes: Sizes, learned: bool, tokens: int) -> int:
        return by_periods(partial(_kept, sizes, self.kind, learned), tokens, PERIOD)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        heads = self.sizes(ctx.d_model).heads
        own, result = kept_of(self.input_gate)
        gate = Cost.product(tokens, ctx.d_model, heads, bias=True).keeping((own + result) * heads * tokens)
        parts = {"input_projection": gate, "stabilizer": Cost(cache=heads)}
        return Cost.total(super().cost(ctx, tokens).children | parts)


@lru_cache(maxsize=4096)
def _kept(sizes: Sizes, kind: str, learned: bool, tokens: int) -> int:
    """What the recurrence keeps for the backward pass as it is computed on a CPU."""
    heads, groups, keys, values = sizes
    per_token = (1, tokens, heads)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (1, tokens, groups, keys),
        "k": (1, tokens, groups, keys),
        "v": (*per_token, values),
        "log_f": (*per_token, keys) if kind == "channel" else per_token,
        "log_i": per_token,
    }
    recur = kernels.select("linear_recurrence", kernels.Device.parse("cpu"), torch.float32, decay=kind, delta=False)
    return kept_by(partial(normalized, recur.call), shapes, fixed="" if learned else "log_f")


LARGEST = 80.0  # exp(-80) is no zero in float32
RESET = -1e4  # stands for log f = -inf, which has no sums


def stabilizers(log_f: Tensor, log_i: Tensor, before: Tensor) -> Tensor:
    """m_t `[batch, time, heads]` = max(log f_t + m_(t-1), log i_t, 0), of gates so shaped and m_0 `[batch, heads]`.

    With F the sums of log f that is F_t + max(m_0, max over s <= t of max(log i_s, 0) - F_s), without a loop; sums are
    in float64. It has no gradient, as no output depends on it.
    """
    sums = log_f.detach().clamp(min=RESET).double().cumsum(1)
    peaks = (log_i.detach().clamp(min=0).double() - sums).cummax(1).values
    return (sums + torch.maximum(peaks, before[:, None])).to(before.dtype)


def normalized(
    recur: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor,
    state: Tensor | None = None, m: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k `[B,T,G,Dk]`, v `[B,T,H,Dv]`, log f `[B,T,H]` or `[B,T,H,Dk]` and log i `[B,T,H]` give the outputs
    `[B,T,H,Dv]`, the last C with n as its last column `[B,H,Dk,Dv+1]`, both over exp(m), and the last m `[B,H]`."""
    held = at_least_float32(log_i.new_zeros(log_i.shape[0], log_i.shape[2])) if m is None else m
    m_BTH = stabilizers(log_f if log_f.ndim == 3 else log_f.amax(-1), log_i, held)
    change = torch.cat([held[:, None], m_BTH[:, :-1]], 1) - m_BTH
    log_decay = log_f + (change if log_f.ndim == 3 else change[..., None])
    share = (log_i - m_BTH).exp()[..., None]
    written = torch.cat([v * share, share], -1).to(v.dtype)
    out, last = recur(q, k, written, log_decay=log_decay, state=state, scale=scale)
    read, weight = at_least_float32(out).split([v.shape[-1], 1], -1)
    least = (-m_BTH.clamp(max=LARGEST)).exp()[..., None]
    return (read / torch.maximum(weight.abs(), least)).to(v.dtype), last, m_BTH[:, -1].clone()


class _MLSTM(_LinearAttention, of=MLSTM):
    def __init__(self, spec: MLSTM, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.input_projection = Linear(ctx.d_model, self.heads, std=0.0, bias=True, start=spec.start)
        self.input_gate = function_of(spec.input_gate)

    def writes(self) -> list[Linear]:
        return [self.input_projection]

    def opening(self, products: Iterator[Tensor]) -> Tensor:
        """log i `[batch, time, heads]`."""
        opened: Tensor = self.input_gate(at_least_float32(next(products)))
        return opened

    def recurrent(
        self, q_BTGD: Tensor, k_BTGD: Tensor, v_BTHV: Tensor, log_f: Tensor | None, step: Tensor | None,
        beta: Tensor | None, call: Call,
    ) -> Tensor:  # fmt: skip
        assert beta is not None
        written = stepped(v_BTHV, step)
        log_i = beta if call.padding is None else beta.masked_fill(call.padding[..., None], 0)
        log_f = over_tokens(log_f, v_BTHV)
        state = None if call.held is None else call.held.get(self.path)
        m = None if call.held is None else call.held.get(f"{self.path}.stabilizer")
        out, state, m = normalized(self.recur, q_BTGD, k_BTGD, written, log_f, log_i, state, m, self.scale)
        if call.held is not None:
            call.held[self.path], call.held[f"{self.path}.stabilizer"] = state, m
        return out
