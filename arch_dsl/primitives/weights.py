"""Weights of attention: what it makes of its logits before it reads the values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.arch_dsl.parts.context import BuildContext, Cost
from archlab.arch_dsl.parts.families import Module, Weights
from archlab.arch_dsl.parts.layers import constant, undecayed
from archlab.kernels.activations import at_least_float32
from archlab.kernels.attention import Pattern


@Weights.register("softmax")
class Softmax(Weights):
    """a_ij = exp(s_ij) / (sum of exp(s_il) over the keys l that query i reads) (arXiv:1706.03762, eq. 1)."""


@Weights.register("sigmoid")
class Sigmoid(Weights):
    """a_ij = sigmoid(s_ij + b), each key by itself: sigmoid attention (arXiv:2409.04431, section 2).

    `bias` is the number b, by default -log(n) with n the most keys that a query can read: `max_positions`, or the
    window of the mask. It is the same for all queries, whatever they read, and so in decoding.
    """

    examples = ({}, {"bias": -1.0})
    bias: float | None = None

    def start(self, ctx: BuildContext) -> float:
        """The number b."""
        if self.bias is not None:
            return self.bias
        assert ctx.max_positions is not None
        return -math.log(min(ctx.max_positions, ctx.window or ctx.max_positions))

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.bias is None and ctx.max_positions is None:
            yield "bias", "is -log(max_positions) by default, which nothing gives here; give a number"


@Weights.register("stick_breaking")
class StickBreaking(Weights):
    """a_ij = b_ij prod (1 - b_il) over j < l < i with b = sigmoid(s): keys take shares of a stick, the latest first
    (arXiv:2410.17980, section 2).

    Keys that the mask hides take nothing. A query does not read its own token; with `own` it does, first of all. What
    no key took, r_i = prod (1 - b_il) over all l, is lost with `remainder: none`; `value` adds r_i v_i, the value of
    the own token, `learned` r_i c with a learned vector c for each head, zero at first: both as in the authors' code.
    """

    examples = ({}, {"remainder": "value"}, {"remainder": "learned", "own": True})
    squares: ClassVar[int] = 2
    own: bool = False
    remainder: Literal["none", "value", "learned"] = "none"

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        learned = ctx.channels if self.remainder == "learned" else 0
        return Cost(parameters=learned, activations=0 if self.remainder == "none" else tokens * (ctx.heads or 1))

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.ahead:
            yield "", "takes keys from the query backwards, and the mask reads ahead"


class Weighing(Module):
    """Attention by plain products of all pairs: the logits, and what a member's `read` makes of them."""

    # B batch, T time, S keys, H heads, K key/value heads, G heads per key/value head, D head_dim, V value_dim
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, softcap: float | None,
        bias: Tensor | None = None, prefix: Tensor | None = None, documents: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q `[B, H, T, D]`, k `[B, K, S, D]` and v `[B, K, S, V]` give `[B, H, T, V]`; the rest is as in the kernel."""
        products = q.contiguous().unflatten(1, (k.shape[1], -1)).flatten(2, 3) @ k.contiguous().transpose(-2, -1)
        logits = at_least_float32(products).unflatten(2, (-1, q.shape[2])).flatten(1, 2) * scale
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        if bias is not None:
            logits = logits + bias
        seen = pattern.dense(q.shape[2], k.shape[2], q.device, prefix, documents, padding)
        if seen is not None:
            logits = logits + torch.where(seen, 0.0, float("-inf"))
        return self.read(logits, v.contiguous())

    def read(self, logits: Tensor, v: Tensor) -> Tensor:
        """What heads read `[B, H, T, V]`; logits `[B, H, T, S]` are -inf where a key is hidden. The last query stands
        at the last key."""
        raise TypeError(f"{type(self).__name__} reads nothing")


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """The sum of values `[B, K, S, V]` by weights `[B, H, T, S]`."""
    grouped = weights.to(v.dtype).unflatten(1, (v.shape[1], -1)).flatten(2, 3)
    out: Tensor = (grouped @ v).unflatten(2, (-1, weights.shape[2]))
    return out.flatten(1, 2)


class _Softmax(Weighing, of=Softmax):
    """For copies of it: attention itself has kernels in its place."""

    def read(self, logits: Tensor, v: Tensor) -> Tensor:
        return weighted(logits.softmax(-1), v)


class _Sigmoid(Weighing, of=Sigmoid):
    def __init__(self, spec: Sigmoid, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.bias = spec.start(ctx)

    def read(self, logits: Tensor, v: Tensor) -> Tensor:
        return weighted((logits + self.bias).sigmoid(), v)


class _StickBreaking(Weighing, of=StickBreaking):
    def __init__(self, spec: StickBreaking, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.own, self.remainder = spec.own, spec.remainder
        if spec.remainder == "learned":
            self.vectors = undecayed((ctx.heads or 1, ctx.width), constant(0.0))

    def read(self, logits: Tensor, v: Tensor) -> Tensor:
        queries, keys = logits.shape[-2:]
        if not self.own:
            before = torch.ones(queries, keys, dtype=torch.bool, device=logits.device).tril(keys - queries - 1)
            logits = logits + torch.where(before, 0.0, float("-inf"))
        # log b_ij + sum of log(1 - b_il) = s_ij - sum of log(1 + exp(s_il)) from l = j on; exact up to the threshold
        spent = F.softplus(logits, threshold=40.0).flip(-1).cumsum(-1).flip(-1)
        out = weighted((logits - spent).exp(), v)
        if self.remainder == "none":
            return out
        rest: Tensor = (-spent[..., :1]).exp().to(out.dtype)
        if self.remainder == "learned":
            return out + rest * self.vectors[:, None].to(out.dtype)
        own: Tensor = rest.unflatten(1, (v.shape[1], -1)) * v[:, :, None, -queries:]
        return out + own.flatten(1, 2)
