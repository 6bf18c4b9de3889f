"""The random numbers of one row, which no batch size and no variant changes, and the noise that is drawn by them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_WORD = 2**64 - 1
_FAR = [0, 0, 0, 1]  # the counter of Philox: other numbers than those that order the windows


class Draw:
    """The endless random numbers of row `row` under a seed. Only the raw Philox stream is used: NumPy promises it for
    ever."""

    def __init__(self, seed: int, row: int) -> None:
        self._words = np.random.Philox(key=[seed & _WORD, row & _WORD], counter=_FAR)

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """Numbers from 0, below 1."""
        words: Any = self._words.random_raw(count)
        return (words >> np.uint64(11)) * 2.0**-53  # type: ignore[no-any-return]

    def below(self, limit: int) -> int:
        """An integer from 0 to `limit - 1`."""
        return int(self.uniforms(1)[0] * limit)

    def chosen(self, places: int, count: int) -> Bools:
        """`count` of so many places, all choices equally likely: bool `[places]`."""
        found = np.zeros(places, dtype=bool)
        found[np.argsort(self._words.random_raw(places), kind="stable")[:count]] = True
        return found

    def order(self, count: int) -> Ints:
        """The numbers below `count` in an order, all orders equally likely."""
        return np.argsort(self._words.random_raw(count), kind="stable").astype(np.int64)

    def some(self, limit: int, count: int) -> Ints:
        """`count` different numbers below `limit`, in random order."""
        return self.order(limit)[:count]

    def integers(self, limit: int, count: int) -> Ints:
        """`count` integers from 0 to `limit - 1`, each by itself."""
        return (self.uniforms(count) * limit).astype(np.int64)

    def parts(self, total: int, count: int) -> Ints:
        """Lengths of `count` parts, none empty, that make up `total`, all divisions equally likely: `[count]`."""
        cuts = 1 + np.flatnonzero(self.chosen(total - 1, count - 1))
        return np.diff(np.concatenate([[0], cuts, [total]]))


class Spans(NamedTuple):
    """How many tokens of a text are noise, in how many spans."""

    noise: int
    spans: int


def span_counts(length: int, density: float, span: float) -> Spans:
    """round(length density) noise tokens in round(noise / span) spans, one at least and as many as fit at most.

    These are those of T5's `random_spans_noise_mask` (arXiv:1910.10683, section 3.1.4): the numbers are no matter of
    chance, so that all rows have one length. `length` is at least 2.
    """
    noise = min(max(round(length * density), 1), length - 1)
    return Spans(noise, min(max(round(noise / span), 1), noise, length - noise))


def span_mask(draw: Draw, length: int, counts: Spans) -> Bools:
    """Which tokens are noise, `[length]`: spans of text and of noise take turns, text first, noise last."""
    noise = draw.parts(counts.noise, counts.spans)
    text = draw.parts(length - counts.noise, counts.spans)
    lengths = np.stack([text, noise], axis=1).ravel()
    return np.repeat(np.tile([False, True], counts.spans), lengths)
