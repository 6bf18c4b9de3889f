"""The backward pass of attention: what each query's output keeps of its gradient, then keys and values, then queries.

ds = p (dout v^T - delta) is the gradient of the biased logits, with delta = out . dout of each query. It is computed
twice, so that every sum has one owner and no two programs add into one place.
"""

import triton
import triton.language as tl

from kernels.attention.tiles import key_span, list_of, listed_tile, logits, of_decay, query_span, rows_of, store_rows


@triton.jit
def delta(
    out_ptr, dout_ptr, delta_ptr, out_strides, dout_strides, sizes, ROWS: tl.constexpr, VALUE_WIDTH: tl.constexpr
):
    """out . dout of each query `[B,H,T]`."""
    b, h = tl.program_id(1) // sizes.heads, tl.program_id(1) % sizes.heads
    start = tl.program_id(0) * ROWS
    row = start + tl.arange(0, ROWS)
    out = rows_of(out_ptr, start, b, h, out_strides, sizes.queries, sizes.value_width, ROWS, VALUE_WIDTH)
    dout = rows_of(dout_ptr, start, b, h, dout_strides, sizes.queries, sizes.value_width, ROWS, VALUE_WIDTH)
    places = tl.program_id(1).to(tl.int64) * sizes.queries + row
    tl.store(delta_ptr + places, tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1), mask=row < sizes.queries)


