"""The backward pass of attention: what each query's output keeps of its gradient, then keys and values, then queries.

ds = p (dout v^T - delta) is the gradient of the biased logits, with delta = out . dout of each query. It is computed
twice, so that every sum has one owner and no two programs add into one place.
"""

import triton
import triton.language as tl

from archlab.kernels.attention.tiles import (
    key_span,
    list_of,
    listed_tile,
    logits,
    of_decay,
    opened,
    place,
    query_span,
    rows_of,
    store_rows,
)


@triton.jit
def delta(
    out, dout, delta_ptr, gate, passed, dgate, sizes, ROWS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """out . dout of each query `[B,H,T]`. Of an output y = sigmoid(g) out it is y . dy, what is `passed` on to out is
    sigmoid(g) dy, and the gradient of g is y dy (1 - sigmoid(g)): nobody needs out itself."""
    tile, b, h = place(sizes.queries, sizes.heads, ROWS)
    start = tile * ROWS
    row = start + tl.arange(0, ROWS)
    given = rows_of(out, start, b, h, sizes.queries, sizes.value_width, ROWS, VALUE_WIDTH).to(tl.float32)
    grads = rows_of(dout, start, b, h, sizes.queries, sizes.value_width, ROWS, VALUE_WIDTH).to(tl.float32)
    each = given * grads
    along = tl.sum(each, 1)
    places = (b * sizes.heads + h).to(tl.int64) * sizes.queries + row
    tl.store(delta_ptr + places, along, mask=row < sizes.queries)
    if gate is not None:
        share = opened(gate, start, b, h, sizes, ROWS, GATE)
        store_rows(passed, grads * share, start, b, h, sizes.queries, sizes.value_width, ROWS, VALUE_WIDTH)
        if GATE == 1:
            store_rows(dgate, along[:, None] * (1 - share), start, b, h, sizes.queries, None, ROWS, 1)
        else:
            store_rows(dgate, each * (1 - share), start, b, h, sizes.queries, sizes.value_width, ROWS, GATE)


@triton.jit
def _key_step(
    start, own, dk, dv, dc, q, dout, lse_ptr, delta_ptr, b, h, task, ORDER: tl.constexpr, QUERIES: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to the gradients of a tile of keys, which stand in rows. A query beyond the last
    has an infinite total, and so no weights."""
    keys, values, j, cj = own
    sizes, biases = task.sizes, task.biases
    row = start + tl.arange(0, QUERIES)
    i = (sizes.keys - sizes.queries + row)[None, :]
    places = (b * sizes.heads + h).to(tl.int64) * sizes.queries + row
    queries = rows_of(q, start, b, h, sizes.queries, sizes.width, QUERIES, WIDTH)
    lse = tl.load(lse_ptr + places, mask=row < sizes.queries, other=float("inf"))
    ci = of_decay(i, b, h, sizes, biases)
    products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    s, slope = logits(products, i, j[:, None], ci, cj, b, h, task, ORDER, False)
    p = tl.exp2(s - lse[None, :])
    grads = rows_of(dout, start, b, h, sizes.queries, sizes.value_width, QUERIES, VALUE_WIDTH)
    dv = tl.dot(p.to(grads.dtype), grads, dv, input_precision=PRECISION)
    dp = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
    along = tl.load(delta_ptr + places, mask=row < sizes.queries, other=0.0)
    ds = p * (dp - along[None, :])
    if biases.decay is not None:
        dc -= tl.sum(ds, 1)
    dk = tl.dot((ds * slope).to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv, dc


@triton.jit
def keys_backward(
    q, k, v, dout, lse_ptr, delta_ptr, dk_out, dv_out, ddecay_ptr, task,
    ORDER: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, from all query heads that share it, and of each head its part of the decay's
    gradient `[B,H,S]`: minus the sums of ds over the queries, as its sums over the keys are 0. One loop masks all
    tiles: a second one for whole tiles takes more registers than there are."""
    sizes, visits = task.sizes, task.visits
    tile, b, shared = place(sizes.keys, sizes.heads // sizes.groups, KEYS)
    start_key = tile * KEYS
    j = start_key + tl.arange(0, KEYS)
    keys = rows_of(k, start_key, b, shared, sizes.keys, sizes.width, KEYS, WIDTH)
    values = rows_of(v, start_key, b, shared, sizes.keys, sizes.value_width, KEYS, VALUE_WIDTH)
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, VALUE_WIDTH), tl.float32)
    for member in range(0, sizes.groups):
        h = shared * sizes.groups + member
        own = keys, values, j, of_decay(j[:, None], b, h, sizes, task.biases)
        dc = tl.zeros((KEYS,), tl.float32)
        if visits.blocks is not None:
            list_ = list_of(start_key, h, sizes.keys, visits, LIST)
            for index in range(0, tl.load(visits.counts + list_) * (LIST // QUERIES)):
                start = listed_tile(index, list_, visits, QUERIES, LIST)
                dk, dv, dc = _key_step(
                    start, own, dk, dv, dc, q, dout, lse_ptr, delta_ptr, b, h, task, ORDER, QUERIES, WIDTH,
                    VALUE_WIDTH, PRECISION,
                )  # fmt: skip
        else:
            low, high = query_span(start_key, start_key + KEYS, b, h, tile, task, ORDER, QUERIES)
            for start in range(low, high, QUERIES):
                dk, dv, dc = _key_step(
                    start, own, dk, dv, dc, q, dout, lse_ptr, delta_ptr, b, h, task, ORDER, QUERIES, WIDTH,
                    VALUE_WIDTH, PRECISION,
                )  # fmt: skip
        if ddecay_ptr is not None:
            tl.store(ddecay_ptr + (b * sizes.heads + h).to(tl.int64) * sizes.keys + j, dc, mask=j < sizes.keys)
    dk *= task.biases.scale * 0.6931471805599453
    store_rows(dk_out, dk, start_key, b, shared, sizes.keys, sizes.width, KEYS, WIDTH)
    store_rows(dv_out, dv, start_key, b, shared, sizes.keys, sizes.value_width, KEYS, VALUE_WIDTH)


@triton.jit
def _along_diagonals(ds, SIZE: tl.constexpr):
    """Sums of ds `[SIZE, SIZE]` over i - j = r for r = 0, …, SIZE - 1, and over i - j = r - SIZE."""
    i, r = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    turned = tl.gather(ds, (i - r) & (SIZE - 1), 1)
    return tl.sum(tl.where(i >= r, turned, 0.0), 0), tl.sum(tl.where(i < r, turned, 0.0), 0)


@triton.jit
def _query_step(
    start, first, own, carry, dq, k, v, dbias_ptr, sums_ptr, b, h, task, ORDER: tl.constexpr, WHOLE: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one tile of keys adds to dq, and its part of the gradients of biases: ds itself, and its diagonals, of
    which those ahead of the tile's own are carried to the tile that follows."""
    queries, grads, i, ci, lse, along = own
    sizes = task.sizes
    j = start + tl.arange(0, KEYS)
    keys = rows_of(k, start, b, h // sizes.groups, sizes.keys, sizes.width, KEYS, WIDTH)
    cj = of_decay(j[None, :], b, h, sizes, task.biases)
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    s, slope = logits(products, i[:, None], j[None, :], ci, cj, b, h, task, ORDER, WHOLE)
    p = tl.exp2(s - lse[:, None])
    values = rows_of(v, start, b, h // sizes.groups, sizes.keys, sizes.value_width, KEYS, VALUE_WIDTH)
    ds = p * (tl.dot(grads, tl.trans(values), input_precision=PRECISION) - along[:, None])
    if dbias_ptr is not None:
        row = i[:, None] - (sizes.keys - sizes.queries)
        base = dbias_ptr + (b * sizes.heads + h).to(tl.int64) * sizes.queries * sizes.keys
        inside = (row < sizes.queries) & (j < sizes.keys)[None, :]
        tl.store(base + row.to(tl.int64) * sizes.keys + j[None, :], ds.to(dbias_ptr.dtype.element_ty), mask=inside)
    if sums_ptr is not None:
        mine, ahead = _along_diagonals(ds, KEYS)
        store_sums(sums_ptr, mine + carry, first - start, sizes.keys, KEYS)
        carry = ahead
    dq = tl.dot((ds * slope).to(keys.dtype), keys, dq, input_precision=PRECISION)
    return dq, carry


@triton.jit
def store_sums(sums_ptr, sums, distance, keys, SIZE: tl.constexpr):
    """Sums over the pairs at distance, distance + 1, … of a tile of queries into its row `[2 S - 1]`."""
    at = distance + keys - 1 + tl.arange(0, SIZE)
    tl.store(sums_ptr + at, sums, mask=(at >= 0) & (at < 2 * keys - 1))


@triton.jit
def _over_lists(
    tile, first, own, carry, dq, k, v, dbias_ptr, sums_ptr, b, h, task, ORDER: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PRECISION: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """dq over the blocks that the pattern lists. Diagonals are carried between neighbours alone."""
    keys, visits = task.sizes.keys, task.visits
    list_ = list_of(tile * QUERIES, h, task.sizes.queries, visits, LIST)
    before = -KEYS
    for index in range(0, tl.load(visits.counts + list_) * (LIST // KEYS)):
        start = listed_tile(index, list_, visits, KEYS, LIST)
        if sums_ptr is not None:
            apart = start != before + KEYS
            if apart:
                store_sums(sums_ptr, carry, first - before - KEYS, keys, KEYS)
            carry = tl.where(apart, 0.0, carry)
            before = start
        dq, carry = _query_step(
            start, first, own, carry, dq, k, v, dbias_ptr, sums_ptr, b, h, task, ORDER, False, KEYS, WIDTH,
            VALUE_WIDTH, PRECISION,
        )  # fmt: skip
    if sums_ptr is not None:
        store_sums(sums_ptr, carry, first - before - KEYS, keys, KEYS)
    return dq


@triton.jit
def _over_span(
    tile, first, own, carry, dq, k, v, dbias_ptr, sums_ptr, b, h, task, ORDER: tl.constexpr, PLAIN: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq over the keys that may be seen, of which PLAIN masks those at the edge alone."""
    keys = task.sizes.keys
    low, high = key_span(first, first + QUERIES, b, h, tile, task, ORDER, KEYS)
    edge = low
    if PLAIN:
        edge = (tl.minimum(first + 1, keys) if ORDER == "causal" else keys) // KEYS * KEYS
        edge = tl.maximum(edge, low)
        for start in range(low, edge, KEYS):
            dq, carry = _query_step(
                start, first, own, carry, dq, k, v, dbias_ptr, sums_ptr, b, h, task, ORDER, True, KEYS, WIDTH,
                VALUE_WIDTH, PRECISION,
            )  # fmt: skip
    for start in range(edge, high, KEYS):
        dq, carry = _query_step(
            start, first, own, carry, dq, k, v, dbias_ptr, sums_ptr, b, h, task, ORDER, False, KEYS, WIDTH,
            VALUE_WIDTH, PRECISION,
        )  # fmt: skip
    if sums_ptr is not None:
        end = tl.maximum(low + tl.cdiv(high - low, KEYS) * KEYS, low)
        store_sums(sums_ptr, carry, first - end, keys, KEYS)
    return dq


@triton.jit
def queries_backward(
    q, k, v, dout, lse_ptr, delta_ptr, dq_out, dbias_ptr, sums_ptr, task,
    ORDER: tl.constexpr, PLAIN: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, PRECISION: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries, and of the biases: `dbias` `[B,H,T,S]` as ds, and `sums` `[B,H,tiles,2 S - 1]` of ds by
    distance, for which QUERIES is KEYS. Both start at 0, where no tile is visited."""
    sizes = task.sizes
    tile, b, h = place(sizes.queries, sizes.heads, QUERIES)
    tile = tl.cdiv(sizes.queries, QUERIES) - 1 - tile
    row = tile * QUERIES + tl.arange(0, QUERIES)
    first = sizes.keys - sizes.queries + tile * QUERIES
    i = sizes.keys - sizes.queries + row
    head = (b * sizes.heads + h).to(tl.int64)
    queries = rows_of(q, tile * QUERIES, b, h, sizes.queries, sizes.width, QUERIES, WIDTH)
    grads = rows_of(dout, tile * QUERIES, b, h, sizes.queries, sizes.value_width, QUERIES, VALUE_WIDTH)
    lse = tl.load(lse_ptr + head * sizes.queries + row, mask=row < sizes.queries, other=float("inf"))
    along = tl.load(delta_ptr + head * sizes.queries + row, mask=row < sizes.queries, other=0.0)
    own = queries, grads, i, of_decay(i[:, None], b, h, sizes, task.biases), lse, along
    dq = tl.zeros((QUERIES, WIDTH), tl.float32)
    carry = tl.zeros((KEYS,), tl.float32)
    mine = sums_ptr
    if sums_ptr is not None:
        tl.static_assert(QUERIES == KEYS)
        mine = sums_ptr + (head * tl.cdiv(sizes.queries, QUERIES) + tile) * (2 * sizes.keys - 1)
    if task.visits.blocks is not None:
        dq = _over_lists(
            tile, first, own, carry, dq, k, v, dbias_ptr, mine, b, h, task, ORDER, QUERIES, KEYS, WIDTH, VALUE_WIDTH,
            PRECISION, LIST,
        )  # fmt: skip
    else:
        dq = _over_span(
            tile, first, own, carry, dq, k, v, dbias_ptr, mine, b, h, task, ORDER, PLAIN, QUERIES, KEYS, WIDTH,
            VALUE_WIDTH, PRECISION,
        )  # fmt: skip
    dq *= task.biases.scale * 0.6931471805599453
    store_rows(dq_out, dq, tile * QUERIES, b, h, sizes.queries, sizes.width, QUERIES, WIDTH)
