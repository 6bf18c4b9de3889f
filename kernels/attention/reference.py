"""Attention by its formula: softmax(softcap(scale q k^T) + bias) v over the visible keys, in at least float32."""

import torch
from torch import Tensor

from kernels.activations import at_least_float32
from kernels.attention.pattern import CAUSAL, Pattern


def attention(
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
) -> Tensor:
    """q `[B,Hq,T,D]`, k `[B,Hkv,S,D]`, v `[B,Hkv,S,Dv]` give `[B,Hq,T,Dv]` in q's dtype (arXiv:1706.03762 eq. 1).

    Hq is a multiple of Hkv; consecutive queries share a key head (arXiv:2305.13245). `bias` is added to the scaled
    logits and broadcasts to `[B,Hq,T,S]`; -inf hides a pair, and every query must see a key. `softcap` turns the scaled
    logits l into softcap tanh(l / softcap) before the bias (arXiv:2408.00118, section 2). `sinks` `[Hq]` are logits
    that each head's softmax counts beside those of the keys, with the value 0 (arXiv:2508.10925, section 2.2).
    `pattern` says which pairs are visible, and what `prefix` `[B]`, `documents` `[B,T]` and `padding` `[B,S]` change.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        keys, values = (at_least_float32(x).repeat_interleave(groups, 1) for x in (k, v))
        logits = (at_least_float32(q) * factor) @ keys.transpose(-2, -1)
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        if bias is not None:
            logits = logits + bias
        seen = pattern.dense(q.shape[-2], k.shape[-2], q.device, prefix, documents, padding)
        if seen is not None:
            logits = logits.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = at_least_float32(sinks)[:, None, None].expand(*logits.shape[:-1], 1)
            return (torch.cat([logits, sink], -1).softmax(-1)[..., :-1] @ values).to(q.dtype)
        return (logits.softmax(-1) @ values).to(q.dtype)
