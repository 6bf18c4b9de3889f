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
    """Products in the dtype of the inputs, the softmax in at least float32; shapes as in the reference."""
    factor = checked_scale(q, causal, window, scale)
    batch, heads, length, width = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, width)
    products = (grouped @ k.transpose(-2, -1)).view(batch, heads, length, -1)
    logits = at_least_float32(products) * factor
    if bias is not None:
        logits = logits + bias
    if causal:
        hidden = ~visible(length, k.shape[-2], window, q.device)
        logits = logits.masked_fill(hidden, float("-inf"))
    weights = logits.softmax(-1).to(v.dtype)
    out = weights.view(batch, k.shape[1], -1, k.shape[-2]) @ v
    return out.view(batch, heads, length, -1).to(q.dtype)