@triton.jit
def _key_step(
    start, k, v, j, cj, dk, dv, dc, q_ptr, dout_ptr, lse_ptr, delta_ptr, q_strides, dout_strides, b, h, scale, sizes,
    rules, biases, ORDER: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to the gradients of a tile of keys, which stand in rows. A query beyond the last
    has an infinite total, and so no weights."""
    row = start + tl.arange(0, QUERIES)
    i = (sizes.keys - sizes.queries + row)[None, :]
    places = (b * sizes.heads + h).to(tl.int64) * sizes.queries + row
    q = rows_of(q_ptr, start, b, h, q_strides, sizes.queries, sizes.width, QUERIES, WIDTH)
    lse = tl.load(lse_ptr + places, mask=row < sizes.queries, other=float("inf"))
    ci = of_decay(i, b, h, sizes, biases)
    products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    s, slope = logits(products, i, j[:, None], ci, cj, b, h, scale, sizes, rules, biases, ORDER, False)
    p = tl.exp2(s - lse[None, :])
    dout = rows_of(dout_ptr, start, b, h, dout_strides, sizes.queries, sizes.value_width, QUERIES, VALUE_WIDTH)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
    along = tl.load(delta_ptr + places, mask=row < sizes.queries, other=0.0)
    ds = p * (dp - along[None, :])
    if biases.decay is not None:
        dc -= tl.sum(ds, 1)
    dk = tl.dot((ds * slope).to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, dc


@triton.jit
def keys_backward(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, ddecay_ptr,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    scale, sizes, rules, biases, visits,
    ORDER: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, from all query heads that share it, and of each head its part of the decay's
    gradient `[B,H,S]`: minus the sums of ds over the queries, as its sums over the keys are 0. One loop masks all
    tiles: a second one for whole tiles takes more registers than there are."""
    tile = tl.program_id(0)
    heads = sizes.heads // sizes.groups
    b, shared = tl.program_id(1) // heads, tl.program_id(1) % heads
    j = tile * KEYS + tl.arange(0, KEYS)
    k = rows_of(k_ptr, tile * KEYS, b, shared, k_strides, sizes.keys, sizes.width, KEYS, WIDTH)
    v = rows_of(v_ptr, tile * KEYS, b, shared, v_strides, sizes.keys, sizes.value_width, KEYS, VALUE_WIDTH)
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, VALUE_WIDTH), tl.float32)
    for member in range(0, sizes.groups):
        h = shared * sizes.groups + member
        cj = of_decay(j[:, None], b, h, sizes, biases)
        dc = tl.zeros((KEYS,), tl.float32)
        if visits.blocks is not None:
            place = list_of(tile * KEYS, h, sizes.keys, visits, LIST)
            for index in range(0, tl.load(visits.counts + place) * (LIST // QUERIES)):
                start = listed_tile(index, place, visits, QUERIES, LIST)
                dk, dv, dc = _key_step(
                    start, k, v, j, cj, dk, dv, dc, q_ptr, dout_ptr, lse_ptr, delta_ptr, q_strides, dout_strides, b, h,
                    scale, sizes, rules, biases, ORDER, QUERIES, WIDTH, VALUE_WIDTH, PRECISION,
                )  # fmt: skip
        else:
            low, high = query_span(tile * KEYS, (tile + 1) * KEYS, b, h, tile, sizes, rules, visits, ORDER, QUERIES)
            for start in range(low, high, QUERIES):
                dk, dv, dc = _key_step(
                    start, k, v, j, cj, dk, dv, dc, q_ptr, dout_ptr, lse_ptr, delta_ptr, q_strides, dout_strides, b, h,
                    scale, sizes, rules, biases, ORDER, QUERIES, WIDTH, VALUE_WIDTH, PRECISION,
                )  # fmt: skip
        if ddecay_ptr is not None:
            tl.store(ddecay_ptr + (b * sizes.heads + h).to(tl.int64) * sizes.keys + j, dc, mask=j < sizes.keys)
    dk *= scale * 0.6931471805599453
    store_rows(dk_ptr, dk, tile * KEYS, b, shared, dk_strides, sizes.keys, sizes.width, KEYS, WIDTH)
    store_rows(dv_ptr, dv, tile * KEYS, b, shared, dv_strides, sizes.keys, sizes.value_width, KEYS, VALUE_WIDTH)


@triton.jit
def _along_diagonals(ds, SIZE: tl.constexpr):
    """Sums of ds `[SIZE, SIZE]` over i - j = r for r = 0, …, SIZE - 1, and over i - j = r - SIZE."""
    i, r = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    turned = tl.gather(ds, (i - r) & (SIZE - 1), 1)
    return tl.sum(tl.where(i >= r, turned, 0.0), 0), tl.sum(tl.where(i < r, turned, 0.0), 0)


@triton.jit
def _query_step(
    start, first, q, dout, i, ci, lse, along, carry, dq, k_ptr, v_ptr, dbias_ptr, sums_ptr, k_strides, v_strides, b, h,
    scale, sizes, rules, biases, ORDER: tl.constexpr, WHOLE: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one tile of keys adds to dq, and its part of the gradients of biases: ds itself, and its diagonals, of
    which those ahead of the tile's own are carried to the tile that follows."""
    j = start + tl.arange(0, KEYS)
    k = rows_of(k_ptr, start, b, h // sizes.groups, k_strides, sizes.keys, sizes.width, KEYS, WIDTH)
    cj = of_decay(j[None, :], b, h, sizes, biases)
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    s, slope = logits(products, i[:, None], j[None, :], ci, cj, b, h, scale, sizes, rules, biases, ORDER, WHOLE)
    p = tl.exp2(s - lse[:, None])
    v = rows_of(v_ptr, start, b, h // sizes.groups, v_strides, sizes.keys, sizes.value_width, KEYS, VALUE_WIDTH)
    ds = p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) - along[:, None])
    if dbias_ptr is not None:
        row = i[:, None] - (sizes.keys - sizes.queries)
        base = dbias_ptr + (b * sizes.heads + h).to(tl.int64) * sizes.queries * sizes.keys
        inside = (row < sizes.queries) & (j < sizes.keys)[None, :]
        tl.store(base + row.to(tl.int64) * sizes.keys + j[None, :], ds.to(dbias_ptr.dtype.element_ty), mask=inside)
    if sums_ptr is not None:
        own, ahead = _along_diagonals(ds, KEYS)
        store_sums(sums_ptr, own + carry, first - start, sizes.keys, KEYS)
        carry = ahead
    dq = tl.dot((ds * slope).to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, carry


@triton.jit
def store_sums(sums_ptr, sums, distance, keys, SIZE: tl.constexpr):
    """Sums over the pairs at distance, distance + 1, … of a tile of queries into its row `[2 S - 1]`."""
    place = distance + keys - 1 + tl.arange(0, SIZE)
    tl.store(sums_ptr + place, sums, mask=(place >= 0) & (place < 2 * keys - 1))


@triton.jit
def queries_backward(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, dbias_ptr, sums_ptr,
    q_strides, k_strides, v_strides, dout_strides, dq_strides,
    scale, sizes, rules, biases, visits,
    ORDER: tl.constexpr, PLAIN: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, PRECISION: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries, and of the biases: `dbias` `[B,H,T,S]` as ds, and `sums` `[B,H,tiles,2 S - 1]` of ds by
    distance, for which QUERIES is KEYS. Both start at 0, where no tile is visited."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // sizes.heads, tl.program_id(1) % sizes.heads
    own = tile * QUERIES
    row = own + tl.arange(0, QUERIES)
    first = sizes.keys - sizes.queries + tile * QUERIES
    i = sizes.keys - sizes.queries + row
    places = tl.program_id(1).to(tl.int64) * sizes.queries + row
    q = rows_of(q_ptr, own, b, h, q_strides, sizes.queries, sizes.width, QUERIES, WIDTH)
    dout = rows_of(dout_ptr, own, b, h, dout_strides, sizes.queries, sizes.value_width, QUERIES, VALUE_WIDTH)
    lse = tl.load(lse_ptr + places, mask=row < sizes.queries, other=float("inf"))
    along = tl.load(delta_ptr + places, mask=row < sizes.queries, other=0.0)
    ci = of_decay(i[:, None], b, h, sizes, biases)
    dq = tl.zeros((QUERIES, WIDTH), tl.float32)
    carry = tl.zeros((KEYS,), tl.float32)
    mine = sums_ptr
    if sums_ptr is not None:
        tl.static_assert(QUERIES == KEYS)
        mine = sums_ptr + (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile) * (2 * sizes.keys - 1)
    if visits.blocks is not None:
        place = list_of(own, h, sizes.queries, visits, LIST)
        before = -KEYS
        for index in range(0, tl.load(visits.counts + place) * (LIST // KEYS)):
            start = listed_tile(index, place, visits, KEYS, LIST)
            if sums_ptr is not None:
                apart = start != before + KEYS
                if apart:
                    store_sums(mine, carry, first - before - KEYS, sizes.keys, KEYS)
                carry = tl.where(apart, 0.0, carry)
                before = start
            dq, carry = _query_step(
                start, first, q, dout, i, ci, lse, along, carry, dq, k_ptr, v_ptr, dbias_ptr, mine, k_strides,
                v_strides, b, h, scale, sizes, rules, biases, ORDER, False, KEYS, WIDTH, VALUE_WIDTH, PRECISION,
            )  # fmt: skip
        if sums_ptr is not None:
            store_sums(mine, carry, first - before - KEYS, sizes.keys, KEYS)
    else:
        low, high = key_span(first, first + QUERIES, b, h, tile, sizes, rules, visits, ORDER, KEYS)
        edge = low
        if PLAIN:
            edge = (tl.minimum(first + 1, sizes.keys) if ORDER == "causal" else sizes.keys) // KEYS * KEYS
            edge = tl.maximum(edge, low)
            for start in range(low, edge, KEYS):
                dq, carry = _query_step(
                    start, first, q, dout, i, ci, lse, along, carry, dq, k_ptr, v_ptr, dbias_ptr, mine, k_strides,
                    v_strides, b, h, scale, sizes, rules, biases, ORDER, True, KEYS, WIDTH, VALUE_WIDTH, PRECISION,
                )  # fmt: skip
        for start in range(edge, high, KEYS):
            dq, carry = _query_step(
                start, first, q, dout, i, ci, lse, along, carry, dq, k_ptr, v_ptr, dbias_ptr, mine, k_strides,
                v_strides, b, h, scale, sizes, rules, biases, ORDER, False, KEYS, WIDTH, VALUE_WIDTH, PRECISION,
            )  # fmt: skip
        if sums_ptr is not None:
            end = tl.maximum(low + tl.cdiv(high - low, KEYS) * KEYS, low)
            store_sums(mine, carry, first - end, sizes.keys, KEYS)
    dq *= scale * 0.6931471805599453
    store_rows(dq_ptr, dq, own, b, h, dq_strides, sizes.queries, sizes.width, QUERIES, WIDTH)
