"""The forward pass of attention: a program takes a tile of queries of one head over the keys that it may see."""

import triton
import triton.language as tl

from kernels.attention.tiles import key_span, list_of, listed_tile, logits, of_decay, rows_of, store_rows


@triton.jit
def _step(
    start, q, i, ci, m, total, out, k_ptr, v_ptr, k_strides, v_strides, b, h, scale, sizes, rules, biases,
    ORDER: tl.constexpr, WHOLE: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running maximum m, total and output (arXiv:1805.02867, algorithm 3)."""
    j = start + tl.arange(0, KEYS)
    k = rows_of(k_ptr, start, b, h // sizes.groups, k_strides, sizes.keys, sizes.width, KEYS, WIDTH)
    cj = of_decay(j[None, :], b, h, sizes, biases)
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    s, _ = logits(products, i[:, None], j[None, :], ci, cj, b, h, scale, sizes, rules, biases, ORDER, WHOLE)
    higher = tl.maximum(m, tl.max(s, 1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(s - finite[:, None])
    shrink = tl.exp2(m - finite)
    v = rows_of(v_ptr, start, b, h // sizes.groups, v_strides, sizes.keys, sizes.value_width, KEYS, VALUE_WIDTH)
    out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    return higher, total * shrink + tl.sum(p, 1), out


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, lse_ptr, q_strides, k_strides, v_strides, out_strides,
    scale, sizes, rules, biases, visits,
    ORDER: tl.constexpr, PLAIN: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, PRECISION: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """out `[B,H,T,Dv]` and the logarithms in base 2 of each query's total `[B,H,T]`. PLAIN: no rules but the order, so
    that only tiles at its edge are masked. The longest rows of a causal pattern start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // sizes.heads, tl.program_id(1) % sizes.heads
    row = tile * QUERIES + tl.arange(0, QUERIES)
    first = sizes.keys - sizes.queries + tile * QUERIES
    i = sizes.keys - sizes.queries + row
    q = rows_of(q_ptr, tile * QUERIES, b, h, q_strides, sizes.queries, sizes.width, QUERIES, WIDTH)
    ci = of_decay(i[:, None], b, h, sizes, biases)
    m = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, VALUE_WIDTH), tl.float32)
    if visits.blocks is not None:
        place = list_of(tile * QUERIES, h, sizes.queries, visits, LIST)
        for index in range(0, tl.load(visits.counts + place) * (LIST // KEYS)):
            start = listed_tile(index, place, visits, KEYS, LIST)
            m, total, out = _step(
                start, q, i, ci, m, total, out, k_ptr, v_ptr, k_strides, v_strides, b, h, scale, sizes, rules, biases,
                ORDER, False, KEYS, WIDTH, VALUE_WIDTH, PRECISION,
            )  # fmt: skip
    else:
        low, high = key_span(first, first + QUERIES, b, h, tile, sizes, rules, visits, ORDER, KEYS)
        edge = low
        if PLAIN:
            edge = (tl.minimum(first + 1, sizes.keys) if ORDER == "causal" else sizes.keys) // KEYS * KEYS
            edge = tl.maximum(edge, low)
            for start in range(low, edge, KEYS):
                m, total, out = _step(
                    start, q, i, ci, m, total, out, k_ptr, v_ptr, k_strides, v_strides, b, h, scale, sizes, rules,
                    biases, ORDER, True, KEYS, WIDTH, VALUE_WIDTH, PRECISION,
                )  # fmt: skip
        for start in range(edge, high, KEYS):
            m, total, out = _step(
                start, q, i, ci, m, total, out, k_ptr, v_ptr, k_strides, v_strides, b, h, scale, sizes, rules, biases,
                ORDER, False, KEYS, WIDTH, VALUE_WIDTH, PRECISION,
            )  # fmt: skip
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h)
        higher = tl.maximum(m, sink)
        shrink = tl.exp2(m - higher)
        total = total * shrink + tl.exp2(sink - higher)
        out = out * shrink[:, None]
        m = higher
    out /= total[:, None]
    start = tile * QUERIES
    store_rows(out_ptr, out, start, b, h, out_strides, sizes.queries, sizes.value_width, QUERIES, VALUE_WIDTH)
    places = tl.program_id(1).to(tl.int64) * sizes.queries + row
    tl.store(lse_ptr + places, m + tl.log2(total), mask=row < sizes.queries)
