"""Attention by its formula: softmax(softcap(scale q k^T) + bias) v over the visible keys, in at least float32."""

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.attention.pattern import CAUSAL, Pattern


class Pieces(TypedDict, total=False):
    """Biases by what they consist of and the output's gate: kernels need no matrix for them and no second pass."""

    relative: Tensor | None
    decay: Tensor | None
    reach: Tensor | None
    gate: Tensor | None


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, pattern: Pattern = CAUSAL, scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, prefix: Tensor | None = None,
    documents: Tensor | None = None, padding: Tensor | None = None, **pieces: Unpack[Pieces],
) -> Tensor:  # fmt: skip
    """q `[B,Hq,T,D]`, k `[B,Hkv,S,D]`, v `[B,Hkv,S,Dv]` give `[B,Hq,T,Dv]` in q's dtype (arXiv:1706.03762 eq. 1).

    Hq is a multiple of Hkv; consecutive queries share a key head (arXiv:2305.13245). `bias` is added to the scaled
    logits and broadcasts to `[B,Hq,T,S]`; -inf hides a pair, and every query must see a key. `softcap` turns the scaled
    logits l into softcap tanh(l / softcap) before the bias (arXiv:2408.00118, section 2). `sinks` `[Hq]` are logits
    that each head's softmax counts beside those of the keys, with the value 0 (arXiv:2508.10925, section 2.2).
    `pattern` says which pairs are visible, and what `prefix` `[B]`, `documents` `[B,T]` and `padding` `[B,S]` change.

    Two biases are given by what they consist of: `relative` `[Hq or 1, 2 S - 1]` adds relative[h, i - j + S - 1] to the
    logit of query i and key j (ALiBi, T5's buckets, KERPLE; the last query stands at the last key); `decay`
    `[B or 1, Hq, S]` adds c_i - c_j with c = decay, the running sum of log f of a forget gate (arXiv:2503.02130,
    eq. 11-13). With `reach` `[B or 1, Hq, T]` query i reads only keys with c_j <= reach_i, its own among them: what
    `kernels.attention.pruning` finds the gate to have left open. `gate` `[B,Hq,T,Dv]`, or `[B,Hq,T,1]`, multiplies the
    output by its sigmoid (arXiv:2505.06708, eq. 5).
    """
    expected(q, k, v, pattern, **pieces)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        keys, values = (at_least_float32(x).repeat_interleave(groups, 1) for x in (k, v))
        logits = (at_least_float32(q) * factor) @ keys.transpose(-2, -1)
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        bias = added(q, k, bias, **pieces)
        if bias is not None:
            logits = logits + bias
        seen = pattern.dense(q.shape[-2], k.shape[-2], q.device, prefix, documents, padding)
        if seen is not None:
            logits = logits.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = at_least_float32(sinks)[:, None, None].expand(*logits.shape[:-1], 1)
            return opened(torch.cat([logits, sink], -1).softmax(-1)[..., :-1] @ values, **pieces).to(q.dtype)
        return opened(logits.softmax(-1) @ values, **pieces).to(q.dtype)


def opened(out: Tensor, gate: Tensor | None = None, **_: Any) -> Tensor:
    """out times the sigmoid of its gate, in at least float32; out itself where there is none."""
    return out if gate is None else at_least_float32(out) * at_least_float32(gate).sigmoid()


def added(
    q: Tensor, k: Tensor, bias: Tensor | None, relative: Tensor | None = None, decay: Tensor | None = None,
    reach: Tensor | None = None, **_: Any,
) -> Tensor | None:  # fmt: skip
    """The biases of all pairs, summed, as a tensor that broadcasts to `[B,Hq,T,S]`; None if there are none."""
    queries, keys = q.shape[-2], k.shape[-2]
    total = bias
    if relative is not None:
        far = by_distance(at_least_float32(relative), queries, keys)
        total = far if total is None else total + far
    if decay is not None:
        sums = at_least_float32(decay)
        between = sums[..., keys - queries :, None] - sums[..., None, :]
        if reach is not None:
            between = between.masked_fill(sums[..., None, :] > reach[..., None], float("-inf"))
        total = between if total is None else total + between
    return total


def by_distance(relative: Tensor, queries: int, keys: int) -> Tensor:
    """The bias `[H,T,S]` of which row i holds relative `[H,2S-1]` at i - j + S - 1: a copy of rows that each begin one
    element earlier, as the gradient of that is a sum, where the gradient of looking up is a loop over all pairs."""
    length = queries + keys - 1
    turned = relative.flip(-1)[:, None, :length]
    if queries == 1:
        return turned
    rows = turned.expand(-1, queries, -1).reshape(len(relative), -1)
    shifted = rows[:, queries - 1 : queries - 1 + queries * (length - 1)]
    return shifted.view(len(relative), queries, length - 1)[..., :keys]


def expected(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, relative: Tensor | None = None, decay: Tensor | None = None,
    reach: Tensor | None = None, gate: Tensor | None = None,
) -> None:  # fmt: skip
    """Raises ValueError for a relative bias, a decay, a reach or a gate of another shape, and a reach without decay."""
    heads, queries, keys = q.shape[1], q.shape[-2], k.shape[-2]
    if relative is not None and (relative.ndim != 2 or relative.shape[0] not in (1, heads)):
        raise ValueError(f"relative must be [1 or {heads} heads, {2 * keys - 1}]; received {tuple(relative.shape)}")
    if relative is not None and relative.shape[1] != 2 * keys - 1:
        raise ValueError(f"relative needs a bias for {2 * keys - 1} distances; received {relative.shape[1]}")
    for name, value, length in (("decay", decay, keys), ("reach", reach, queries)):
        if value is not None and (value.ndim != 3 or value.shape[0] not in (1, q.shape[0])):
            raise ValueError(f"{name} must be [1 or {q.shape[0]}, {heads}, {length}]; received {tuple(value.shape)}")
        if value is not None and value.shape[1:] != (heads, length):
            found = tuple(value.shape[1:])
            raise ValueError(f"{name} needs {heads} heads and {length} positions; received {found}")
    if reach is not None and (decay is None or pattern.order != "causal"):
        raise ValueError(f"reach bounds a decay of a causal pattern; received {pattern.order} order, decay={decay}")
    if gate is not None and (gate.shape[:-1] != q.shape[:-1] or gate.shape[-1] not in (1, v.shape[-1])):
        raise ValueError(f"gate must be {[*q.shape[:-1], v.shape[-1]]}, or 1 wide; received {list(gate.shape)}")
