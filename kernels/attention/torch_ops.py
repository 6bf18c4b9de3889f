"""Attention by torch's fused kernel, and by plain products, which use the CPU's bfloat16 units better."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import at_least_float32
from kernels.attention.reference import checked_scale, visible


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`scaled_dot_product_attention`; shapes as in the reference. Plain causal attention needs no mask at all."""
    factor = checked_scale(q, causal, window, scale)
    fast = causal and bias is None and window is None and q.shape[-2] == k.shape[-2]
    mask = None if fast else _mask(q, k, bias, causal, window)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=fast, scale=factor, enable_gqa=grouped)


def _mask(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, window: int | None) -> Tensor | None:
    """Booleans where there is no bias, else the bias with -inf at hidden pairs, in q's dtype and four dimensions."""
    seen = visible(q.shape[-2], k.shape[-2], window, q.device) if causal else None
    if bias is None:
        return seen
    added = bias if seen is None else torch.where(seen, bias, float("-inf"))
    return added.to(q.dtype).reshape((1,) * (4 - added.ndim) + tuple(added.shape))


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Products in the dtype of the inputs; shapes as in the reference.

    Without a bias the scale and the mask are part of the first product, and the softmax reads and writes the dtype of
    the inputs (it computes in float32). A bias may be large, so it is added in float32.
    """
    factor = checked_scale(q, causal, window, scale)
    (batch, heads, length, width), keys, kv_heads = q.shape, k.shape[-2], k.shape[1]
    grouped = q.reshape(batch * kv_heads, -1, width)
    turned = k.reshape(batch * kv_heads, keys, width).transpose(1, 2)
    mask = q.new_zeros(1, 1)
    if causal:
        seen = visible(length, keys, window, q.device)
        mask = q.new_zeros(length, keys).masked_fill(~seen, float("-inf"))
    if bias is None:
        added = mask.repeat(heads // kv_heads, 1) if causal else mask
        weights = torch.baddbmm(added.expand(batch * kv_heads, -1, -1), grouped, turned, alpha=factor).softmax(-1)
    else:
        products = (grouped @ turned).view(batch, heads, length, keys)
        logits = torch.add(at_least_float32(bias) + mask, products, alpha=factor)
        weights = logits.softmax(-1).view(batch * kv_heads, -1, keys)
    out = weights.to(v.dtype) @ v.reshape(batch * kv_heads, keys, -1)
    return out.view(batch, heads, length, -1).to(q.dtype)
