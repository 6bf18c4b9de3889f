"""Sudden jumps of a curve in a trial's journal (the spike score of arXiv:2501.00656, section 3.1)."""

from __future__ import annotations

import numpy as np

FEWEST = 16  # lines before one that a spread is taken from
WINDOW, DEVIATIONS = 100, 7.0


def spikes(values: list[float], window: int = WINDOW, deviations: float = DEVIATIONS) -> int:
    """How many values lie more than so many standard deviations above the mean of the `window` values before them."""
    found, line = 0, np.asarray(values, np.float64)
    for place in range(FEWEST, len(line)):
        before = line[max(0, place - window) : place]
        found += bool(line[place] > before.mean() + deviations * before.std())
    return found
