"""wkv7's Triton kernels of the backward pass: one walk from the last chunk to the first, then all chunks at once.

Of a chunk, e is what it erases, dS the gradient of the state after it, and dr that of the right side of the system
that e solves. No sum is a difference of larger ones: the gradient of a log decay is the sum of all products that it is
a factor of.
"""

import triton
import triton.language as tl

from archlab.kernels.linear_recurrence.forward import (
    decays_into,
    decays_outof,
    decays_over,
    join,
    load,
    load_decays,
    load_over,
    store,
    sums,
)
from archlab.kernels.wkv7.forward import decays_before


@triton.jit
def walk_back(
    reading, erasing, writing, removing, over, keyed, removed, seen, inverse, dout, dlast, dstates, dright, dv, dfirst,
    T, H, DK, DV, N,
    CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of the states after all chunks, of the right sides, of v, and of the first state."""
    program, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BV
    batch, head = program // H, program % H
    stride, place, columns = H * DK, head * DK, DV - column
    dheld = load(dlast + column, program * DK, DV, DK, columns, BK, BV).to(tl.float32)
    for step in range(0, N):
        chunk = N - 1 - step
        row, rows = batch * T + chunk * CHUNK, T - chunk * CHUNK
        tile = program * N + chunk
        store(dstates + column, dheld, tile * DK, DV, DK, columns, BK, BV)
        dread = load(dout + head * DV + column, row, H * DV, rows, columns, CHUNK, BV)
        narrow = dread.dtype
        directions = load(removing + place, row, stride, rows, DK, CHUNK, BK)
        dgone = tl.dot(directions, dheld.to(narrow), input_precision="ieee")
        among = load(removed, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
        dgone = -tl.dot(tl.trans(among), dread, dgone, input_precision="ieee")
        solve = load(inverse, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
        found = tl.dot(tl.trans(solve), dgone.to(narrow), input_precision="ieee").to(narrow)
        store(dright + head * DV + column, found, row, H * DV, rows, columns, CHUNK, BV)
        keys = load(writing + place, row, stride, rows, DK, CHUNK, BK)
        dvalues = tl.dot(keys, dheld.to(narrow), input_precision="ieee")
        among = load(keyed, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
        dvalues = tl.dot(tl.trans(among), dread, dvalues, input_precision="ieee")
        among = load(seen, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
        dvalues = tl.dot(tl.trans(among), found, dvalues, input_precision="ieee")
        store(dv + head * DV + column, dvalues, row, H * DV, rows, columns, CHUNK, BV)
        dheld *= load_over(over, tile, DK, BK)
        queries = load(reading + place, row, stride, rows, DK, CHUNK, BK)
        dheld += tl.dot(tl.trans(queries), dread, input_precision="ieee")
        erasers = load(erasing + place, row, stride, rows, DK, CHUNK, BK)
        dheld += tl.dot(tl.trans(erasers), found, input_precision="ieee")
    store(dfirst + column, dheld, program * DK, DV, DK, columns, BK, BV)


@triton.jit
def pair_gradients(left, v, erased, dkeyed, dremoved, T, H, DV, N, CHUNK: tl.constexpr, BV: tl.constexpr):
    """The gradients of A with keys and of A with what is removed `[C,C]`, of every chunk, from those `left` of them: of
    the outputs, or of the right sides.
    """
    program, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = program // H, program % H
    row, rows = batch * T + chunk * CHUNK, T - chunk * CHUNK
    keyed, removed = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for column in range(0, DV, BV):
        place, columns = head * DV + column, DV - column
        given = load(left + place, row, H * DV, rows, columns, CHUNK, BV)
        keyed += tl.dot(given, tl.trans(load(v + place, row, H * DV, rows, columns, CHUNK, BV)), input_precision="ieee")
        gone = load(erased + place, row, H * DV, rows, columns, CHUNK, BV)
        removed -= tl.dot(given, tl.trans(gone), input_precision="ieee")
    tile = (program * N + chunk) * CHUNK
    store(dkeyed, keyed, tile, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
    store(dremoved, removed, tile, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)


@triton.jit
def of_states(
    dout, dright, v, erased, states, dstates, row, rows, first, channels, DV, stride,
    CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """For BK channels, before their decays, the gradients of what reads the state, of what is erased of it, of keys and
    of what is removed `[C,BK]`, and of the decay over the chunk `[BK]`: sums over the columns of values.
    """
    dreads, derases = tl.zeros((CHUNK, BK), tl.float32), tl.zeros((CHUNK, BK), tl.float32)
    dwrites, dremoves = tl.zeros((CHUNK, BK), tl.float32), tl.zeros((CHUNK, BK), tl.float32)
    dtotal = tl.zeros((BK,), tl.float32)
    for column in range(0, DV, BV):
        columns = DV - column
        state = load(states + column, first, DV, channels, columns, BK, BV)
        dstate = load(dstates + column, first, DV, channels, columns, BK, BV)
        dread = load(dout + column, row, stride, rows, columns, CHUNK, BV)
        dreads += tl.dot(dread, tl.trans(state), input_precision="ieee")
        given = load(dright + column, row, stride, rows, columns, CHUNK, BV)
        derases += tl.dot(given, tl.trans(state), input_precision="ieee")
        values = load(v + column, row, stride, rows, columns, CHUNK, BV)
        dwrites += tl.dot(values, tl.trans(dstate), input_precision="ieee")
        gone = load(erased + column, row, stride, rows, columns, CHUNK, BV)
        dremoves -= tl.dot(gone, tl.trans(dstate), input_precision="ieee")
        dtotal += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    return dreads, derases, dwrites, dremoves, dtotal


@triton.jit
def of_pairs(
    dkeyed, dremoved, tile, queries, keys, directions, log_decay, dqueries, dkeys, ddirections, dlog_decay,
    NARROW: tl.constexpr, BEFORE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of BK channels what the pairs `[C,C]` of reads, or with BEFORE of removals, add."""
    with_keys = load(dkeyed, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
    with_removed = load(dremoved, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
    if not BEFORE:
        i = tl.arange(0, CHUNK)
        own = tl.sum(tl.where(i[:, None] == i[None, :], with_keys, 0.0).to(tl.float32), 1)[:, None]
        gone = tl.sum(tl.where(i[:, None] == i[None, :], with_removed, 0.0).to(tl.float32), 1)[:, None]
        dqueries += own * keys + gone * directions
        dkeys += own * queries
        ddirections += gone * queries
    half = 1
    while half < CHUNK:
        second, across, between = join(half, CHUNK, BEFORE)
        decay = tl.exp(sums(between, log_decay, NARROW))
        reading = tl.where(second, queries * decay, 0.0).to(NARROW)
        dacross = tl.where(across, with_keys, 0.0).to(NARROW)
        writing = tl.where(second, 0.0, keys * decay).to(NARROW)
        dreading = tl.dot(dacross, writing, input_precision="ieee")
        dwriting = decay * tl.dot(tl.trans(dacross), reading, input_precision="ieee")
        dkeys += dwriting
        dbetween = keys * dwriting
        dacross = tl.where(across, with_removed, 0.0).to(NARROW)
        writing = tl.where(second, 0.0, directions * decay).to(NARROW)
        dreading = decay * tl.dot(dacross, writing, dreading, input_precision="ieee")
        dwriting = decay * tl.dot(tl.trans(dacross), reading, input_precision="ieee")
        ddirections += dwriting
        dqueries += dreading
        dbetween += directions * dwriting + queries * dreading
        dlog_decay += sums(tl.trans(between), dbetween, NARROW)
        half *= 2
    return dqueries, dkeys, ddirections, dlog_decay


@triton.jit
def channel_gradients(
    r, k, removal, rate, g, dkeyed, dremoved, dseen, dlower, dout, dright, v, erased, states, dstates,
    dr, dk, dremoval, drate, dg, T, H, DK, DV, N,
    CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of BK channels of r, k, removal, rate and log decay, of one chunk of one head."""
    program, chunk, channel = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BK
    batch, head = program // H, program % H
    row, rows, stride = batch * T + chunk * CHUNK, T - chunk * CHUNK, H * DK
    tile, place, channels, own = program * N + chunk, head * DK + channel, DK - channel, head * DV
    queries = load(r + place, row, stride, rows, channels, CHUNK, BK)
    narrow = queries.dtype
    keys = load(k + place, row, stride, rows, channels, CHUNK, BK)
    removals = load(removal + place, row, stride, rows, channels, CHUNK, BK)
    rates = load(rate + place, row, stride, rows, channels, CHUNK, BK).to(tl.float32)
    directions = rates * removals
    dreads, derases, dwrites, dremoves, dtotal = of_states(
        dout + own, dright + own, v + own, erased + own, states, dstates, row, rows, tile * DK + channel, channels, DV,
        H * DV, CHUNK, BK, BV,
    )  # fmt: skip
    rest = decays_outof(g + place, row, stride, rows, channels, CHUNK, BK)
    dreads *= decays_into(g + place, row, stride, rows, channels, CHUNK, BK)
    derases *= decays_before(g + place, row, stride, rows, channels, CHUNK, BK)
    dwrites *= rest
    dremoves *= rest
    i = tl.arange(0, CHUNK)
    until, after = (i[:, None] <= i[None, :]).to(tl.float32), (i[:, None] < i[None, :]).to(tl.float32)
    total = decays_over(g + place, row, stride, rows, channels, CHUNK, BK)
    dlog_decay = sums(until, queries * dreads, narrow) + sums(after, removals * derases, narrow)
    dlog_decay += sums(1.0 - until, keys * dwrites + directions * dremoves, narrow) + (total * dtotal)[None, :]
    log_decay = load_decays(g + place, row, stride, rows, channels, CHUNK, BK)
    dreads, dwrites, dremoves, dlog_decay = of_pairs(
        dkeyed, dremoved, tile, queries, keys, directions, log_decay, dreads, dwrites, dremoves, dlog_decay,
        narrow, False, CHUNK,
    )  # fmt: skip
    derases, dwrites, dremoves, dlog_decay = of_pairs(
        dseen, dlower, tile, removals, keys, directions, log_decay, derases, dwrites, dremoves, dlog_decay,
        narrow, True, CHUNK,
    )  # fmt: skip
    store(dr + place, dreads, row, stride, rows, channels, CHUNK, BK)
    store(dk + place, dwrites, row, stride, rows, channels, CHUNK, BK)
    store(dremoval + place, derases + rates * dremoves, row, stride, rows, channels, CHUNK, BK)
    store(drate + place, removals * dremoves, row, stride, rows, channels, CHUNK, BK)
    store(dg + place, dlog_decay, row, stride, rows, channels, CHUNK, BK)
