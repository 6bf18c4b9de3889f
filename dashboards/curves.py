"""A trial's curves, read from its metrics.jsonl as it grows: only what was appended since the last look is parsed."""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archlab.search.utils.files import NO_JSON
from archlab.search.utils.shapes import maybe, number
from archlab.search.utils.untrusted import open_regular

Floats = NDArray[np.float64]

SERIES = ("validation_loss", "loss", "grad_norm", "lr", "tokens_per_s")
"""What can be drawn; each is a field of some lines of the file."""
_TAIL_BYTES = 512
_NOTHING = object()
NAN = float("nan")
_known = maybe(number)  # null is a number that is not finite


class CurveFile:
    """The lines of one metrics.jsonl. `look()` sees that it changed; what is new is parsed when a curve is asked for,
    and everything where the file was cut and rewritten.

    A trial that continues from a checkpoint cuts its file back and appends again, maybe past our position: the last
    bytes that were read are compared before anything is added to them. A line without its newline is still being
    written and waits for the next read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp: tuple[int, int, int] | None = None
        self.unreadable = 0  # of the lines that were parsed
        self._parsed: object = _NOTHING
        self._lock = threading.RLock()

    def look(self) -> bool:
        """Whether the file changed since the last look, which parses nothing."""
        before, self.stamp = self.stamp, stamp_of(self.path)
        return self.stamp != before

    def _catch_up(self) -> None:
        """Parses up to the last look. A file that isn't there yet is an empty one."""
        if self.stamp == self._parsed:
            return
        if self._parsed is _NOTHING:  # columns are made when asked for: most trials' of a large study never are
            self._reset()
        self._parsed = self.stamp
        self._cache.clear()
        if self.stamp is None:
            self._reset()
            return
        try:
            opened = open_regular(self.path, folders=2)  # the trial's
        except OSError:  # a link, or no file: shown as damaged
            self._reset()
            self.unreadable = 1
            return
        with opened as file:
            start = self._position - len(self._tail)
            if self.stamp[1] < self._position or os.pread(file.fileno(), len(self._tail), start) != self._tail:
                self._reset()
            file.seek(self._position)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._position += len(whole)
        self._tail = (self._tail + whole)[-_TAIL_BYTES:]
        self._take(whole.splitlines())

    def _reset(self) -> None:
        self._position, self._tail, self.unreadable = 0, b"", 0
        self._step, self._time, self._attempt, self._tokens = (array("d") for _ in range(4))
        self._values = {name: (array("l"), array("d")) for name in SERIES}
        self._cache: dict[str, tuple[Floats, Floats, Floats]] = {}

    def _take(self, lines: list[bytes]) -> None:
        """Adds lines. All at once where each is JSON, which is most of the time and several times as fast."""
        try:
            found = json.loads(b"[" + b",".join(lines) + b"]")
        except NO_JSON:
            found = []
        if len(found) != len(lines):
            found = [_loaded(line) for line in lines]
        kept = [each for each in found if isinstance(each, dict) and not number(each.get("step"))]
        self.unreadable += len(found) - len(kept)  # shown beneath the figure: the file is damaged there
        start = len(self._step)
        self._step.extend([each["step"] for each in kept])
        for column, name in ((self._time, "time"), (self._attempt, "attempt"), (self._tokens, "tokens")):
            values = [each.get(name) for each in kept]
            column.extend([NAN if number(value) else value for value in values])
        for name, (places, numbers) in self._values.items():
            where = [place for place, each in enumerate(kept) if name in each and not _known(each[name])]
            places.extend([start + place for place in where])
            numbers.extend([NAN if (value := kept[place][name]) is None else value for place in where])

    @property
    def last_step(self) -> int:
        """Optimizer steps done, 0 before the first line."""
        with self._lock:
            self._catch_up()
            return int(self._step[-1]) if self._step else 0

    def tokens(self, step: Floats) -> Floats | None:
        """Tokens that were trained on after so many optimizer steps, between the lines that say it; None before one."""
        with self._lock:
            self._catch_up()
            known = np.isfinite(tokens := np.array(self._tokens))
            if not known.any():
                return None
            steps, tokens = np.array(self._step)[known], tokens[known]
            return np.where(step <= steps[-1], np.interp(step, steps, tokens), tokens[-1] * step / steps[-1])

    def series(self, name: str) -> tuple[Floats, Floats, Floats]:
        """(step, seconds of training, value) of the lines that have `name`; NaN where the trial wrote null.

        Seconds leave out the pauses between attempts.
        """
        with self._lock:
            self._catch_up()
            if name not in self._cache:
                seconds = _training_seconds(np.array(self._time), np.nan_to_num(np.array(self._attempt)))
                places, numbers = self._values[name]
                chosen = np.array(places, np.intp)
                self._cache[name] = (np.array(self._step)[chosen], seconds[chosen], np.array(numbers))
            return self._cache[name]


