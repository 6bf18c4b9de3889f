"""The forward pass of attention: a program takes a tile of queries of one head over the keys that it may see."""

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
    rows_of,
    store_rows,
)


@triton.jit
def _step(
    start, q, i, ci, m, total, out, k, v, b, h, task, ORDER: tl.constexpr, WHOLE: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running maximum m, total and output (arXiv:1805.02867, algorithm 3)."""
    sizes = task.sizes
    j = start + tl.arange(0, KEYS)
    keys = rows_of(k, start, b, h // sizes.groups, sizes.keys, sizes.width, KEYS, WIDTH)
    cj = of_decay(j[None, :], b, h, sizes, task.biases)
    products = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    s, _ = logits(products, i[:, None], j[None, :], ci, cj, b, h, task, ORDER, WHOLE)
    higher = tl.maximum(m, tl.max(s, 1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(s - finite[:, None])
    shrink = tl.exp2(m - finite)
    values = rows_of(v, start, b, h // sizes.groups, sizes.keys, sizes.value_width, KEYS, VALUE_WIDTH)
    out = tl.dot(p.to(values.dtype), values, out * shrink[:, None], input_precision=PRECISION)
    return higher, total * shrink + tl.sum(p, 1), out


@triton.jit
def forward(
    q, k, v, sinks_ptr, gate, out, lse_ptr, task,
    ORDER: tl.constexpr, PLAIN: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, PRECISION: tl.constexpr, LIST: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """out `[B,H,T,Dv]`, multiplied by its gate if there is one, and the logarithms in base 2 of each query's total
    `[B,H,T]`. PLAIN: no rules but the order, so that only tiles at its edge are masked. The longest rows of a causal
    pattern start first."""
    sizes, visits = task.sizes, task.visits
    tile, b, h = place(sizes.queries, sizes.heads, QUERIES)
    tile = tl.cdiv(sizes.queries, QUERIES) - 1 - tile
    own = tile * QUERIES
    row = own + tl.arange(0, QUERIES)
    first = sizes.keys - sizes.queries + own
    i = sizes.keys - sizes.queries + row
    queries = rows_of(q, own, b, h, sizes.queries, sizes.width, QUERIES, WIDTH)
    ci = of_decay(i[:, None], b, h, sizes, task.biases)
    m = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, VALUE_WIDTH), tl.float32)
    if visits.blocks is not None:
        list_ = list_of(own, h, sizes.queries, visits, LIST)
        for index in range(0, tl.load(visits.counts + list_) * (LIST // KEYS)):
            start = listed_tile(index, list_, visits, KEYS, LIST)
            m, total, sums = _step(
                start, queries, i, ci, m, total, sums, k, v, b, h, task, ORDER, False, KEYS, WIDTH, VALUE_WIDTH,
                PRECISION,
            )  # fmt: skip
    else:
        low, high = key_span(first, first + QUERIES, b, h, tile, task, ORDER, KEYS)
        edge = low
        if PLAIN:
            edge = (tl.minimum(first + 1, sizes.keys) if ORDER == "causal" else sizes.keys) // KEYS * KEYS
            edge = tl.maximum(edge, low)
            for start in range(low, edge, KEYS):
                m, total, sums = _step(
                    start, queries, i, ci, m, total, sums, k, v, b, h, task, ORDER, True, KEYS, WIDTH, VALUE_WIDTH,
                    PRECISION,
                )  # fmt: skip
        for start in range(edge, high, KEYS):
            m, total, sums = _step(
                start, queries, i, ci, m, total, sums, k, v, b, h, task, ORDER, False, KEYS, WIDTH, VALUE_WIDTH,
                PRECISION,
            )  # fmt: skip
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h)
        higher = tl.maximum(m, sink)
        shrink = tl.exp2(m - higher)
        total = total * shrink + tl.exp2(sink - higher)
        sums = sums * shrink[:, None]
        m = higher
    sums /= total[:, None]
    if gate is not None:
        sums *= opened(gate, own, b, h, sizes, QUERIES, GATE)
    store_rows(out, sums, own, b, h, sizes.queries, sizes.value_width, QUERIES, VALUE_WIDTH)
    places = (b * sizes.heads + h).to(tl.int64) * sizes.queries + row
    tl.store(lse_ptr + places, m + tl.log2(total), mask=row < sizes.queries)
