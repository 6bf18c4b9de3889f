"""wkv7's Triton kernels of the forward pass.

A chunk has C tokens; S is the state `[Dk,Dv]` before it, c the cumulative sums of its log decays, narrow the dtype of
v. A_xy has the products of x and y with the decays between them. With a the removal and b = rate * removal, what is
erased is e of (I + A_ab) e = (a exp(c_(i-1))) S + A_ak v, and o = (r exp(c)) S + A_rk v - A_rb e. Decays are handled
as in `linear_recurrence`: no exponent is positive.
"""

import triton
import triton.language as tl

from archlab.kernels import interpret
from archlab.kernels.linear_recurrence.forward import (
    add_pairs,
    decays_into,
    decays_outof,
    decays_over,
    inverted,
    load,
    load_decays,
    load_over,
    store,
)

interpret.apply()


@triton.jit
def decays_before(g, row, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Decays per channel from the start of a chunk to the token before each `[C,Dk]`."""
    i, d = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    earlier = tl.load(g + (row + i - 1) * stride + d, mask=(i > 0) & (i < rows) & (d < columns), other=0.0)
    return tl.exp(tl.cumsum(earlier.to(tl.float32), 0))


@triton.jit
def weigh(
    reads, k, removal, rate, g, with_keys, with_removed, T, H, DK, N,
    BEFORE: tl.constexpr, SUMS: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A_rk and A_rb of every chunk `[C,C]`; or, with BEFORE, of removals: A_ak and (I + A_ab)^-1."""
    program, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = program // H, program % H
    row, rows, stride = batch * T + chunk * CHUNK, T - chunk * CHUNK, H * DK
    i = tl.arange(0, CHUNK)
    diagonal = i[:, None] == i[None, :]
    keyed, removed = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for channel in range(0, DK, BK):
        place, columns = head * DK + channel, DK - channel
        queries = load(reads + place, row, stride, rows, columns, CHUNK, BK)
        keys = load(k + place, row, stride, rows, columns, CHUNK, BK)
        narrow = queries.dtype
        rates = load(rate + place, row, stride, rows, columns, CHUNK, BK)
        directions = rates.to(tl.float32) * load(removal + place, row, stride, rows, columns, CHUNK, BK)
        log_decay = load_decays(g + place, row, stride, rows, columns, CHUNK, BK)
        if BEFORE:
            keyed = add_pairs(keyed, queries, keys, log_decay, narrow, tl.float32, SUMS, CHUNK, True)
            removed = add_pairs(removed, queries, directions, log_decay, narrow, tl.float32, SUMS, CHUNK, True)
        else:
            keyed += tl.where(diagonal, tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)[:, None], 0.0)
            removed += tl.where(diagonal, tl.sum(queries.to(tl.float32) * directions, 1)[:, None], 0.0)
            keyed = add_pairs(keyed, queries, keys, log_decay, narrow, narrow, "ieee", CHUNK)
            removed = add_pairs(removed, queries, directions, log_decay, narrow, narrow, "ieee", CHUNK)
    if BEFORE:
        removed = inverted(removed, SUMS, CHUNK)
    tile = (program * N + chunk) * CHUNK
    store(with_keys, keyed, tile, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
    store(with_removed, removed, tile, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)


@triton.jit
def decay_channels(
    r, k, removal, rate, g, reading, erasing, writing, removing, over, T, H, DK, N,
    CHUNK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BK channels of one chunk with their decays: what reads the state and what is erased of it from its start, keys
    and what is removed to its end; and the decays over it.
    """
    program, chunk, channel = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BK
    batch, head = program // H, program % H
    row, rows, columns, stride = batch * T + chunk * CHUNK, T - chunk * CHUNK, DK - channel, H * DK
    place = head * DK + channel
    directions = load(removal + place, row, stride, rows, columns, CHUNK, BK).to(tl.float32)
    into = decays_into(g + place, row, stride, rows, columns, CHUNK, BK)
    before = decays_before(g + place, row, stride, rows, columns, CHUNK, BK)
    rest = decays_outof(g + place, row, stride, rows, columns, CHUNK, BK)
    queries = load(r + place, row, stride, rows, columns, CHUNK, BK)
    store(reading + place, queries * into, row, stride, rows, columns, CHUNK, BK)
    store(erasing + place, directions * before, row, stride, rows, columns, CHUNK, BK)
    keys = load(k + place, row, stride, rows, columns, CHUNK, BK)
    store(writing + place, keys * rest, row, stride, rows, columns, CHUNK, BK)
    directions *= load(rate + place, row, stride, rows, columns, CHUNK, BK)
    store(removing + place, directions * rest, row, stride, rows, columns, CHUNK, BK)
    d = tl.arange(0, BK)
    total = decays_over(g + place, row, stride, rows, columns, CHUNK, BK)
    tl.store(over + (program * N + chunk) * DK + channel + d, total, mask=d < columns)


@triton.jit
def read_chunk(
    reading, keyed, removed, held, values, erased, tile, row, rows, stride, DK,
    CHUNK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The outputs `[C,BV]` of one chunk, for the state before it `[Dk,BV]` and what it writes and erases."""
    narrow = values.dtype
    out = tl.dot(load(reading, row, stride, rows, DK, CHUNK, BK), held.to(narrow), input_precision="ieee")
    out = tl.dot(load(keyed, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK), values, out, input_precision="ieee")
    among = load(removed, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
    return out - tl.dot(among, erased, input_precision="ieee")


@triton.jit
def walk(
    reading, erasing, writing, removing, over, v, keyed, removed, seen, inverse, first, out, states, erased, last,
    T, H, DK, DV, N,
    FIRST: tl.constexpr, OUT: tl.constexpr, KEEP: tl.constexpr,
    CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One head's state, BV columns of it, from chunk to chunk in registers.

    With OUT the outputs are computed on the way; with KEEP the states before all chunks and what is erased are stored.
    """
    program, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BV
    batch, head = program // H, program % H
    stride, place, columns = H * DK, head * DK, DV - column
    held = tl.zeros((BK, BV), tl.float32)
    if FIRST:
        held += load(first + column, program * DK, DV, DK, columns, BK, BV).to(tl.float32)
    for chunk in range(0, N):
        row, rows = batch * T + chunk * CHUNK, T - chunk * CHUNK
        tile = program * N + chunk
        if KEEP:
            store(states + column, held, tile * DK, DV, DK, columns, BK, BV)
        values = load(v + head * DV + column, row, H * DV, rows, columns, CHUNK, BV)
        narrow = values.dtype
        right = tl.dot(load(erasing + place, row, stride, rows, DK, CHUNK, BK), held.to(narrow), input_precision="ieee")
        among = load(seen, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
        right = tl.dot(among, values, right, input_precision="ieee")
        solve = load(inverse, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
        gone = tl.dot(solve, right.to(narrow), input_precision="ieee").to(narrow)
        if KEEP:
            store(erased + head * DV + column, gone, row, H * DV, rows, columns, CHUNK, BV)
        if OUT:
            read = read_chunk(
                reading + place, keyed, removed, held, values, gone, tile, row, rows, stride, DK, CHUNK, BK
            )
            store(out + head * DV + column, read, row, H * DV, rows, columns, CHUNK, BV)
        held *= load_over(over, tile, DK, BK)
        keys = load(writing + place, row, stride, rows, DK, CHUNK, BK)
        held += tl.dot(tl.trans(keys), values, input_precision="ieee")
        directions = load(removing + place, row, stride, rows, DK, CHUNK, BK)
        held -= tl.dot(tl.trans(directions), gone, input_precision="ieee")
    store(last + column, held, program * DK, DV, DK, columns, BK, BV)


@triton.jit
def read(
    reading, keyed, removed, v, states, erased, out, T, H, DK, DV, N,
    CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk from the state before it: what `walk` does with OUT, for all chunks at once."""
    program, chunk, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BV
    batch, head = program // H, program % H
    row, rows, tile, place = batch * T + chunk * CHUNK, T - chunk * CHUNK, program * N + chunk, head * DV + column
    held = load(states + column, tile * DK, DV, DK, DV - column, BK, BV)
    values = load(v + place, row, H * DV, rows, DV - column, CHUNK, BV)
    gone = load(erased + place, row, H * DV, rows, DV - column, CHUNK, BV)
    found = read_chunk(reading + head * DK, keyed, removed, held, values, gone, tile, row, rows, H * DK, DK, CHUNK, BK)
    store(out + place, found, row, H * DV, rows, DV - column, CHUNK, BV)
