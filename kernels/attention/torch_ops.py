"""Attention by torch's fused kernel, and by plain products: all at once, or some queries at a time."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.attention.inputs import Inputs, biases, checked, factor, seen
from archlab.kernels.attention.pattern import CAUSAL, Pattern
from archlab.kernels.attention.reference import opened

LEAST_ROWS, MOST_ROWS = 128, 256  # queries at a time


def sdpa(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """`scaled_dot_product_attention`; arguments as in the reference. Plain causal attention needs no mask at all.

    Raises ValueError for a softcap or sinks, which it cannot compute.
    """
    call = checked(q, k, v, **given)
    if call.softcap is not None or call.sinks is not None:
        raise ValueError("SDPA knows no softcap and no sinks; select the op with softcap=True or sinks=True")
    bias = biases(call)
    alone = bias is None and call.prefix is None and call.documents is None and call.padding is None
    mask, fast = None, False  # a plain boolean, also where lengths are symbols
    if alone and call.pattern == CAUSAL and q.shape[-2] == k.shape[-2]:
        fast = True
    else:
        mask = seen(call)
    if bias is not None:  # with -inf at hidden pairs, in q's dtype and four dimensions
        total = bias if mask is None else torch.where(mask, bias, float("-inf"))
        mask = total.to(q.dtype).reshape((1,) * (4 - total.ndim) + tuple(total.shape))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=fast, scale=factor(call), enable_gqa=grouped)
    return opened(out, call.gate).to(out.dtype)


def plain(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Products in the dtype of the inputs; arguments as in the reference.

    Plain causal attention has the scale and the mask in the first product, and its softmax reads and writes the dtype
    of the inputs (it computes in float32). A bias may be large, so it is added in float32, as everything else is.
    """
    return _plain(checked(q, k, v, **given))


def _plain(call: Inputs) -> Tensor:
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    bias, visible = biases(call), seen(call)
    (batch, heads, length, width), keys, kv_heads = q.shape, k.shape[-2], k.shape[1]
    grouped = q.reshape(batch * kv_heads, -1, width)
    turned = k.reshape(batch * kv_heads, keys, width).transpose(1, 2)
    mask = q.new_zeros(1, 1) if visible is None else q.new_zeros(visible.shape).masked_fill(~visible, float("-inf"))
    if bias is None and call.softcap is None and sinks is None and mask.ndim == 2:
        hidden = mask if visible is None else mask.repeat(heads // kv_heads, 1)
        hidden = hidden.expand(batch * kv_heads, -1, -1)
        weights = torch.baddbmm(hidden, grouped, turned, alpha=factor(call)).softmax(-1)
    else:
        total = at_least_float32(mask) if bias is None else at_least_float32(bias) + mask
        products = (grouped @ turned).view(batch, heads, length, keys)
        logits = _logits(products, total, factor(call), call.softcap)
        weights = logits.softmax(-1).view(batch * kv_heads, -1, keys)
    out = (weights.to(v.dtype) @ v.reshape(batch * kv_heads, keys, -1)).view(batch, heads, length, -1)
    if sinks is not None:
        # exp(l) / (exp(sink) + sum of exp(l)) as softmax times its share, so that small sums stay in float32
        share = (logits.logsumexp(-1, keepdim=True) - at_least_float32(sinks)[:, None, None]).sigmoid()
        out = out * share
    return opened(out, call.gate).to(q.dtype)


def by_rows(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Plain products of some queries at a time with the keys that these can reach (`stretches`); arguments as in the
    reference. So little more than half of a causal square is computed, of a window little more than it holds, and what
    is computed stays in the caches. The gradients of keys and values, which several stretches read, are summed in at
    least float32.

    Raises ValueError where queries read ahead, and for first keys beside a window.
    """
    call = checked(*(x.contiguous() for x in (q, k, v)), **given)  # of which stretches are views
    if call.pattern.order != "causal" or call.pattern.first or call.prefix is not None or call.documents is not None:
        what = "without first keys, prefix and documents"
        raise ValueError(f"some queries at a time are causal, {what}; received {call.pattern}")
    queries, keys = q.shape[-2], k.shape[-2]
    parts = stretches(queries, keys, call.pattern)
    if len(parts) == 1:
        return _plain(call)
    wide_k, wide_v, bias = at_least_float32(call.k), at_least_float32(call.v), call.bias
    rows = parts[0].stop
    split = [None] * len(parts) if bias is None else bias.expand(*bias.shape[:-2], queries, keys).split(rows, -2)
    return torch.cat([_plain(_part(call, wide_k, wide_v, *own)) for own in zip(parts, split, strict=True)], 2)


def _part(call: Inputs, wide_k: Tensor, wide_v: Tensor, part: "Stretch", bias: Tensor | None) -> Inputs:
    """A call of some queries and the keys that they reach; bias is that of these queries."""
    start, stop, first, last = part
    keys, length = call.k.shape[-2], last - first
    return call._replace(
        q=call.q[:, :, start:stop],
        k=wide_k[:, :, first:last].to(call.k.dtype),
        v=wide_v[:, :, first:last].to(call.v.dtype),
        bias=None if bias is None else bias[..., first:last],
        padding=None if call.padding is None else call.padding[:, first:last],
        relative=None if call.relative is None else call.relative[:, keys - length : keys + length - 1],
        decay=None if call.decay is None else call.decay[..., first:last],
        reach=None if call.reach is None else call.reach[..., start:stop],
        gate=None if call.gate is None else call.gate[:, :, start:stop],
    )


class Stretch(NamedTuple):
    """Queries from `start` to before `stop`, and the keys from `first` to before `last`, which they can reach."""

    start: int
    stop: int
    first: int
    last: int


def stretches(queries: int, keys: int, pattern: Pattern) -> list[Stretch]:
    """A quarter of the queries at a time, at least LEAST_ROWS and at most MOST_ROWS, of which the last stands at the
    last key."""
    rows = min(max(-(-queries // 4), LEAST_ROWS), MOST_ROWS)
    back = pattern.window if pattern.window is not None and pattern.stride is None else keys
    found = []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        before = keys - queries
        found.append(Stretch(start, stop, max(before + start + 1 - back, 0), before + stop))
    return found


def _logits(products: Tensor, biases: Tensor, factor: float, softcap: float | None) -> Tensor:
    """Scaled, capped if asked, and then biased."""
    if softcap is None:
        return torch.add(biases, products, alpha=factor)
    return torch.add(biases, (at_least_float32(products) * (factor / softcap)).tanh(), alpha=softcap)
