"""Which domain each row of training comes from: the shares are exact, evenly spread, a pure function of the seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from archlab.search.data.batches import batch
from archlab.search.data.checksums import Stream
from archlab.search.data.documents.draws import Ints
from archlab.search.data.tokenizers.family import Tokens

_TURN = 2**64
_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: i * _STEP mod 2^64 spreads evenly over any stretch of rows


def rows(streams: Sequence[tuple[float, Tokens | Stream]], seed: int, first: int, count: int, context: int) -> Ints:
    """Rows `first` to `first + count` of training, int64 `[count, context + 1]`, from streams with their shares.

    One stream is read as `batch` does. Of several, row i is from the domain in whose part of the circle the point
    (i φ + offset) mod 1 lies, φ being 1 / golden ratio and the offset the seed's: n consecutive rows hold n p_k rows
    of domain k to within a few. Within its domain it is the next window of the endless sequence of epochs. Raises
    ValueError when a stream is shorter than a window.
    """
    if len(streams) == 1:
        return batch(streams[0][1], seed, first, count, context)
    bounds = _bounds([share for share, _ in streams])
    offset = _seed(seed, "offset")
    points = (np.arange(first, first + count, dtype=object) * _STEP + offset) % _TURN
    owner = np.searchsorted(np.array(bounds[1:-1], dtype=object), points, side="right")
    out = np.empty((count, context + 1), dtype=np.int64)
    for domain, (_, tokens) in enumerate(streams):
        mine = np.flatnonzero(owner == domain)
        if len(mine):
            before = drawn(bounds[domain], bounds[domain + 1], offset, first)
            out[mine] = batch(tokens, _seed(seed, f"domain {domain}"), before, len(mine), context)
    return out


def drawn(low: int, high: int, offset: int, count: int) -> int:
    """How many of the first `count` rows have their point in [low, high) of the circle of 2^64."""
    # A point x is below `high` exactly if floor(x / m) is more than floor((x - high) / m), by one.
    total = _floors(count, offset) - _floors(count, offset - high)
    return total - (_floors(count, offset) - _floors(count, offset - low))


def _floors(count: int, offset: int) -> int:
    """The sum of floor((i * _STEP + offset) / 2^64) over i from 0 to count - 1, in time that grows with log(count)."""
    shift, offset = divmod(offset, _TURN)
    total, slope, turn = shift * count, _STEP, _TURN
    while count > 0:  # Euclid's algorithm on (turn, slope): floors below a line are counted from its other side
        total += (slope // turn) * (count * (count - 1) // 2) + (offset // turn) * count
        slope, offset = slope % turn, offset % turn
        height = slope * count + offset
        if height < turn:
            break
        count, offset = divmod(height, turn)
        slope, turn = turn, slope
    return total


def _bounds(shares: Sequence[float]) -> list[int]:
    """Where the parts of the circle begin and end."""
    ends = [round(total * _TURN) for total in accumulate(shares)]
    return [0, *(min(end, _TURN) for end in ends[:-1]), _TURN]


def _seed(seed: int, name: str) -> int:
    """A seed of 64 bits of its own for each use."""
    return int.from_bytes(hashlib.sha256(f"archlab:mixture:{name}:{seed}".encode()).digest()[:8], "big")
