"""The forget gate: attention that discounts what lies before the tokens it chose to forget at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archlab.arch_dsl.language.spec import Positive, Range, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Score
from archlab.arch_dsl.parts.layers import Linear, equal_to, parameter
from archlab.arch_dsl.parts.state import recent
from archlab.kernels.activations import at_least_float32
from archlab.kernels.attention.pruning import reach


@Score.register("forget_gate")
class ForgetGate(Score):
    """s_ij + sum of log f_l over j < l <= i with f_l = sigmoid(w_h . x_l + b_h): Forgetting Transformer
    (arXiv:2503.02130, eq. 11-13).

    x is the branch's input. With `input: learned` f is sigmoid(b_h) for all tokens, with `fixed` also b_h stays. b_h
    starts at 0, or so that head h forgets in T_h tokens, f = exp(-1 / T_h), with T log-spaced from `t_min` to `t_max`.

    With `prune` a query leaves out the keys that its gates have closed: those whose weights, which norms and gates
    bound, are together less than `prune` (arXiv:2504.06949, section 3.2, where it is e^-10 = 4.5e-5). A CUDA device
    computes only the tiles that are left.
    """

    examples = (
        {},
        {"input": "hidden", "t_min": 2.0, "t_max": 9.0},
        {"input": "learned", "t_min": 2.0, "t_max": 20.0},
        {"input": "fixed", "t_min": 2.0, "t_max": 20.0},
        {"prune": 0.5},
    )

    version: ClassVar[int] = 2
    positional: ClassVar[bool] = True
    fading: ClassVar[bool] = True
    input: Literal["hidden", "learned", "fixed"] = "hidden"
    t_min: Positive | None = None
    t_max: Positive | None = None
    prune: Annotated[float, Range(above=0, below=1)] | None = added(default=None)

    def build(self, ctx: BuildContext) -> nn.Module:
        return (_HiddenForgetGate if self.input == "hidden" else _ForgetGate)(self, ctx)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        heads = ctx.heads or 1
        closed = 0 if self.prune is None else tokens * heads + heads * tokens * tokens // 4  # a byte per pair
        if self.input == "hidden":
            return Cost.product(tokens, ctx.hidden, heads, bias=True).keeping(2 * tokens * heads + closed)
        own = Cost(parameters=heads, activations=tokens * heads) if self.input == "learned" else Cost()
        return own.keeping(closed)

    def per_key(self, ctx: BuildContext) -> int:
        return (ctx.heads or 1) if self.input == "hidden" else 0

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.ahead:
            yield "", "discounts the past alone, and the mask reads ahead"
        elif self.t_min is None and self.t_max is None:
            if self.input == "fixed":
                yield "input", "a fixed forget gate needs t_min and t_max, the tokens in which its heads forget"
        elif self.t_min is None or self.t_max is None:
            yield "t_max" if self.t_min is None else "t_min", "t_min and t_max are given together"
        elif self.t_min > self.t_max:
            yield "t_max", f"must be at least t_min {self.t_min:g}, found {self.t_max:g}"

    def start(self, heads: int) -> Tensor:
        """The initial b `[heads]`: -log(expm1(1 / T)), so that log sigmoid(b) = -1 / T."""
        if self.t_min is None or self.t_max is None:
            return torch.zeros(heads)
        cpu = torch.device("cpu")  # where numbers are, whatever device a model is built on
        ends = torch.tensor([self.t_min, self.t_max], dtype=torch.float64, device=cpu).log()
        times = torch.linspace(float(ends[0]), float(ends[1]), heads, dtype=torch.float64, device=cpu).exp()
        return (-(1 / times).expm1().log()).float()


class _ForgetGate(Module):
    bias: Tensor

    def __init__(self, spec: ForgetGate, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.path, self.window = ctx.path, ctx.window
        self.prune, self.scale = spec.prune, ctx.logit_scale
        start = spec.start(ctx.heads or 1)
        if spec.input == "fixed":
            self.register_buffer("bias", start, persistent=False)
        elif spec.input == "learned":
            self.bias = parameter(start.shape, equal_to(start))

    def forward(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        sums = self.decay(q, k, call)
        return _discounts(sums, q.shape[1], self.reach(q, k, sums))

    def decay(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        logs = F.logsigmoid(at_least_float32(self.bias)).expand(1, k.shape[1], -1)
        if call.watch is not None:
            call.watch.tell("decay", self.path, call.padding, log_f=logs)
        return _sums(logs)

    def reach(self, q: Tensor, k: Tensor, sums: Tensor) -> Tensor | None:
        """The largest sum of a key that each query reads `[batch, heads, time]`; None if it reads all."""
        if self.prune is None:
            return None
        return reach(q.transpose(1, 2), k.transpose(1, 2), sums, self.scale, self.prune, self.window)


class _HiddenForgetGate(_ForgetGate):
    def __init__(self, spec: ForgetGate, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        start = spec.start(ctx.heads or 1)
        self.projection = Linear(ctx.hidden, len(start), std=ctx.std)
        self.projection.bias = parameter(start.shape, equal_to(start))

    def forward(self, q: Tensor, k: Tensor, call: Call, projected: Tensor) -> Tensor:  # type: ignore[override]
        sums = self.decay(q, k, call, projected)
        return _discounts(sums, projected.shape[1], self.reach(q, k, sums))

    def decay(self, q: Tensor, k: Tensor, call: Call, projected: Tensor) -> Tensor:  # type: ignore[override]
        logs = F.logsigmoid(at_least_float32(projected))
        if call.watch is not None:
            call.watch.tell("decay", self.path, call.padding, log_f=logs)
        if call.padding is not None:
            logs = logs.masked_fill(call.padding[..., None], 0)  # which forgets nothing
        return _sums(recent(call, self.path, logs, self.window))


def _sums(logs: Tensor) -> Tensor:
    """log f `[batch, keys, heads]` summed up to each key `[batch, heads, keys]`."""
    return logs.cumsum(1).transpose(1, 2)


def _discounts(sums: Tensor, queries: int, near: Tensor | None) -> Tensor:
    """The same from j + 1 to i `[batch, heads, i, j]` for the last `queries` keys i; -inf beyond what is `near`."""
    between = sums[..., -queries:, None] - sums[..., None, :]
    return between if near is None else between.masked_fill(sums[..., None, :] > near[..., None], float("-inf"))
