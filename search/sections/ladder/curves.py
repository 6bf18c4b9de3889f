"""The lines of a ladder's figures: its power laws with their bands, and the parabolas of its IsoFLOP minima."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.sections.ladder.frames import ISOFLOP, OVER_C, OVER_N
from archlab.search.statistics import power_laws as scaling
from archlab.search.statistics.power_laws import Estimate, Floats, Unidentified

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd

LINES = ["series", "law", "at", "x", "loss", "low", "high"]
_POINTS = 41


def scaling_lines(rungs: pd.DataFrame, ladder: dict[str, Any]) -> pd.DataFrame:
    """A row per point of a line of what scaling_frames.scaling_frames fits to the test loss.

    `law` is the power law over compute or over parameters, `x` its compute (FLOPs) or N, over the range of the rungs
    that it was fitted to, `low` and `high` its 95% t band, NaN where nothing is left over to make one from; or the
    parabola at the compute `at`, which has no band. `ladder` is that of a study's record.
    """
    import pandas as pd

    size = size_of(ladder)
    rows: list[tuple[Any, ...]] = []
    for name, own in rungs[np.isfinite(rungs["loss"])].groupby("series", sort=False) if len(rungs) else ():
        parameters, compute, loss = (np.asarray(own[key], np.float64) for key in (size, "compute", "loss"))
        edge = scaling.frontier(compute, loss) if ladder["lengths"] > 1 else np.arange(len(own))
        lines = {OVER_C: (compute[edge], loss[edge])} | ({OVER_N: (parameters, loss)} if ladder["lengths"] == 1 else {})
        for law, (x, y) in lines.items():
            with suppress(Unidentified):  # the frame of the fits says why
                rows += [(name, law, math.nan, *point) for point in _band(x, y)]
        for places in scaling.isoflops(parameters, compute):
            at = float(np.exp(np.log(compute[places]).mean()))
            with suppress(Unidentified):
                rows += [(name, ISOFLOP, at, *point) for point in _parabola(parameters[places], loss[places])]
    return pd.DataFrame(rows, columns=LINES)


def size_of(ladder: dict[str, Any]) -> str:
    """The column of the rungs that N is."""
    return "non_embedding" if ladder["count"] == "non_embedding" else "parameters"


def _band(x: Floats, loss: Floats) -> Iterator[tuple[float, float, float, float]]:
    at = np.geomspace(x.min(), x.max(), _POINTS) if len(x) else x
    for where, found in zip(at, scaling.power_line(x, loss, at), strict=True):
        low, high = _ends(found)
        yield float(where), found.value, low, high


def _ends(found: Estimate) -> tuple[float, float]:
    return (math.nan if found.low is None else found.low), (math.nan if found.high is None else found.high)


def _parabola(parameters: Floats, loss: Floats) -> Iterator[tuple[float, float, float, float]]:
    if scaling.distinct(parameters) < 3:
        return
    fit, centre = scaling.parabola(parameters, loss)
    for at in np.geomspace(parameters.min(), parameters.max(), _POINTS):
        z = math.log(at) - centre
        yield float(at), float(fit.solution @ np.array([1.0, z, z * z])), math.nan, math.nan
