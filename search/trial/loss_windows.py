"""The losses of the single windows of a trial's validation curve, so that two trials compare window by window."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

_NAME = "windows-{}.f32"


def write_windows(folder: Path, before: int, place: int, step: int, sums: npt.NDArray[np.float64]) -> None:
    """Writes the sum of losses (nats) of every window at a step, the curve's point `place` of the stage after `before`.

    A record has its place in the file, so that a step which is trained again writes the same bytes again.
    """
    record = np.concatenate([[step], sums]).astype("<f4").tobytes()
    file = os.open(folder / _NAME.format(before), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(file, record, place * len(record))
    finally:
        os.close(file)


def read_windows(folder: Path, count: int, before: int = 0) -> dict[int, npt.NDArray[np.float64]]:
    """Step to the sums of its `count` windows (nats); {} where there are none, or another number."""
    path = folder / _NAME.format(before)
    if not path.exists():
        return {}
    found = np.fromfile(path, "<f4")
    records = found[: len(found) // (count + 1) * (count + 1)].reshape(-1, count + 1)
    return {int(record[0]): record[1:].astype(np.float64) for record in records if record[0] > 0}


def paired_error(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64], mean: float) -> float:
    """The standard error of the difference of two mean losses over the same windows, nats per token.

    `mean` is the mean loss of `theirs`, which says how many tokens there are.
    """
    windows = len(ours)
    if windows < 2 or not mean > 0:
        return 0.0
    tokens = float(theirs.sum()) / mean
    return float(np.sqrt(windows * (ours - theirs).var(ddof=1)) / tokens)
