"""What the attention kernels share: what they are told of a call, and the logits and visible pairs of a tile.

Positions i of queries and j of keys come as columns and rows, or as rows and columns: a tile may stand either way.
Logits are in base 2: scale, cap, relative bias and decay arrive multiplied by log2(e).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from archlab.kernels import interpret
from archlab.kernels.activations.triton import tanh

interpret.apply()


class Rows(NamedTuple):
    """A tensor `[B, H, rows, width]` whose rows have their elements side by side, by its first element."""

    pointer: Any
    strides: tuple[int, int, int]


class Sizes(NamedTuple):
    """Query heads, query heads per key head, queries, keys, width of queries and keys, width of values; widths are None
    where they are powers of two that fill a tile."""

    heads: int
    groups: int
    queries: int
    keys: int
    width: int | None
    value_width: int | None


class Rules(NamedTuple):
    """Which pairs exist, beside the order: `Pattern`'s numbers, and what a call hides; None where there is none.

    `table` `[P, count, count]` says which blocks of `block` positions read which, `table_stride` is 0 if heads share
    it. `padding` are bytes.
    """

    window: int | None
    stride: int | None
    columns: int | None
    prefix: Any
    documents: Any
    padding: Any
    table: Any
    table_stride: int | None
    block: int | None
    blocks: int | None


class Biases(NamedTuple):
    """What changes logits; None where there is none. A stride of 0 stands for a dimension that is shared. Where there
    is a `reach` a query reads no key whose decay is above it."""

    scale: float
    softcap: float | None
    bias: Any
    bias_strides: tuple[int, int, int, int] | None
    relative: Any
    relative_stride: int | None
    decay: Any
    decay_stride: int | None
    reach: Any
    reach_stride: int | None


class Visits(NamedTuple):
    """Which tiles a program visits: `bounds` `[B, H, tiles, 2]`, the first position and the one after the last, and
    `blocks` `[P, lists, most]` of which the first `counts` `[P, lists]` are numbers of blocks of LIST positions, for
    which there is one list each; None where all are."""

    bounds: Any
    bounds_strides: tuple[int, int] | None
    blocks: Any
    counts: Any
    most: int | None
    per_head: int | None


class Task(NamedTuple):
    """All that the kernels are told of a call beside its tensors and constants."""

    sizes: Sizes
    rules: Rules
    biases: Biases
    visits: Visits


@triton.jit
def place(positions, heads, SIZE: tl.constexpr):
    """The tile of SIZE positions, the sequence and the head of a program: a head's tiles, then those of the next one.
    All stand on one axis, as the others end at 65,535 programs."""
    tiles = tl.cdiv(positions, SIZE)
    head = tl.program_id(0) // tiles
    return tl.program_id(0) % tiles, head // heads, head % heads


@triton.jit
def visible(i, j, b, h, keys, rules, ORDER: tl.constexpr):
    """Which pairs exist, of i and j that broadcast to a tile."""
    far = i - j
    seen = j < keys
    if ORDER == "causal":
        seen = seen & (far >= 0)
    if rules.columns is not None:
        seen = seen & ((i // rules.stride == j // rules.stride) | (j % rules.stride >= rules.stride - rules.columns))
    elif rules.window is not None:
        near = (far < rules.window) & (far > -rules.window)
        if rules.stride is not None:
            near = near | (far % rules.stride == 0)
        seen = seen & near
    if rules.table is not None:
        row, column = i // rules.block, j // rules.block
        inside = (i >= 0) & (i < keys) & (j < keys)
        place = h * rules.table_stride + row * rules.blocks + column
        seen = seen & (tl.load(rules.table + place, mask=inside, other=0) != 0)
    if rules.prefix is not None:
        end = tl.minimum(tl.load(rules.prefix + b), keys)
        seen = seen | ((i < end) & (j < end))
    if rules.documents is not None:
        base = rules.documents + b.to(tl.int64) * keys
        mine = tl.load(base + i, mask=(i >= 0) & (i < keys), other=0)
        seen = seen & (mine == tl.load(base + j, mask=j < keys, other=0))
    if rules.padding is not None:
        heard = tl.load(rules.padding + b.to(tl.int64) * keys + j, mask=j < keys, other=1) == 0
        if ORDER != "cross":
            heard = heard | (far == 0)
        seen = seen & heard
    return seen


@triton.jit
def of_decay(position, b, h, sizes, biases):
    """The running sums of a forget gate at positions, or 0."""
    if biases.decay is not None:
        base = biases.decay + b.to(tl.int64) * biases.decay_stride + h.to(tl.int64) * sizes.keys
        return tl.load(base + position, mask=(position >= 0) & (position < sizes.keys), other=0.0)
    else:
        return 0.0


@triton.jit
def logits(products, i, j, ci, cj, b, h, task, ORDER: tl.constexpr, WHOLE: tl.constexpr):
    """Logits in base 2, -inf where a pair does not exist, and the derivative of the cap. In a WHOLE tile all exist."""
    sizes, biases = task.sizes, task.biases
    s = products * biases.scale
    slope = 1.0
    if biases.softcap is not None:
        capped = tanh(s / biases.softcap)
        s = biases.softcap * capped
        slope = 1.0 - capped * capped
    if biases.bias is not None:
        row = i - (sizes.keys - sizes.queries)
        strides = biases.bias_strides
        base = biases.bias + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        place = row.to(tl.int64) * strides[2] + j * strides[3]
        inside = (row >= 0) & (row < sizes.queries) & (j < sizes.keys)
        s += tl.load(base + place, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
    if biases.relative is not None:
        place = i - j + sizes.keys - 1
        inside = (place >= 0) & (place < 2 * sizes.keys - 1)
        s += tl.load(biases.relative + h * biases.relative_stride + place, mask=inside, other=0.0)
    if biases.decay is not None:
        s += ci - cj
    if not WHOLE:
        s = tl.where(visible(i, j, b, h, sizes.keys, task.rules, ORDER), s, float("-inf"))
    if biases.reach is not None:
        row = i - (sizes.keys - sizes.queries)
        base = biases.reach + b.to(tl.int64) * biases.reach_stride + h.to(tl.int64) * sizes.queries
        reach = tl.load(base + row, mask=(row >= 0) & (row < sizes.queries), other=0.0)
        s = tl.where(cj > reach, float("-inf"), s)
    return s, slope


@triton.jit
def list_of(start, h, positions, visits, LIST: tl.constexpr):
    """The number of the list for a tile that starts at a position."""
    return h * visits.per_head * tl.cdiv(positions, LIST) + start // LIST


@triton.jit
def listed_tile(index, place, visits, SIZE: tl.constexpr, LIST: tl.constexpr):
    """Where the tile of SIZE positions starts that comes at an index in the blocks of a list."""
    block = tl.load(visits.blocks + place * visits.most + index // (LIST // SIZE))
    return block * LIST + index % (LIST // SIZE) * SIZE


@triton.jit
def key_span(first, last, b, h, tile, task, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """From where to where queries first, …, last - 1 may see keys, the start at a multiple of BLOCK."""
    sizes, rules, visits = task.sizes, task.rules, task.visits
    low, high = 0, sizes.keys
    if ORDER == "causal":
        high = tl.minimum(last, sizes.keys)
    if rules.window is not None and rules.stride is None:
        low = tl.maximum(first - rules.window + 1, 0)
        if ORDER != "causal":
            high = tl.minimum(last + rules.window - 1, sizes.keys)
    if rules.prefix is not None:
        end = tl.minimum(tl.load(rules.prefix + b), sizes.keys)
        low = tl.where(first < end, 0, low)
        high = tl.where(first < end, tl.maximum(high, end), high).to(tl.int32)
    if visits.bounds is not None:
        place = visits.bounds + b * visits.bounds_strides[0] + h * visits.bounds_strides[1] + 2 * tile
        low = tl.maximum(low, tl.load(place))
        high = tl.minimum(high, tl.load(place + 1))
    return low // BLOCK * BLOCK, high


@triton.jit
def query_span(first, last, b, h, tile, task, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """From which row to which queries may see keys first, …, last - 1, the start at a multiple of BLOCK."""
    sizes, rules, visits = task.sizes, task.rules, task.visits
    ahead = sizes.keys - sizes.queries
    low, high = ahead, sizes.keys
    if ORDER == "causal":
        low = tl.maximum(first, ahead)
    if rules.window is not None and rules.stride is None:
        high = tl.minimum(last + rules.window - 1, sizes.keys)
        if ORDER != "causal":
            low = tl.maximum(first - rules.window + 1, ahead)
    if rules.prefix is not None:
        end = tl.minimum(tl.load(rules.prefix + b), sizes.keys)
        low = tl.where(first < end, ahead, low)
        high = tl.where(first < end, tl.maximum(high, end), high).to(tl.int32)
    if visits.bounds is not None:
        place = visits.bounds + b * visits.bounds_strides[0] + h * visits.bounds_strides[1] + 2 * tile
        low = tl.maximum(low, tl.load(place))
        high = tl.minimum(high, tl.load(place + 1))
    return (low - ahead) // BLOCK * BLOCK, high - ahead


@triton.jit
def rows_of(x, start, b, h, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows start, start + 1, … `[ROWS, WIDTH]` of one head of the Rows x, with 0 outside."""
    places, inside = _places(x, start, b, h, rows, width, ROWS, WIDTH)
    return tl.load(places, mask=inside, other=0.0)


@triton.jit
def store_rows(x, values, start, b, h, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The same rows, written in x's dtype."""
    places, inside = _places(x, start, b, h, rows, width, ROWS, WIDTH)
    tl.store(places, values.to(x.pointer.dtype.element_ty), mask=inside)


@triton.jit
def opened(gate, start, b, h, sizes, ROWS: tl.constexpr, GATE: tl.constexpr):
    """The sigmoid of rows of a gate `[ROWS, GATE]`, which is as wide as values or has one value per head."""
    if GATE == 1:
        x = rows_of(gate, start, b, h, sizes.queries, None, ROWS, 1)
    else:
        x = rows_of(gate, start, b, h, sizes.queries, sizes.value_width, ROWS, GATE)
    return tl.sigmoid(x.to(tl.float32))


@triton.jit
def _places(x, start, b, h, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Where the elements of a tile stand, and which exist; width is None if it is WIDTH."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = start + row < rows
    if width is not None:
        inside = inside & (column < width)
    head = b.to(tl.int64) * x.strides[0] + h.to(tl.int64) * x.strides[1]
    return x.pointer + head + tl.cast(start, tl.int64) * x.strides[2] + (row * x.strides[2] + column), inside
