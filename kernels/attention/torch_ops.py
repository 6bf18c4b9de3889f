"""Attention by torch's fused kernel, and by plain products: all at once, or some queries at a time."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.attention.pattern import CAUSAL, Pattern
from archlab.kernels.attention.reference import added, expected, opened

LEAST_ROWS, MOST_ROWS = 128, 256  # queries at a time


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    pattern: Pattern = CAUSAL,
    scale: float | None = None,
    softcap: None = None,
    sinks: None = None,
    prefix: Tensor | None = None,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    relative: Tensor | None = None,
    decay: Tensor | None = None,
    reach: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """`scaled_dot_product_attention`; shapes as in the reference. Plain causal attention needs no mask at all.

    Raises ValueError for a softcap or sinks, which it cannot compute.
    """
    if softcap is not None or sinks is not None:
        raise ValueError("SDPA knows no softcap and no sinks; select the op with softcap=True or sinks=True")
    expected(q, k, pattern, relative, decay, reach)
    bias = added(q, k, bias, relative, decay, reach)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    alone = bias is None and prefix is None and documents is None and padding is None
    mask, fast = None, False  # a plain boolean, also where lengths are symbols
    if alone and pattern == CAUSAL and q.shape[-2] == k.shape[-2]:
        fast = True
    else:
        mask = _mask(q, k, bias, pattern.dense(*_sizes(q, k), prefix, documents, padding))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=fast, scale=factor, enable_gqa=grouped)
    return out if gate is None else opened(out, gate).to(out.dtype)


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, torch.device]:
    return q.shape[-2], k.shape[-2], q.device


def _mask(q: Tensor, k: Tensor, bias: Tensor | None, seen: Tensor | None) -> Tensor | None:
    """Booleans where there is no bias, else the bias with -inf at hidden pairs, in q's dtype and four dimensions."""
    if bias is None:
        return seen
    total = bias if seen is None else torch.where(seen, bias, float("-inf"))
    return total.to(q.dtype).reshape((1,) * (4 - total.ndim) + tuple(total.shape))


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    pattern: Pattern = CAUSAL,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    prefix: Tensor | None = None,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    relative: Tensor | None = None,
    decay: Tensor | None = None,
    reach: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Products in the dtype of the inputs; shapes as in the reference.

    Plain causal attention has the scale and the mask in the first product, and its softmax reads and writes the dtype
    of the inputs (it computes in float32). A bias may be large, so it is added in float32, as everything else is.
    """
    expected(q, k, pattern, relative, decay, reach)
    bias = added(q, k, bias, relative, decay, reach)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    (batch, heads, length, width), keys, kv_heads = q.shape, k.shape[-2], k.shape[1]
    grouped = q.reshape(batch * kv_heads, -1, width)
    turned = k.reshape(batch * kv_heads, keys, width).transpose(1, 2)
    seen = pattern.dense(*_sizes(q, k), prefix, documents, padding)
    mask = q.new_zeros(1, 1) if seen is None else q.new_zeros(seen.shape).masked_fill(~seen, float("-inf"))
    if bias is None and softcap is None and sinks is None and mask.ndim == 2:
        hidden = mask if seen is None else mask.repeat(heads // kv_heads, 1)
        weights = torch.baddbmm(hidden.expand(batch * kv_heads, -1, -1), grouped, turned, alpha=factor).softmax(-1)
    else:
        total = at_least_float32(mask) if bias is None else at_least_float32(bias) + mask
        products = (grouped @ turned).view(batch, heads, length, keys)
        logits = _logits(products, total, factor, softcap)
        weights = logits.softmax(-1).view(batch * kv_heads, -1, keys)
    out = (weights.to(v.dtype) @ v.reshape(batch * kv_heads, keys, -1)).view(batch, heads, length, -1)
    if sinks is not None:
        # exp(l) / (exp(sink) + sum of exp(l)) as softmax times its share, so that small sums stay in float32
        share = (logits.logsumexp(-1, keepdim=True) - at_least_float32(sinks)[:, None, None]).sigmoid()
        out = out * share
    return opened(out, gate).to(q.dtype)


def by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    pattern: Pattern = CAUSAL,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    prefix: None = None,
    documents: None = None,
    padding: Tensor | None = None,
    relative: Tensor | None = None,
    decay: Tensor | None = None,
    reach: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Plain products of some queries at a time with the keys that these can reach (`stretches`); shapes as in the
    reference. So little more than half of a causal square is computed, of a window little more than it holds, and what
    is computed stays in the caches. The gradients of keys and values, which several stretches read, are summed in at
    least float32.

    Raises ValueError where queries read ahead.
    """
    if pattern.order != "causal" or prefix is not None or documents is not None:
        raise ValueError(f"some queries at a time are causal, without prefix and documents; received {pattern}")
    expected(q, k, pattern, relative, decay, reach)
    queries, keys = q.shape[-2], k.shape[-2]
    q, k, v = (x.contiguous() for x in (q, k, v))  # of which stretches are views
    parts = stretches(queries, keys, pattern)
    if len(parts) == 1:
        return plain(q, k, v, bias, pattern, scale, softcap, sinks, None, None, padding, relative, decay, reach, gate)
    wide_k, wide_v = at_least_float32(k), at_least_float32(v)
    rows = parts[0].stop
    biases = [None] * len(parts) if bias is None else bias.expand(*bias.shape[:-2], queries, keys).split(rows, -2)
    found = []
    for part, own in zip(parts, biases, strict=True):
        first, last = part.first, part.last
        found.append(
            plain(
                q[:, :, part.start : part.stop],
                wide_k[:, :, first:last].to(k.dtype),
                wide_v[:, :, first:last].to(v.dtype),
                None if own is None else own[..., first:last],
                pattern,
                scale,
                softcap,
                sinks,
                padding=None if padding is None else padding[:, first:last],
                relative=None if relative is None else relative[:, keys - (last - first) : keys + (last - first) - 1],
                decay=None if decay is None else decay[..., first:last],
                reach=None if reach is None else reach[..., part.start : part.stop],
                gate=None if gate is None else gate[:, :, part.start : part.stop],
            )
        )
    return torch.cat(found, 2)


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
