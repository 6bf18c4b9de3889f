"""Attention of blocks that read each other (BigBird) by plain products of the blocks that each one reads."""

from typing import Any

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.attention.inputs import checked, factor
from archlab.kernels.attention.pattern import FULL, Pattern
from archlab.kernels.attention.reference import opened
from archlab.kernels.attention.torch_ops import plain, sdpa


def by_blocks(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Queries of a block with copies of the keys and values of the blocks that it reads, and those of global blocks
    with all keys; arguments as in the reference. The gradients of keys and values are summed in at least float32.

    Sequences that blocks do not divide, or that are so short that all is read, and padding, are left to SDPA or, in
    bfloat16, to products of all pairs. Raises ValueError without blocks, and for biases, caps, sinks and documents.
    """
    call = checked(*(x.contiguous() for x in (q, k, v)), **given)
    pattern, known = call.pattern, ("pattern", "scale", "padding", "gate")
    if pattern.blocks is None or any(x is not None for name, x in given.items() if name not in known):
        raise ValueError(f"blocks by lists have no biases, caps, sinks, prefixes and documents; received {pattern}")
    if call.padding is not None or q.shape[-2] != k.shape[-2] or not listed(pattern, k.shape[-2]):
        whole = plain if q.dtype == torch.bfloat16 else sdpa
        return whole(q, k, v, pattern=pattern, scale=call.scale, padding=call.padding, gate=call.gate)
    q, k, v = call[:3]
    (batch, heads, length, width), size, kv_heads = q.shape, pattern.blocks.size, k.shape[1]
    count = length // size
    first, last, most = inner(pattern, count)
    table = pattern.blocks.table(count, q.device)[:, first:last].expand(heads, -1, -1)
    read = table.int().argsort(dim=-1, descending=True, stable=True)[..., :most]
    head = torch.arange(heads, device=q.device) // (heads // kv_heads) * count
    places = (head[:, None, None] + read).flatten()

    def taken(x: Tensor) -> Tensor:
        blocks = at_least_float32(x).reshape(batch, kv_heads * count, size, -1).index_select(1, places)
        return blocks.view(batch * heads * (last - first), most * size, -1).to(x.dtype)

    hidden = q.new_zeros(read.shape).masked_fill(~table.gather(-1, read), float("-inf"))
    hidden = hidden.repeat_interleave(size, -1).expand(batch, -1, -1, -1).reshape(-1, 1, most * size)
    own = q[:, :, first * size : last * size].reshape(-1, size, width)
    weights = torch.baddbmm(hidden, own, taken(k).transpose(1, 2), alpha=factor(call)).softmax(-1)
    middle = (weights.to(v.dtype) @ taken(v)).view(batch, heads, (last - first) * size, -1)
    ends = (q[:, :, : first * size].contiguous(), q[:, :, last * size :].contiguous())
    before, after = (
        plain(part, k, v, pattern=FULL, scale=factor(call)) if part.shape[2] else middle[:, :, :0] for part in ends
    )
    return opened(torch.cat([before, middle.to(q.dtype), after], 2), call.gate).to(q.dtype)


def listed(pattern: Pattern, tokens: int) -> bool:
    """Whether a sequence of `tokens` is computed by blocks."""
    blocks = pattern.blocks
    return blocks is not None and tokens % blocks.size == 0 and not blocks.cover(tokens)


def inner(pattern: Pattern, count: int) -> tuple[int, int, int]:
    """The first of `count` blocks that are not global, the one after the last, and how many each of these reads."""
    blocks = pattern.blocks
    assert blocks is not None
    first, last = (blocks.globals + 1) // 2, count - blocks.globals // 2
    return first, last, min(blocks.window + blocks.globals + blocks.random, count)


def elements(pattern: Pattern, tokens: int) -> tuple[int, int]:
    """For a head how many pairs are computed, and how many rows of keys are copied: those of the lists."""
    assert pattern.blocks is not None
    size, count = pattern.blocks.size, tokens // pattern.blocks.size
    first, last, most = inner(pattern, count)
    copied = (last - first) * most * size
    return copied * size + (count - last + first) * size * tokens, copied
