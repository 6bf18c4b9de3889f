"""WKV of RWKV-7 chunk by chunk, each in parallel."""

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.linear_recurrence.blocks import decayed_products, solve_unit_lower
from archlab.kernels.wkv7.reference import checked, wkv7

CHUNK = 32


def chunked(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, removal: Tensor, rate: Tensor, state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Chunks of `chunk` tokens all at once, and only the states between them one after another.

    Arguments and results are the reference's. In a chunk, with c_i the sum of its log decays up to token i, S the state
    before it, b = rate * removal, and of two of the vectors A_xy the products with decay, x_i exp(c_i - c_j) y_j for
    j <= i, what is erased u solves

        (I + A_ab) u = (removal exp(c_(i-1))) S + A_ak v        with a the removal: exp(c_(i-1) - c_j), j < i

    and then

        o = (r exp(c)) S + A_rk v - A_rb u
        S_next = exp(c_last) S + (k exp(c_last - c))^T v - (b exp(c_last - c))^T u

    A removal reads what the token before it left, so it is decayed as that token's own reading.
    """
    checked(r, k, v, log_decay, removal, rate, state)
    batch, length, heads, width = v.shape
    if length == 1:
        return wkv7(r, k, v, log_decay, removal, rate, state)
    wide = torch.promote_types(v.dtype, torch.float32)
    size = chunk if chunk <= length else 1 << (length - 1).bit_length()
    with torch.autocast(r.device.type, enabled=False):
        held = v.new_zeros(batch, heads, r.shape[-1], width, dtype=wide) if state is None else state.to(wide)
        reads, keys, removals, rates, decays, values = (
            _split(x.to(wide), size) for x in (r, k, removal, rate, log_decay, v)
        )  # [B,N,H,C,D]
        products, reading, writing = _decayed(reads, keys, removals, rates * removals, decays)
        (weights, erasing_weights), (seen, among) = products
        right = torch.cat([seen @ values, reading[1]], -1)
        solved = solve_unit_lower(among.flatten(0, 2), right.flatten(0, 2)).view_as(right)
        added, removed = (x.transpose(-2, -1) for x in writing)
        before, erased, held = _carry(added @ values, removed, solved, width, decays.sum(-2)[..., None].exp(), held)
        out = reading[0] @ before + weights @ values - erasing_weights @ erased
        out = out.transpose(2, 3).reshape(batch, -1, heads, width)[:, :length]
    return out.to(v.dtype), held


def _split(x: Tensor, size: int) -> Tensor:
    """`[B,T,H,D]` as chunks `[B,N,H,C,D]`, the last one filled up with zeros, which leave a state as it is."""
    parts: Tensor = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))
    return parts.transpose(2, 3).contiguous()


def _decayed(
    reads: Tensor, keys: Tensor, removals: Tensor, removed: Tensor, decays: Tensor
) -> tuple[list[list[Tensor]], list[Tensor], list[Tensor]]:
    """Of chunks `[B,N,H,C,D]`: the products A of reads and of removals, with keys and with what is `removed`; reads and
    removals decayed from the start of the chunk; keys and what is removed decayed to its end."""
    next_removals = F.pad(removals[..., 1:, :], (0, 0, 0, 1))
    queries, written = (torch.stack(x, 4).flatten(0, 2) for x in ([reads, next_removals], [keys, removed]))
    products, reading, writing = decayed_products(queries, written, decays.flatten(0, 2))
    shape = decays.shape[:3]
    weights, after = products.unflatten(2, shape).unbind()
    earlier = F.pad(after[..., :-1, :], (0, 0, 1, 0))
    seen, next_seen = (x.unflatten(0, shape) for x in reading.unbind(2))
    read_before = torch.cat([removals[..., :1, :], next_seen[..., :-1, :]], -2)
    kept = [x.unflatten(0, shape) for x in writing.unbind(2)]
    return [[*weights], [*earlier]], [seen, read_before], kept


def _carry(
    added: Tensor, removed: Tensor, solved: Tensor, width: int, total: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The states before each chunk `[B,N,H,Dk,Dv]`, all that is erased `[B,N,H,C,Dv]`, and the last state.

    A chunk erases x + y S, `solved` being x beside y.
    """
    before, erased = [], []
    own, by_state = solved.split([width, solved.shape[-1] - width], -1)
    for n in range(added.shape[1]):
        before.append(state)
        erased.append(own[:, n] + by_state[:, n] @ state)
        state = total[:, n] * state + added[:, n] - removed[:, n] @ erased[-1]
    return torch.stack(before, 1), torch.stack(erased, 1), state
