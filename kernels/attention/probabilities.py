"""What attention weighs: the probabilities of the reference formula, a block of queries at a time."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.attention.inputs import Inputs, checked, factor, seen

ELEMENTS = 2**22  # probabilities that are held at a time


class Weights(NamedTuple):
    """Of the queries from `start` on: `probabilities` `[B,Hq,t,S]`; `seen`, which pairs there are, broadcastable to
    it; and `sink` `[B,Hq,t]`, what is left to sinks, None where there are none."""

    start: int
    probabilities: Tensor
    seen: Tensor
    sink: Tensor | None


def probabilities(q: Tensor, k: Tensor, elements: int = ELEMENTS, **given: Any) -> Iterator[Weights]:
    """softmax(softcap(scale q k^T) + bias) as `reference.attention` has it, with its arguments but the values: as many
    queries at a time as make `elements` probabilities."""
    call = checked(q, k, k, **given)
    (batch, heads, queries, _), keys = q.shape, k.shape[-2]
    step = max(elements // (batch * heads * keys), 1)
    with torch.autocast(q.device.type, enabled=False):
        every = at_least_float32(k).repeat_interleave(heads // k.shape[1], 1).transpose(-2, -1)
        for start in range(0, queries, step):
            rows = slice(start, min(start + step, queries))
            logits = (at_least_float32(q[:, :, rows]) * factor(call)) @ every
            if call.softcap is not None:
                logits = call.softcap * (logits / call.softcap).tanh()
            logits, visible = _biased(logits, rows, call), seen(call, rows)
            there = ~logits.isneginf() if visible is None else visible.expand(logits.shape) & ~logits.isneginf()
            logits = logits.masked_fill(~there, float("-inf"))
            if call.sinks is None:
                yield Weights(start, logits.softmax(-1), there, None)
                continue
            sink = at_least_float32(call.sinks)[:, None, None].expand(*logits.shape[:-1], 1)
            weights = torch.cat([logits, sink], -1).softmax(-1)
            yield Weights(start, weights[..., :-1], there, weights[..., -1])


def _biased(logits: Tensor, rows: slice, call: Inputs) -> Tensor:
    """Logits `[B,Hq,t,S]` of some of the queries with what `reference.added` adds."""
    queries, keys = call.q.shape[-2], logits.shape[-1]
    i, j = torch.arange(keys - queries, keys, device=logits.device)[rows], torch.arange(keys, device=logits.device)
    if (bias := call.bias) is not None:
        logits = logits + (bias if bias.ndim < 2 or bias.shape[-2] == 1 else bias[..., rows, :])
    if call.relative is not None:
        logits = logits + at_least_float32(call.relative)[:, i[:, None] - j + keys - 1]
    if call.decay is not None:
        sums = at_least_float32(call.decay)
        logits = logits + (sums[..., i, None] - sums[..., None, :])
        if call.reach is not None:
            logits = logits.masked_fill(sums[..., None, :] > call.reach[..., rows, None], float("-inf"))
    return logits