def _loaded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except NO_JSON:
        return None


def _training_seconds(time: Floats, attempt: Floats) -> Floats:
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
    key: str = ""  # of the trial


@dataclass(frozen=True)
class Group:
    """A variant's curve: mean over its seeds and the spread around it (std, [points], zeros for one seed). With a
    `label` it is called that, and told from others of its variant. With a `factor` it is that of a level of it, called
    `variant`, over trials of several variants."""

    variant: str
    seeds: int
    x: Floats
    mean: Floats
    std: Floats
    lines: list[Line] = field(default_factory=list)
    label: str = ""
    factor: str = ""


def smooth(values: Floats, weight: float) -> Floats:
    """Exponential moving average, m = w m + (1 - w) y over (1 - w^t), so that its start isn't pulled to zero.

    NaN passes through and is left out of the mean.
    """
    if not 0 <= weight < 1:
        raise ValueError(f"a smoothing weight lies in [0, 1), received {weight}")
    if weight == 0:
        return values
    import pandas as pd  # which a server starts without

    known = np.isfinite(values)
    means = pd.Series(np.where(known, values, np.nan)).ewm(alpha=1 - weight, ignore_na=True).mean()
    return np.where(known, means, np.nan)


def thin(points: int, limit: int = 400) -> NDArray[np.intp]:
    """Which of `points` to draw: at most `limit`, evenly spread, the first and the last among them."""
    if points <= limit:
        return np.arange(points)
    return np.unique(np.linspace(0, points - 1, limit).round().astype(np.intp))


def strided(points: int, every: int) -> NDArray[np.intp]:
    """One in `every` of `points`, and the last: lines of different lengths keep the places that they have in common."""
    return np.unique(np.r_[0:points:every, points - 1]) if points else np.arange(0)


def group(lines: Sequence[Line]) -> Group:
    """The mean of one variant's curves at the steps that all of them have; a diverged one is left out of it."""
    members = [line for line in lines if not line.diverged and len(line.x)]
    shared = reduce(np.intersect1d, [line.step for line in members]) if members else np.empty(0)
    places = [np.isin(line.step, shared) for line in members]
    x, y = ([getattr(line, axis)[at] for line, at in zip(members, places, strict=True)] for axis in ("x", "y"))
    return _mean_of(lines, lines[0].variant, np.mean(x, 0) if x else np.empty(0), y)


def group_level(lines: Sequence[Line], level: str, factor: str) -> Group:
    """The mean of all trials at one level of a factor, each read (linearly) at the same places of the x axis: those of
    the one with the fewest points, where all of them have points. Their steps need not hold as many tokens."""
    members = [line for line in lines if not line.diverged and np.isfinite(line.y).any()]
    known = [(line.x[np.isfinite(line.y)], line.y[np.isfinite(line.y)]) for line in members]
    first, last = max((x[0] for x, _ in known), default=0.0), min((x[-1] for x, _ in known), default=0.0)
    x = min((x for x, _ in known), key=len, default=np.empty(0))
    x = x[(x >= first) & (x <= last)]
    return _mean_of(lines, level, x, [np.interp(x, *each) for each in known] if len(x) else [], factor)


def _mean_of(lines: Sequence[Line], name: str, x: Floats, y: list[Floats], factor: str = "") -> Group:
    """Of the curves `y` at the places `x`, beside all lines of the group."""
    if not y:
        return Group(name, 0, np.empty(0), np.empty(0), np.empty(0), list(lines), factor=factor)
    std = np.std(y, 0, ddof=1) if len(y) > 1 else np.zeros(len(x))
    return Group(name, len(y), x, np.mean(y, 0), std, list(lines), factor=factor)
