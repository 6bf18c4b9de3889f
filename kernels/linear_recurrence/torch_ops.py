"""The linear recurrence chunk by chunk, each in parallel."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.linear_recurrence.blocks import decayed_products, solve_unit_lower
from archlab.kernels.linear_recurrence.reference import checked_groups, linear_recurrence

RESET = -1e4  # exp of it is 0 in any dtype; stands for -inf, which has no differences


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    state: Tensor | None = None, scale: float = 1.0, chunk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Chunks of `chunk` tokens all at once, and only the states between them one after another.

    Arguments and results are the reference's. In a chunk, with c_i the sum of its log decays up to token i, S the state
    before it and A_ij = sum over d of q_id exp(c_id - c_jd) k_jd for j <= i, else 0:

        o = (q exp(c)) S + A u
        S_next = exp(c_last) S + (k exp(c_last - c))^T u

    where u is v, or with the delta rule the solution of (I + L) u = beta (v - (k exp(c)) S), L_ij being beta_i times
    A_ij of keys with keys for j < i: the WY form of arXiv:2406.06484 (section 3), with decay arXiv:2412.06464 (3.3).
    Products are in v's dtype, but those of keys with keys; the states and all that decays are in at least float32. By
    default a chunk has 64 tokens, with the delta rule or a decay per channel 32.
    """
    shared = checked_groups(q, k, v, log_decay, beta, state)
    batch, length, heads, width = v.shape
    if length == 1:
        return linear_recurrence(q, k, v, log_decay, beta, state, scale)
    by_channel = log_decay is not None and log_decay.ndim == 4
    chunk = chunk or (32 if by_channel or beta is not None else 64)
    size = chunk if chunk <= length else 1 << (length - 1).bit_length()
    narrow, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    if shared > 1 and (by_channel or beta is not None):
        q, k, shared = q.repeat_interleave(shared, 2), k.repeat_interleave(shared, 2), 1
    groups = q.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        queries, keys = (_split(x.to(narrow), size) for x in (q, k))  # [B,N,G,C,Dk]
        values = _split(v.reshape(batch, length, groups, -1), size)  # [B,N,G,C,R*Dv]
        held = v.new_zeros(batch, heads, q.shape[-1], width, dtype=wide) if state is None else state.to(wide)
        held = held.unflatten(1, (groups, shared)).transpose(2, 3).flatten(3)  # [B,G,Dk,R*Dv]
        parts = _parts(queries, keys, log_decay, length, width, beta is not None)
        if beta is None:
            steps = parts.writing.transpose(-2, -1) @ _times(values, parts.rest)
            before, held = _carry(steps, parts.total, held)
        else:
            assert parts.among is not None
            betas = _split(beta.to(wide), size)[..., None]
            right = torch.cat([betas * values, betas * parts.erasing], -1).to(narrow)
            solved = solve_unit_lower((betas * parts.among).tril(-1).flatten(0, 2), right.flatten(0, 2)).view_as(right)
            writing = _times(parts.writing, parts.rest).transpose(-2, -1)
            before, held, values = _carry_corrected(writing, solved, width, parts.total, held)
        out = _weighted(parts.weights, values) + _times(parts.reading @ before, parts.into)
        out = out.transpose(2, 3).reshape(batch, -1, heads, width)[:, :length]
        held = held.unflatten(3, (shared, width)).transpose(2, 3).flatten(1, 2)
    return out if scale == 1 else scale * out, held


class _Parts(NamedTuple):
    """What queries, keys and decays of a chunk are multiplied with values and states by.

    `weights` is A `[B,N,G,C,C]`, or that of each head `[B,N,G,R,C,C]`. The queries `reading` the state before a chunk
    and the keys `writing` the one after it are `[B,N,G,C,Dk]`; a decay per channel is in them, one per head is apart:
    the factors `into` a chunk, up to each token, and over the `rest` of it `[B,N,G,C,R,1]`. `total` is the decay over
    the chunk. The delta rule has the keys `erasing` the state before, and A of keys with keys, `among` them.
    """

    weights: Tensor
    reading: Tensor
    writing: Tensor
    erasing: Tensor
    among: Tensor | None = None
    into: Tensor | None = None
    rest: Tensor | None = None
    total: Tensor | None = None


