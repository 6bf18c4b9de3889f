"""The linear recurrence's Triton kernels of the forward pass, and what those of the backward pass share with them.

A chunk has C tokens; S is the state `[Dk,Dv]` before it, narrow is the dtype of v. DECAY is 0 without decay, 1 for one
per token, 2 for one per channel. All arithmetic is in float32 but the operands of products, which are narrow.
"""

import triton
import triton.language as tl

from archlab.kernels import interpret

interpret.apply()
RESET = tl.constexpr(-1e4)  # exp of it is 0; stands for -inf, which has no differences and no product with 0


@triton.jit
def load(ptr, row, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of a matrix from a row on: 0 beyond its `rows` and `columns` that are left."""
    i, d = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    return tl.load(ptr + (row + i) * stride + d, mask=(i < rows) & (d < columns), other=0.0)


@triton.jit
def store(ptr, x, row, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, d = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    tl.store(ptr + (row + i) * stride + d, x.to(ptr.dtype.element_ty), mask=(i < rows) & (d < columns))


@triton.jit
def load_column(ptr, row, stride, rows, ROWS: tl.constexpr):
    """One number of each row, in float32."""
    i = tl.arange(0, ROWS)
    return tl.load(ptr + (row + i) * stride, mask=i < rows, other=0.0).to(tl.float32)


@triton.jit
def load_next(ptr, row, stride, rows, ROWS: tl.constexpr):
    """The number of the row after each; 0 after the chunk's last."""
    i = tl.arange(0, ROWS)
    return tl.load(ptr + (row + i + 1) * stride, mask=(i + 1 < rows) & (i + 1 < ROWS), other=0.0).to(tl.float32)


@triton.jit
def sums(zero_one, x, narrow: tl.constexpr):
    """A matrix of zeros and ones times x; beside narrow operands to 16 bits, in two products of bfloat16."""
    if narrow == tl.float32:
        return tl.dot(zero_one, x, input_precision="ieee")
    high = x.to(tl.bfloat16)
    low = (x - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(zero_one.to(tl.bfloat16), low, tl.dot(zero_one.to(tl.bfloat16), high))


@triton.jit
def decays_into(g, row, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Decays per channel from the start of a chunk to each token `[C,Dk]`."""
    return tl.exp(tl.cumsum(load(g, row, stride, rows, columns, ROWS, COLUMNS).to(tl.float32), 0))


@triton.jit
def decays_outof(g, row, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Decays per channel from each token to the end of its chunk `[C,Dk]`."""
    i, d = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    later = (i + 1 < rows) & (i + 1 < ROWS) & (d < columns)
    after = tl.load(g + (row + i + 1) * stride + d, mask=later, other=0.0).to(tl.float32)
    return tl.exp(tl.cumsum(after, 0, reverse=True))


@triton.jit
def decays_over(g, row, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Decays per channel over a chunk `[Dk]`."""
    return tl.exp(tl.sum(load(g, row, stride, rows, columns, ROWS, COLUMNS).to(tl.float32), 0))


@triton.jit
def pair_decays(log_decay, ROWS: tl.constexpr):
    """exp(c_i - c_j) for j <= i, else 0, of the cumulative sums c of log decays `[C]`.

    The sums are in float64: their differences are taken of what float32 has of them, and of the rest.
    """
    sums = tl.cumsum(tl.maximum(log_decay, RESET).to(tl.float64), 0)
    near = sums.to(tl.float32)
    finer = (sums - near.to(tl.float64)).to(tl.float32)
    exponents = (near[:, None] - near[None, :]) + (finer[:, None] - finer[None, :])
    i = tl.arange(0, ROWS)
    below = tl.where(i[:, None] > i[None, :], tl.exp(tl.minimum(exponents, 0.0)), 0.0)
    return tl.where(i[:, None] == i[None, :], 1.0, below)


@triton.jit
def join(half, ROWS: tl.constexpr, BEFORE: tl.constexpr = False):
    """Of blocks of `half` tokens that are joined to twice their size: which tokens are in a second half, the pairs
    whose reader is in the second and whose writer in the first half of one block, and for each token the tokens
    between it and the boundary, itself included where it reads; not with BEFORE, where it reads before it decays.
    """
    i = tl.arange(0, ROWS)
    row, column = i[:, None], i[None, :]
    boundary = row // (2 * half) * (2 * half) + half
    second = row >= boundary
    across = second & (column < boundary) & (column >= boundary - half)
    upto = column < row if BEFORE else column <= row
    between = (second & (column >= boundary) & upto) | ((row < column) & (column < boundary))
    return second, across, between.to(tl.float32)


@triton.jit
def add_pairs(
    found, queries, keys, log_decay,
    NARROW: tl.constexpr, OPERANDS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    BEFORE: tl.constexpr = False,
):  # fmt: skip
    """To `[C,C]` the sums over channels of queries_id exp(c_id - c_jd) keys_jd for j < i, of decays per channel; with
    BEFORE of exp(c_(i-1)d - c_jd).

    Blocks of 1, 2, 4, ... tokens are joined: what the second half reads of the first is a product of matrices, as the
    decay from j to i is that from j to the boundary times that from there to i. So no exponent is positive.
    """
    half = 1
    while half < ROWS:
        second, across, between = join(half, ROWS, BEFORE)
        decay = tl.exp(sums(between, log_decay, NARROW))
        reading = tl.where(second, queries * decay, 0.0).to(OPERANDS)
        writing = tl.where(second, 0.0, keys * decay).to(OPERANDS)
        found += tl.where(across, tl.dot(reading, tl.trans(writing), input_precision=PRECISION), 0.0)
        half *= 2
    return found


@triton.jit
def inverted(lower, PRECISION: tl.constexpr, ROWS: tl.constexpr):
    """(I + L)^-1 of what stands below the diagonal of `lower` `[C,C]`: blocks of tokens joined."""
    i = tl.arange(0, ROWS)
    found = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    half = 1
    while half < ROWS:
        _, across, _ = join(half, ROWS)
        corner = tl.dot(tl.where(across, lower, 0.0), found, input_precision=PRECISION)
        found -= tl.dot(found, corner, input_precision=PRECISION)
        half *= 2
    return found


@triton.jit
def load_decays(g, row, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Log decays per channel that have sums and products."""
    return tl.maximum(load(g, row, stride, rows, columns, ROWS, COLUMNS).to(tl.float32), RESET)


@triton.jit
def decay_channels(
    q, k, g, reading, writing, erasing, over, T, H, SHARED, DK, N, q_stride, k_stride, g_stride,
    DELTA: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BK channels of one chunk with their decays: queries from its start, keys to its end, with the delta rule keys
    from its start as well; and the decays over it.
    """
    program, chunk, channel = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BK
    batch, head = program // H, program % H
    row, rows, columns = batch * T + chunk * CHUNK, T - chunk * CHUNK, DK - channel
    queries = load(q + head // SHARED * DK + channel, row, q_stride, rows, columns, CHUNK, BK)
    keys = load(k + head // SHARED * DK + channel, row, k_stride, rows, columns, CHUNK, BK)
    place = head * DK + channel
    into = decays_into(g + place, row, g_stride, rows, columns, CHUNK, BK)
    rest = decays_outof(g + place, row, g_stride, rows, columns, CHUNK, BK)
    store(reading + place, queries * into, row, H * DK, rows, columns, CHUNK, BK)
    store(writing + place, keys * rest, row, H * DK, rows, columns, CHUNK, BK)
    if DELTA:
        store(erasing + place, keys * into, row, H * DK, rows, columns, CHUNK, BK)
    d = tl.arange(0, BK)
    total = decays_over(g + place, row, g_stride, rows, columns, CHUNK, BK)
    tl.store(over + (program * N + chunk) * DK + channel + d, total, mask=d < columns)


@triton.jit
def load_over(over, tile, DK, BK: tl.constexpr):
    """Decays per channel over a chunk `[Dk,1]`."""
    d = tl.arange(0, BK)
    return tl.load(over + tile * DK + d, mask=d < DK, other=0.0)[:, None]


@triton.jit
def invert(
    k, g, beta, inverse, T, H, SHARED, DK, N, k_stride, g_stride, beta_stride,
    DECAY: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """(I + L)^-1 `[C,C]` of every chunk, L_ij = beta_i times the sum over d of k_id exp(c_id - c_jd) k_jd for j < i."""
    program, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = program // H, program % H
    row, rows = batch * T + chunk * CHUNK, T - chunk * CHUNK
    if DECAY == 2:
        lower = tl.zeros((CHUNK, CHUNK), tl.float32)
        for channel in range(0, DK, BK):
            columns = DK - channel
            keys = load(k + head // SHARED * DK + channel, row, k_stride, rows, columns, CHUNK, BK)
            log_decay = load_decays(g + head * DK + channel, row, g_stride, rows, columns, CHUNK, BK)
            lower = add_pairs(lower, keys, keys, log_decay, keys.dtype, tl.float32, SUMS, CHUNK)
    else:
        keys = load(k + head // SHARED * DK, row, k_stride, rows, DK, CHUNK, BK)
        lower = tl.dot(keys, tl.trans(keys), input_precision="ieee")
    lower *= load_column(beta + head, row, beta_stride, rows, CHUNK)[:, None]
    if DECAY == 1:
        lower *= pair_decays(load_column(g + head, row, g_stride, rows, CHUNK), CHUNK)
    store(inverse, inverted(lower, SUMS, CHUNK), (program * N + chunk) * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)


@triton.jit
def weigh(
    q, k, g, weights, T, H, SHARED, DK, N, q_stride, k_stride, g_stride,
    DECAY: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A `[C,C]` of every chunk, A_ij = sum over d of q_id exp(c_id - c_jd) k_jd for j <= i."""
    program, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = program // H, program % H
    row, rows = batch * T + chunk * CHUNK, T - chunk * CHUNK
    i = tl.arange(0, CHUNK)
    found = tl.zeros((CHUNK, CHUNK), tl.float32)
    for channel in range(0, DK, BK):
        columns = DK - channel
        queries = load(q + head // SHARED * DK + channel, row, q_stride, rows, columns, CHUNK, BK)
        keys = load(k + head // SHARED * DK + channel, row, k_stride, rows, columns, CHUNK, BK)
        if DECAY == 2:
            log_decay = load_decays(g + head * DK + channel, row, g_stride, rows, columns, CHUNK, BK)
            own = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)
            found += tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
            found = add_pairs(found, queries, keys, log_decay, keys.dtype, keys.dtype, "ieee", CHUNK)
        else:
            found += tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if DECAY == 1:
        found *= pair_decays(load_column(g + head, row, g_stride, rows, CHUNK), CHUNK)
    if DECAY == 0:
        found = tl.where(i[:, None] >= i[None, :], found, 0.0)
    store(weights, found, (program * N + chunk) * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)


@triton.jit
def read_chunk(
    q, g, weights, held, written, tile, row, rows, DK, q_stride, g_stride,
    DECAY: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """(q exp(c)) S + A u `[C,BV]`, for a state S `[Dk,BV]` and what the chunk writes, u `[C,BV]`; A is tile `tile`.

    Decays per channel are in the queries already.
    """
    narrow = written.dtype
    queries = load(q, row, q_stride, rows, DK, CHUNK, BK)
    out = tl.dot(queries, held.to(narrow), input_precision="ieee")
    if DECAY == 1:
        out *= tl.exp(tl.cumsum(load_column(g, row, g_stride, rows, CHUNK), 0))[:, None]
    among = load(weights, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
    return tl.dot(among, written, out, input_precision="ieee")


@triton.jit
def walk(
    q, k, v, g, erasing, beta, inverse, weights, first, out, states, written, last, T, H, SHARED, DK, DV, N,
    q_stride, k_stride, v_stride, g_stride, beta_stride, scale,
    DECAY: tl.constexpr, DELTA: tl.constexpr, FIRST: tl.constexpr, OUT: tl.constexpr, KEEP: tl.constexpr,
    CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One head's state, BV columns of it, from chunk to chunk in registers.

    With OUT the outputs are computed on the way; with KEEP the states before all chunks are stored, and what the delta
    rule writes. Decays per channel are in q, k and `erasing` already, and g has those over each chunk.
    """
    program, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BV
    batch, head = program // H, program % H
    q_head = head // SHARED
    held = tl.zeros((BK, BV), tl.float32)
    if FIRST:
        held += load(first + column, program * DK, DV, DK, DV - column, BK, BV).to(tl.float32)
    for chunk in range(0, N):
        row, rows = batch * T + chunk * CHUNK, T - chunk * CHUNK
        tile = program * N + chunk
        if KEEP:
            store(states + column, held, tile * DK, DV, DK, DV - column, BK, BV)
        keys = load(k + q_head * DK, row, k_stride, rows, DK, CHUNK, BK)
        values = load(v + head * DV + column, row, v_stride, rows, DV - column, CHUNK, BV)
        narrow = values.dtype
        if DECAY == 1:
            log_decay = load_column(g + head, row, g_stride, rows, CHUNK)
            rest = tl.exp(tl.cumsum(load_next(g + head, row, g_stride, rows, CHUNK), 0, reverse=True))
        if DELTA:
            erasers = keys
            if DECAY == 2:
                erasers = load(erasing + q_head * DK, row, k_stride, rows, DK, CHUNK, BK)
            erased = tl.dot(erasers, held.to(narrow), input_precision="ieee")
            if DECAY == 1:
                erased *= tl.exp(tl.cumsum(log_decay, 0))[:, None]
            right = load_column(beta + head, row, beta_stride, rows, CHUNK)[:, None] * (values - erased)
            solve = load(inverse, tile * CHUNK, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
            values = tl.dot(solve, right.to(narrow), input_precision="ieee").to(narrow)
            if KEEP:
                store(written + head * DV + column, values, row, H * DV, rows, DV - column, CHUNK, BV)
        if OUT:
            read = read_chunk(
                q + q_head * DK, g + head, weights, held, values, tile, row, rows, DK, q_stride, g_stride,
                DECAY, CHUNK, BK,
            )  # fmt: skip
            store(out + head * DV + column, scale * read, row, H * DV, rows, DV - column, CHUNK, BV)
        if DECAY == 1:
            held *= tl.exp(tl.sum(log_decay, 0))
            values = (rest[:, None] * values).to(narrow)
        if DECAY == 2:
            held *= load_over(g, tile, DK, BK)
        held += tl.dot(tl.trans(keys), values, input_precision="ieee")
    store(last + column, held, program * DK, DV, DK, DV - column, BK, BV)


@triton.jit
def read(
    q, g, weights, states, written, out, T, H, SHARED, DK, DV, N, q_stride, g_stride, written_stride, scale,
    DECAY: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk from the state before it: what `walk` does with OUT, for all chunks at once."""
    program, chunk, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BV
    batch, head = program // H, program % H
    row, rows = batch * T + chunk * CHUNK, T - chunk * CHUNK
    tile = program * N + chunk
    held = load(states + column, tile * DK, DV, DK, DV - column, BK, BV)
    values = load(written + head * DV + column, row, written_stride, rows, DV - column, CHUNK, BV)
    found = read_chunk(
        q + head // SHARED * DK, g + head, weights, held, values, tile, row, rows, DK, q_stride, g_stride,
        DECAY, CHUNK, BK,
    )  # fmt: skip
    store(out + head * DV + column, scale * found, row, H * DV, rows, DV - column, CHUNK, BV)
