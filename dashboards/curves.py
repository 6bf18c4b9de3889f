"""A trial's curves, read from its metrics.jsonl as it grows: only what was appended since the last look is parsed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SERIES = ("validation_loss", "loss", "grad_norm", "lr", "tokens_per_s")
"""What can be drawn; each is a field of some lines of the file."""
_TAIL_BYTES = 512


class CurveFile:
    """The lines of one metrics.jsonl. `read()` parses what is new, and everything where the file was cut and rewritten.

    A trial that continues from a checkpoint cuts its file back and appends again, maybe past our position: the last
    bytes that were read are compared before anything is added to them. A line without its newline is still being
    written and waits for the next read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable = 0
        self.stamp: tuple[int, int, int] | None = None
        self._position = 0
        self._tail = b""
        self._lines: list[dict[str, float]] = []
        self._cache: dict[str, tuple[Floats, Floats, Floats]] = {}

    def read(self) -> bool:
        """Takes in what was appended; True if anything changed. A file that isn't there yet is an empty one."""
        stamp = stamp_of(self.path)
        if stamp == self.stamp:
            return False
        self.stamp = stamp
        self._cache.clear()
        if stamp is None:
            self._reset()
            return True
        with self.path.open("rb") as file:
            if not self._continues(file.fileno(), stamp[1]):
                self._reset()
            file.seek(self._position)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._position += len(whole)
        self._tail = (self._tail + whole)[-_TAIL_BYTES:]
        for line in whole.splitlines():
            self._take(line)
        return True

    def _continues(self, descriptor: int, size: int) -> bool:
        start = self._position - len(self._tail)
        return size >= self._position and os.pread(descriptor, len(self._tail), start) == self._tail

    def _reset(self) -> None:
        self._position, self._tail, self._lines, self.unreadable = 0, b"", [], 0

    def _take(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            step = float(values["step"])
        except (ValueError, KeyError, TypeError):
            self.unreadable += 1  # shown beneath the figure: the file is damaged there
            return
        numbers = {k: float("nan") if v is None else float(v) for k, v in values.items() if _is_number(v)}
        self._lines.append({**numbers, "step": step})

    @property
    def last_step(self) -> int:
        """Optimizer steps done, 0 before the first line."""
        return int(self._lines[-1]["step"]) if self._lines else 0

    def series(self, name: str) -> tuple[Floats, Floats, Floats]:
        """(step, seconds of training, value) of the lines that have `name`; NaN where the trial wrote null.

        Seconds leave out the pauses between attempts.
        """
        if name not in self._cache:
            seconds = _training_seconds(self._lines)
            chosen = [i for i, line in enumerate(self._lines) if name in line]
            step = np.array([self._lines[i]["step"] for i in chosen], np.float64)
            value = np.array([self._lines[i][name] for i in chosen], np.float64)
            self._cache[name] = (step, seconds[chosen], value)
        return self._cache[name]


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _training_seconds(lines: Sequence[dict[str, float]]) -> Floats:
    time = np.array([line.get("time", float("nan")) for line in lines], np.float64)
    attempt = np.array([line.get("attempt", 0.0) for line in lines], np.float64)
    if not len(time):
        return time
    passed = np.diff(time, prepend=time[0])
    passed[np.diff(attempt, prepend=attempt[0]) != 0] = 0.0
    return np.cumsum(np.maximum(np.nan_to_num(passed), 0.0))


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file does: inode, bytes, time of change in ns. None for a file that isn't there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class Line:
    """One trial's curve, ready to draw; `step`, `x` and `y` are [points]."""

    variant: str
    seed: int
    label: str
    step: Floats
    x: Floats
    y: Floats
    diverged: bool = False


@dataclass(frozen=True)
class Group:
    """A variant's curve: mean over its seeds and the spread around it (std, [points], zeros for one seed)."""

    variant: str
    seeds: int
    x: Floats
    mean: Floats
    std: Floats
    lines: list[Line] = field(default_factory=list)


def smooth(values: Floats, weight: float) -> Floats:
    """Exponential moving average, m = w m + (1 - w) y over (1 - w^t), so that its start isn't pulled to zero.

    NaN passes through and is left out of the mean.
    """
    if not 0 <= weight < 1:
        raise ValueError(f"a smoothing weight lies in [0, 1), received {weight}")
    if weight == 0:
        return values
    result, mean, norm = np.empty_like(values), 0.0, 0.0
    for i, value in enumerate(values):
        if np.isfinite(value):
            mean, norm = weight * mean + (1 - weight) * value, weight * norm + 1 - weight
        result[i] = mean / norm if np.isfinite(value) else np.nan
    return result


def thin(points: int, limit: int = 400) -> NDArray[np.intp]:
    """Which of `points` to draw: at most `limit`, evenly spread, the first and the last among them."""
    if points <= limit:
        return np.arange(points)
    return np.unique(np.linspace(0, points - 1, limit).round().astype(np.intp))


def group(lines: Sequence[Line]) -> Group:
    """The mean of one variant's curves at the steps that all of them have; a diverged one is left out of it.

    Raises ValueError without a line.
    """
    if not lines:
        raise ValueError("a group needs at least one curve")
    members = [line for line in lines if not line.diverged and len(line.x)]
    name = lines[0].variant
    if not members:
        return Group(name, 0, np.empty(0), np.empty(0), np.empty(0), list(lines))
    shared = members[0].step
    for line in members[1:]:
        shared = np.intersect1d(shared, line.step, assume_unique=True)
    x = np.stack([line.x[np.isin(line.step, shared)] for line in members])
    y = np.stack([line.y[np.isin(line.step, shared)] for line in members])
    std = y.std(0, ddof=1) if len(members) > 1 else np.zeros(len(shared))
    return Group(name, len(members), x.mean(0), y.mean(0), std, list(lines))
