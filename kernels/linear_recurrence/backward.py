"""The linear recurrence's Triton kernels of the backward pass: one walk from the last chunk to the first, then all
chunks at once.

Of a chunk, u is what it writes (v, or with the delta rule the solution), dS the gradient of the state after it. No sum
is a difference of larger ones: the gradient of a log decay is the sum of all products that it is a factor of.
"""

import triton
import triton.language as tl

from archlab.kernels.linear_recurrence.forward import (  # fmt: skip
    decays_into,
    decays_outof,
    decays_over,
    join,
    load,
    load_column,
    load_decays,
    load_next,
    load_over,
    pair_decays,
    store,
    sums,
)


@triton.jit
def walk_back(
    q, k, g, erasing, beta, inverse, weights, dout, dlast, dstates, dwritten, dfirst, T, H, SHARED, DK, DV, N,
    q_stride, k_stride, g_stride, beta_stride, dout_stride, scale,
    DECAY: tl.constexpr, DELTA: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of the states after all chunks, and those of what is written: du = A^T do + (k exp(c_last - c)) dS.

    With the delta rule u = (I + L)^-1 r, and the gradient of r is stored. Decays per channel are in q, k and `erasing`
    already, and g has those over each chunk.
    """
    program, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BV
    batch, head = program // H, program % H
    q_head = head // SHARED
    dheld = load(dlast + column, program * DK, DV, DK, DV - column, BK, BV).to(tl.float32)
    for step in range(0, N):
        chunk = N - 1 - step
        row, rows = batch * T + chunk * CHUNK, T - chunk * CHUNK
        tile = program * N + chunk
        store(dstates + column, dheld, tile * DK, DV, DK, DV - column, BK, BV)
        keys = load(k + q_head * DK, row, k_stride, rows, DK, CHUNK, BK)
        narrow = keys.dtype
        dread = (scale * load(dout + head * DV + column, row, dout_stride, rows, DV - column, CHUNK, BV)).to(narrow)
        among = load(weights, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
        du = tl.dot(keys, dheld.to(narrow), input_precision="ieee")
        if DECAY == 1:
            log_decay = load_column(g + head, row, g_stride, rows, CHUNK)
            rest = tl.exp(tl.cumsum(load_next(g + head, row, g_stride, rows, CHUNK), 0, reverse=True))
            into = tl.exp(tl.cumsum(log_decay, 0))
            du *= rest[:, None]
            dheld *= tl.exp(tl.sum(log_decay, 0))
        if DECAY == 2:
            dheld *= load_over(g, tile, DK, BK)
        du += tl.dot(tl.trans(among), dread, input_precision="ieee")
        if DELTA:
            solve = load(inverse, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
            du = tl.dot(tl.trans(solve), du.to(narrow), input_precision="ieee")
        store(dwritten + head * DV + column, du, row, H * DV, rows, DV - column, CHUNK, BV)
        if DELTA:
            erasers = keys
            derased = load_column(beta + head, row, beta_stride, rows, CHUNK)[:, None] * du
            if DECAY == 1:
                derased *= into[:, None]
            if DECAY == 2:
                erasers = load(erasing + q_head * DK, row, k_stride, rows, DK, CHUNK, BK)
            dheld -= tl.dot(tl.trans(erasers), derased.to(narrow), input_precision="ieee")
        queries = load(q + q_head * DK, row, q_stride, rows, DK, CHUNK, BK)
        if DECAY == 1:
            dread = (dread * into[:, None]).to(narrow)
        dheld += tl.dot(tl.trans(queries), dread, input_precision="ieee")
    store(dfirst + column, dheld, program * DK, DV, DK, DV - column, BK, BV)


@triton.jit
def over_values(
    keys, into, rest, betas, v, written, dout, states, dstates, dwritten, dv, row, rows, first, DK, DV,
    v_stride, written_stride, dout_stride, row_stride, scale,
    DECAY: tl.constexpr, DELTA: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Sums over the columns of values: the gradients of A and L `[C,C]`, of beta where it multiplies values, of the
    decays into the chunk's tokens and out of them `[C]`, and of that over all of it. dv is stored with the delta rule.
    """
    narrow = keys.dtype
    dpairs, dlower = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    dbetas, dinto, drest = tl.zeros_like(into), tl.zeros_like(into), tl.zeros_like(into)
    dtotal = 0.0
    for column in range(0, DV, BV):
        columns = DV - column
        u = load(written + column, row, written_stride, rows, columns, CHUNK, BV)
        dread = scale * load(dout + column, row, dout_stride, rows, columns, CHUNK, BV)
        dpairs += tl.dot(dread.to(narrow), tl.trans(u), input_precision="ieee")
        if DECAY or DELTA:
            held = load(states + column, first, DV, DK, columns, BK, BV)
        if DECAY:
            dheld = load(dstates + column, first, DV, DK, columns, BK, BV)
            dtotal += tl.sum(held.to(tl.float32) * dheld.to(tl.float32))
            drest += tl.sum(u * rest[:, None] * tl.dot(keys, dheld, input_precision="ieee"), 1)
        if DELTA:
            values = load(v + column, row, v_stride, rows, columns, CHUNK, BV)
            dright = load(dwritten + column, row, row_stride, rows, columns, CHUNK, BV)
            dlower -= tl.dot(dright, tl.trans(u), input_precision="ieee")
            erased = into[:, None] * tl.dot(keys, held, input_precision="ieee")
            dbetas += tl.sum(dright * (values - erased), 1)
            dvalues = betas[:, None] * dright
            store(dv + column, dvalues, row, row_stride, rows, columns, CHUNK, BV)
            dinto -= tl.sum(dvalues * erased, 1)
    return dpairs, dlower, dbetas, dinto, drest, dtotal


@triton.jit
def of_pairs(
    keys, log_decay, betas, weights, dpairs, dlower, dbetas, drest, dtotal, dbeta, row, rows, place, H,
    DECAY: tl.constexpr, DELTA: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """From the gradients of A and L those of the products of queries with keys and of keys with keys `[C,C]`, and of
    the log decays `[C]` all but what is read of the state before the chunk. That of beta is stored.
    """
    narrow = keys.dtype
    i = tl.arange(0, CHUNK)
    earlier = i[:, None] > i[None, :]
    dlog_decay = tl.zeros_like(log_decay)
    if DECAY:
        among = load(weights, place, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
        crossing = tl.where(earlier, dpairs * among, 0.0)
        pairs = pair_decays(log_decay, CHUNK)
        dpairs *= pairs
    else:
        dpairs = tl.where(i[:, None] >= i[None, :], dpairs, 0.0)
    if DELTA:
        dlower = tl.where(earlier, dlower, 0.0)
        if DECAY:
            dlower *= pairs
        among = dlower * tl.dot(keys, tl.trans(keys), input_precision="ieee")
        store(dbeta, (dbetas + tl.sum(among, 1))[:, None], row, H, rows, 1, CHUNK, 1)
        dlower = (betas[:, None] * dlower).to(narrow)
        if DECAY:
            crossing += betas[:, None] * among
    if DECAY:
        after = sums(tl.where(earlier, 0.0, 1.0), crossing, narrow) + drest[None, :]
        dlog_decay = tl.sum(tl.where(earlier, after, 0.0), 1) + tl.exp(tl.sum(log_decay, 0)) * dtotal
    return dpairs.to(narrow), dlower, dlog_decay


@triton.jit
def of_states(
    dkeys, into, rest, betas, written, dout, states, dstates, dwritten, row, rows, first, DK, DV,
    written_stride, dout_stride, row_stride, scale,
    DELTA: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients `[C,Dk]` of queries by what they read of the state before the chunk, and of keys by what they write
    to the one after it and erase of the one before, added to `dkeys`.
    """
    narrow = written.dtype.element_ty
    dqueries = tl.zeros((CHUNK, BK), tl.float32)
    for column in range(0, DV, BV):
        columns = DV - column
        u = load(written + column, row, written_stride, rows, columns, CHUNK, BV)
        dread = scale * load(dout + column, row, dout_stride, rows, columns, CHUNK, BV)
        held = load(states + column, first, DV, DK, columns, BK, BV)
        dheld = load(dstates + column, first, DV, DK, columns, BK, BV)
        dqueries += tl.dot((dread * into[:, None]).to(narrow), tl.trans(held), input_precision="ieee")
        dkeys += tl.dot((u * rest[:, None]).to(narrow), tl.trans(dheld), input_precision="ieee")
        if DELTA:
            dright = load(dwritten + column, row, row_stride, rows, columns, CHUNK, BV)
            derased = (dright * (betas * into)[:, None]).to(narrow)
            dkeys -= tl.dot(derased, tl.trans(held), input_precision="ieee")
    return dqueries, dkeys


@triton.jit
def gradients(
    q, k, v, g, beta, weights, written, dout, states, dstates, dwritten, dq, dk, dv, dg, dbeta, T, H, SHARED, DK, DV, N,
    q_stride, k_stride, v_stride, g_stride, beta_stride, written_stride, dout_stride, scale,
    DECAY: tl.constexpr, DELTA: tl.constexpr,
    CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k, log decay and beta of one chunk of one head, and of v with the delta rule.

    The decay is one per token or none; dq and dk are those of each head of v.
    """
    program, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = program // H, program % H
    row, rows, tile = batch * T + chunk * CHUNK, T - chunk * CHUNK, program * N + chunk
    queries = load(q + head // SHARED * DK, row, q_stride, rows, DK, CHUNK, BK)
    keys = load(k + head // SHARED * DK, row, k_stride, rows, DK, CHUNK, BK)
    log_decay, into = tl.zeros((CHUNK,), tl.float32), tl.full((CHUNK,), 1.0, tl.float32)
    rest, betas = into, into
    if DECAY:
        log_decay = load_column(g + head, row, g_stride, rows, CHUNK)
        into = tl.exp(tl.cumsum(log_decay, 0))
        rest = tl.exp(tl.cumsum(load_next(g + head, row, g_stride, rows, CHUNK), 0, reverse=True))
    if DELTA:
        betas = load_column(beta + head, row, beta_stride, rows, CHUNK)
    u, do, dright = written + head * DV, dout + head * DV, dwritten + head * DV
    dpairs, dlower, dbetas, dinto, drest, dtotal = over_values(
        keys, into, rest, betas, v + head * DV, u, do, states, dstates, dright, dv + head * DV, row, rows, tile * DK,
        DK, DV, v_stride, written_stride, dout_stride, H * DV, scale, DECAY, DELTA, CHUNK, BK, BV,
    )  # fmt: skip
    dweights, dlower, dlog_decay = of_pairs(
        keys, log_decay, betas, weights, dpairs, dlower, dbetas, drest, dtotal, dbeta + head, row, rows, tile * CHUNK,
        H, DECAY, DELTA, CHUNK,
    )  # fmt: skip
    dkeys = tl.dot(tl.trans(dweights), queries, input_precision="ieee")
    if DELTA:
        dkeys += tl.dot(dlower, keys, input_precision="ieee")
        dkeys += tl.dot(tl.trans(dlower), keys, input_precision="ieee")
    dqueries, dkeys = of_states(
        dkeys, into, rest, betas, u, do, states, dstates, dright, row, rows, tile * DK,
        DK, DV, written_stride, dout_stride, H * DV, scale, DELTA, CHUNK, BK, BV,
    )  # fmt: skip
    if DECAY:
        dinto += tl.sum(queries * dqueries, 1)
        dlog_decay += tl.cumsum(dinto, 0, reverse=True)
        store(dg + head, dlog_decay[:, None], row, H, rows, 1, CHUNK, 1)
    dqueries += tl.dot(dweights, keys, input_precision="ieee")
    store(dq + head * DK, dqueries, row, H * DK, rows, DK, CHUNK, BK)
    store(dk + head * DK, dkeys, row, H * DK, rows, DK, CHUNK, BK)


@triton.jit
def of_channels(
    v, u, dread, dright, dv, betas, held, dheld, row, rows, first, channels, block, blocks, DV,
    v_stride, u_stride, dread_stride, dright_stride, scale,
    DELTA: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Sums over the columns of values: the gradients of A and of L / beta `[C,C]`, and for BK channels, before their
    decays, those of what queries read, of what keys write, of what they erase over beta `[C,BK]`, and of the decay
    over the chunk `[BK]`. With the delta rule each of the `blocks` of channels stores dv of its share of the columns,
    and has of them the gradient of beta where it multiplies values `[C]`.
    """
    narrow = u.dtype.element_ty
    dpairs, dlower = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    dreads, dwrites = tl.zeros((CHUNK, BK), tl.float32), tl.zeros((CHUNK, BK), tl.float32)
    derases, dtotal, dbetas = tl.zeros((CHUNK, BK), tl.float32), tl.zeros((BK,), tl.float32), tl.zeros_like(betas)
    for column in range(0, DV, BV):
        columns = DV - column
        written = load(u + column, row, u_stride, rows, columns, CHUNK, BV)
        dout = (scale * load(dread + column, row, dread_stride, rows, columns, CHUNK, BV)).to(narrow)
        state = load(held + column, first, DV, channels, columns, BK, BV)
        dstate = load(dheld + column, first, DV, channels, columns, BK, BV)
        dpairs += tl.dot(dout, tl.trans(written), input_precision="ieee")
        dreads += tl.dot(dout, tl.trans(state), input_precision="ieee")
        dwrites += tl.dot(written, tl.trans(dstate), input_precision="ieee")
        dtotal += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        if DELTA:
            dr = load(dright + column, row, dright_stride, rows, columns, CHUNK, BV)
            dlower -= tl.dot(dr, tl.trans(written), input_precision="ieee")
            derases -= tl.dot(dr, tl.trans(state), input_precision="ieee")
            if column // BV % blocks == block:
                dbetas += tl.sum(dr * load(v + column, row, v_stride, rows, columns, CHUNK, BV).to(tl.float32), 1)
                store(dv + column, betas[:, None] * dr, row, dright_stride, rows, columns, CHUNK, BV)
    return dpairs, dlower, dreads, dwrites, derases, dtotal, dbetas


@triton.jit
def of_joins(
    queries, keys, betas, log_decay, dpairs, dlower, dqueries, dkeys, derasing, dlog_decay,
    DELTA: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of BK channels what pairs of tokens add, join by join; of keys that erase, over beta."""
    narrow = queries.dtype
    half = 1
    while half < CHUNK:
        second, across, between = join(half, CHUNK)
        decay = tl.exp(sums(between, log_decay, narrow))
        dacross = tl.where(across, dpairs, 0.0).to(narrow)
        reading = tl.where(second, queries * decay, 0.0).to(narrow)
        writing = tl.where(second, 0.0, keys * decay).to(narrow)
        dreading = decay * tl.dot(dacross, writing, input_precision="ieee")
        dwriting = tl.dot(tl.trans(dacross), reading, input_precision="ieee")
        dbetween = queries * dreading
        dqueries += dreading
        if DELTA:
            dacross = tl.where(across, dlower, 0.0)
            dreading = decay * tl.dot(dacross.to(narrow), writing, input_precision="ieee")
            reading = tl.where(second, keys * decay, 0.0).to(narrow)
            dacross = (betas[:, None] * dacross).to(narrow)
            dwriting += tl.dot(tl.trans(dacross), reading, input_precision="ieee")
            dbetween += betas[:, None] * keys * dreading
            derasing += dreading
        dkeys += decay * dwriting
        dlog_decay += sums(tl.trans(between), dbetween + keys * decay * dwriting, narrow)
        half *= 2
    return dqueries, dkeys, derasing, dlog_decay


@triton.jit
def channel_gradients(
    q, k, v, g, beta, written, dout, states, dstates, dwritten, dq, dk, dv, dg, dbeta, T, H, SHARED, DK, DV, N,
    q_stride, k_stride, v_stride, g_stride, beta_stride, written_stride, dout_stride, scale,
    DELTA: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of BK channels of q, k and of a log decay per channel, of one chunk of one head.

    That of beta is what these channels add to it; with the delta rule some columns of dv are stored as well.
    """
    program, chunk, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    batch, head, channel, blocks = program // H, program % H, block * BK, tl.num_programs(2)
    row, rows = batch * T + chunk * CHUNK, T - chunk * CHUNK
    first, channels = (program * N + chunk) * DK + channel, DK - channel
    queries = load(q + head // SHARED * DK + channel, row, q_stride, rows, channels, CHUNK, BK)
    keys = load(k + head // SHARED * DK + channel, row, k_stride, rows, channels, CHUNK, BK)
    narrow = queries.dtype
    i = tl.arange(0, CHUNK)
    into = decays_into(g + head * DK + channel, row, g_stride, rows, channels, CHUNK, BK)
    rest = decays_outof(g + head * DK + channel, row, g_stride, rows, channels, CHUNK, BK)
    total = decays_over(g + head * DK + channel, row, g_stride, rows, channels, CHUNK, BK)
    betas = tl.full((CHUNK,), 0.0, tl.float32)
    if DELTA:
        betas = load_column(beta + head, row, beta_stride, rows, CHUNK)
    dpairs, dlower, dqueries, dkeys, derasing, dtotal, dbetas = of_channels(
        v + head * DV, written + head * DV, dout + head * DV, dwritten + head * DV, dv + head * DV, betas, states,
        dstates, row, rows, first, channels, block, blocks, DV, v_stride, written_stride, dout_stride, H * DV, scale,
        DELTA, CHUNK, BK, BV,
    )  # fmt: skip
    dqueries *= into
    dkeys *= rest
    derasing *= into
    until = (i[:, None] <= i[None, :]).to(tl.float32)
    dlog_decay = sums(until, queries * dqueries + betas[:, None] * keys * derasing, narrow) + (total * dtotal)[None, :]
    dlog_decay += sums(1.0 - until, keys * dkeys, narrow)
    own = tl.sum(tl.where(i[:, None] == i[None, :], dpairs, 0.0), 1)[:, None]
    dqueries += own * keys
    dkeys += own * queries
    log_decay = load_decays(g + head * DK + channel, row, g_stride, rows, channels, CHUNK, BK)
    dqueries, dkeys, derasing, dlog_decay = of_joins(
        queries, keys, betas, log_decay, dpairs.to(narrow), dlower, dqueries, dkeys, derasing, dlog_decay, DELTA, CHUNK
    )
    if DELTA:
        dkeys += betas[:, None] * derasing
        dbetas += tl.sum(keys * derasing, 1)
        store(dbeta + head * blocks + block, dbetas[:, None], row, H * blocks, rows, 1, CHUNK, 1)
    store(dq + head * DK + channel, dqueries, row, H * DK, rows, channels, CHUNK, BK)
    store(dk + head * DK + channel, dkeys, row, H * DK, rows, channels, CHUNK, BK)
    store(dg + head * DK + channel, dlog_decay, row, H * DK, rows, channels, CHUNK, BK)
