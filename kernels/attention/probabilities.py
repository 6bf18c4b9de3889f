"""What attention weighs: the probabilities of the reference formula, a block of queries at a time."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.attention.pattern import CAUSAL, Pattern
from archlab.kernels.attention.reference import expected

ELEMENTS = 2**22  # probabilities that are held at a time


class Weights(NamedTuple):
    """Of the queries from `start` on: `probabilities` `[B,Hq,t,S]`; `seen`, which pairs there are, broadcastable to
    it; and `sink` `[B,Hq,t]`, what is left to sinks, None where there are none."""

    start: int
    probabilities: Tensor
    seen: Tensor
    sink: Tensor | None


def probabilities(
    q: Tensor,
    k: Tensor,
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
    elements: int = ELEMENTS,
) -> Iterator[Weights]:
    """softmax(softcap(scale q k^T) + bias) as `reference.attention` has it, with its arguments but the values: as many
    queries at a time as make `elements` probabilities."""
    expected(q, k, pattern, relative, decay, reach)
    (batch, heads, queries, width), keys = q.shape, k.shape[-2]
    factor = width**-0.5 if scale is None else scale
    step = max(elements // (batch * heads * keys), 1)
    with torch.autocast(q.device.type, enabled=False):
        every = at_least_float32(k).repeat_interleave(heads // k.shape[1], 1).transpose(-2, -1)
        for start in range(0, queries, step):
            rows = slice(start, min(start + step, queries))
            logits = (at_least_float32(q[:, :, rows]) * factor) @ every
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            logits = _biased(logits, rows, queries, bias, relative, decay, reach)
            seen = pattern.dense(queries, keys, q.device, prefix, documents, padding, rows)
            there = ~logits.isneginf() if seen is None else seen.expand(logits.shape) & ~logits.isneginf()
            logits = logits.masked_fill(~there, float("-inf"))
            if sinks is None:
                yield Weights(start, logits.softmax(-1), there, None)
                continue
            sink = at_least_float32(sinks)[:, None, None].expand(*logits.shape[:-1], 1)
            weights = torch.cat([logits, sink], -1).softmax(-1)
            yield Weights(start, weights[..., :-1], there, weights[..., -1])


def _rows(x: Tensor, rows: slice) -> Tensor:
    """Some queries of what broadcasts to `[B,Hq,T,S]`."""
    return x if x.ndim < 2 or x.shape[-2] == 1 else x[..., rows, :]


def _biased(
    logits: Tensor,
    rows: slice,
    queries: int,
    bias: Tensor | None,
    relative: Tensor | None,
    decay: Tensor | None,
    reach: Tensor | None,
) -> Tensor:
    """Logits `[B,Hq,t,S]` of some of the queries with what `reference.added` adds."""
    keys = logits.shape[-1]
    i = torch.arange(rows.start, rows.stop, device=logits.device) + keys - queries
    if bias is not None:
        logits = logits + _rows(bias, rows)
    if relative is not None:
        j = torch.arange(keys, device=logits.device)
        logits = logits + at_least_float32(relative)[:, i[:, None] - j + keys - 1]
    if decay is not None:
        sums = at_least_float32(decay)
        logits = logits + (sums[..., i, None] - sums[..., None, :])
        if reach is not None:
            logits = logits.masked_fill(sums[..., None, :] > reach[..., rows, None], float("-inf"))
    return logits