def _parts(queries: Tensor, keys: Tensor, log_decay: Tensor | None, length: int, width: int, delta: bool) -> _Parts:
    """The parts of chunks `[B,N,G,C,Dk]` of `length` tokens, whose values have `width` channels."""
    batch, chunks, groups, size, _ = queries.shape
    narrow, wide = queries.dtype, torch.promote_types(queries.dtype, torch.float32)
    if log_decay is not None and log_decay.ndim == 4:
        decay = _split(log_decay.to(wide), size)
        total = decay.sum(-2)[..., None].exp()  # [B,N,H,Dk,1]
        pairs, read, written = _decayed([queries, keys] if delta else [queries], keys, decay)
        known = pairs[0].to(narrow), read[0].to(narrow), written.to(narrow)
        return _Parts(*known, read[1], pairs[1], total=total) if delta else _Parts(*known, keys, total=total)
    among = keys.to(wide) @ keys.to(wide).transpose(-2, -1) if delta else None
    products = queries @ keys.transpose(-2, -1)
    if log_decay is None:
        return _Parts(products.tril(), queries, keys, keys, among)
    between, into, rest, total = _decays(log_decay, length, size, groups, wide)
    weights = (products.unsqueeze(3) * between).to(narrow)  # [B,N,G,R,C,C]
    total = total.expand(batch, chunks, -1, -1).repeat_interleave(width, -1).unsqueeze(-2)
    erasing = keys
    if among is not None:
        among, erasing = among * between.squeeze(3), keys * into.squeeze(4)
    return _Parts(weights, queries, keys, erasing, among, into, rest, total)


def _times(x: Tensor, factors: Tensor | None) -> Tensor:
    """x `[B,N,G,C,R*D]` times factors `[B,N,G,C,R,1]` in at least float32, in x's dtype; x itself without factors."""
    return x if factors is None else (x.unflatten(-1, (factors.shape[-2], -1)) * factors).to(x.dtype).flatten(-2)


def _split(x: Tensor, size: int) -> Tensor:
    """`[B,T,G,...]` as chunks `[B,N,G,C,...]`, the last one filled up with zeros."""
    tail = -x.shape[1] % size
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, tail)) if tail else x
    return padded.reshape(x.shape[0], -1, size, *x.shape[2:]).transpose(2, 3).contiguous()


def _decayed(queries: list[Tensor], keys: Tensor, decay: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """`decayed_products` of each of the queries with the keys `[B,N,H,C,Dk]`, in the dtype of the decay."""
    flat = [x.to(decay.dtype).flatten(0, 2) for x in (*queries, keys)]
    products, reading, writing = decayed_products(torch.stack(flat[:-1], 2), flat[-1][:, :, None], decay.flatten(0, 2))
    shape = decay.shape[:3]
    found = [x.unflatten(0, shape) for x in products[:, 0]], [x.unflatten(0, shape) for x in reading.unbind(2)]
    return *found, writing.view_as(decay)


def _decays(
    log_decay: Tensor, length: int, size: int, groups: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decays between tokens of a chunk `[B,N,G,R,C,C]`, into it and out of it `[B,N,G,C,R,1]`, and over it `[B,N,G,R]`.

    The sums are in float64, as their differences are needed to the accuracy of the smallest decay: between tokens as
    the difference of what `dtype` has of them, which is exact where it matters, and that of the rest.
    """
    if log_decay.ndim == 1:
        log_decay = log_decay.expand(1, length if length % size else size, -1)
    sums = _split(log_decay.clamp(min=RESET).double(), size).cumsum(-1).unflatten(2, (groups, -1))
    near = sums.to(dtype)
    finer = (sums - near).detach().to(dtype)
    own = torch.eye(size, dtype=dtype, device=near.device)
    later = torch.full_like(own, -torch.inf).triu()
    exponents = (near[..., :, None] - near[..., None, :]) + ((finer[..., :, None] - finer[..., None, :]) + later)
    pairs = exponents.exp() + own
    into, rest = (x.exp().to(dtype).transpose(-2, -1)[..., None] for x in (sums, sums[..., -1:] - sums))
    return pairs, into, rest, sums[..., -1].exp().to(dtype)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Sums of values `[B,N,G,C,R*Dv]` with weights `[B,N,G,C,C]`, or those of each head `[B,N,G,R,C,C]`."""
    if weights.ndim == values.ndim:
        return weights @ values
    apart = values.unflatten(-1, (weights.shape[3], -1)).transpose(3, 4)
    summed: Tensor = (weights @ apart).transpose(3, 4).flatten(-2)
    return summed


def _carry(steps: Tensor, total: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_(n+1) = total_n S_n + steps_n: the states before each chunk `[B,N,G,Dk,R*Dv]`, and the last."""
    before = []
    for n, written in enumerate(steps.to(state.dtype).unbind(1)):
        before.append(state)
        state = state + written if total is None else torch.addcmul(written, total[:, n], state)
    return torch.stack(before, 1).to(steps.dtype), state


def _carry_corrected(
    writing: Tensor, solved: Tensor, width: int, total: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where a chunk writes u = x - y S, `solved` being x `[...,Dv]` beside y `[...,Dk]`; and all u."""
    before, corrected = [], []
    values, erasing = solved.split([width, solved.shape[-1] - width], -1)
    for n, (x, y, keys) in enumerate(zip(values.unbind(1), erasing.unbind(1), writing.unbind(1), strict=True)):
        before.append(state.to(solved.dtype))
        corrected.append(x - y @ before[-1])
        written = (keys @ corrected[-1]).to(state.dtype)
        state = state + written if total is None else torch.addcmul(written, total[:, n], state)
    return torch.stack(before, 1), state, torch.stack(corrected, 1)
