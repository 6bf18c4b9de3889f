"""The simulation of benchmarks/noise.py, whose vectorised intervals the tests hold to those of a report."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

_SPEC = importlib.util.spec_from_file_location("noise", Path(__file__).parents[2] / "benchmarks" / "noise.py")
assert _SPEC is not None and _SPEC.loader is not None
noise = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(noise)


def by_hand(losses: np.ndarray, row: int, base: int, baselines: set[int]) -> tuple[float, float]:
    """The variance of one pair and its degrees of freedom in a complete layout, by the formulas of the docs."""
    variants, seeds = losses.shape
    residual = losses - losses.mean(1, keepdims=True) - losses.mean(0) + losses.mean()
    squares, common_df, df = (residual**2).sum(1), (variants - 1) * (seeds - 1), (seeds - 1) * (1 - 1 / variants)
    s0, raw = squares.sum() / common_df, squares / df
    own = np.clip((variants * squares / (seeds - 1) - s0) / (variants - 2), raw / 2, raw * 2)
    d0 = [0.5 if v in baselines else 1.0 for v in (row, base)]
    parts = [(d * s0 + df * own[v]) / (d + df) for d, v in zip(d0, (row, base), strict=True)]
    total = sum(parts)
    inverse = sum((part / total) ** 2 / (d + df) for part, d in zip(parts, d0, strict=True))
    inverse += (sum(d * s0 / (d + df) for d in d0) / total) ** 2 / common_df
    return total, min(1 / inverse, common_df)
