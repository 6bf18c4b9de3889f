"""How busy trials and machines were: the samples of `load.jsonl`, read again where they grew, and their figures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from archlab.dashboards.curves import Floats, stamp_of, thin
from archlab.dashboards.marks import Figure, chart, trace
from archlab.dashboards.theme import PALETTE, axis
from archlab.search.hardware.load import FILE
from archlab.search.utils.files import NO_JSON
from archlab.search.utils.shapes import number
from archlab.search.utils.untrusted import open_regular

GIB = 2**30
BINS = 300
"""Points of the machine's curves: samples of trials that run beside each other are averaged."""
MOST_FILES = 2000
"""Of a study's trials, the newest: so many are looked at for the load of its machines."""
OF_MACHINE = {"machine_cpu": "CPU", "machine_memory": "memory", "gpu": "GPU"}
"""What is told of a machine, in shares of what it has, by what a figure calls it."""

Samples = dict[str, Any]
"""`time` and each measure as [samples], NaN where a sample has none; `host` by sample."""


class LoadFiles:
    """The samples of trials by the folder of each."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, Samples]] = {}

    def of(self, folder: Path) -> Samples:
        """Those of one trial, oldest first; none where it has no file."""
        path = folder / FILE
        stamp = stamp_of(path)
        if stamp is None:
            return {}
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            known = self._known[path] = stamp, _read(path)
        return known[1]


def _read(path: Path) -> Samples:
    """A line that is being written waits for the next read."""
    rows = []
    try:
        with open_regular(path, folders=2) as file:  # the trial's
            lines = file.read().splitlines(keepends=True)
    except OSError:  # a link, or no file: as good as none
        return {}
    for line in lines:
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except NO_JSON:  # a disk that was full has left a part of a line
            continue
        if isinstance(row, dict) and not number(row.get("time")):
            rows.append(row)
    rows.sort(key=lambda row: float(row["time"]))
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    columns = {name: np.array([_number(row.get(name)) for row in rows], np.float64) for name in names}
    return {**columns, "host": [str(row.get("host", "")) for row in rows]} if rows else {}


def _number(value: Any) -> float:
    return math.nan if number(value) else float(value)


def of_trial(samples: Samples) -> list[tuple[str, Figure]]:
    """(name, figure) of each thing that one trial has used over time: cores, memory, and the GPU where it has one."""
    drawn = [("cores", "Cores in use", 1.0), ("memory_bytes", "Memory (GiB)", GIB)]
    drawn += [("gpu", "GPU in use (%)", 0.01), ("gpu_memory_bytes", "GPU memory (GiB)", GIB)]
    keep = thin(len(samples["time"]), BINS)
    x = moments(samples["time"][keep])
    found = []
    for key, title, unit in drawn:
        if key in samples:
            mode = "lines" if len(x) > 1 else "markers"  # a line through one point can't be seen
            line = trace(mode, x, [None if v != v else v for v in samples[key][keep] / unit], line={"width": 1.8})
            line["line"]["color"], line["hovertemplate"] = PALETTE[0], "%{y:.2f}<extra></extra>"
            y = axis(title, rangemode="tozero")
            found.append((key, chart([line], axis("", type="date"), y, showlegend=False)))
    return found


def of_machines(samples: Iterable[Samples], start: float, end: float) -> Figure | None:
    """The load of the machines on which trials ran, in percent of each, from `start` to `end` (unix s); None where
    nothing was sampled then. Samples outside, of trials that were reused, would leave few points inside."""
    every = [found for each in samples if each and (found := _between(each, start, end))]
    hosts = sorted({host for each in every for host in each["host"]})
    if not every:
        return None
    traces = []
    for at, host in enumerate(hosts):
        for dash, (key, name) in zip(("solid", "dot", "dash"), OF_MACHINE.items(), strict=True):
            parts = [_of_host(each, host, key) for each in every if key in each]
            if not (parts and sum(len(x) for x, _ in parts)):
                continue
            x, y = binned(*(np.concatenate(part) for part in zip(*parts, strict=True)))
            label = escape(f"{name}, {host}" if len(hosts) > 1 else name)
            line = {"color": PALETTE[at % len(PALETTE)], "dash": dash, "width": 1.8}
            told = {"name": label, "line": line, "connectgaps": False}
            told["hovertemplate"] = f"{label}: %{{y:.0f}}%<extra></extra>"
            traces.append(trace("lines", moments(x), [None if v != v else 100 * v for v in y], **told))
    return chart(traces, axis("", type="date"), axis("In use (%)", range=[0, 104]))


def _between(samples: Samples, start: float, end: float) -> Samples:
    """The samples of a span of time (unix s); none where it has none of them."""
    first, last = np.searchsorted(samples["time"], start), np.searchsorted(samples["time"], end, side="right")
    return {name: column[first:last] for name, column in samples.items()} if last > first else {}


def _of_host(samples: Mapping[str, Any], host: str, key: str) -> tuple[Floats, Floats]:
    mine = np.array([each == host for each in samples["host"]], bool)
    return samples["time"][mine], samples[key][mine]


def binned(x: Floats, y: Floats, bins: int = BINS) -> tuple[Floats, Floats]:
    """Means in equal spans of time, by their middles; NaN where a span of some length has no sample, so that a line
    ends where nothing ran."""
    keep = np.isfinite(y)
    x, y = x[keep], y[keep]
    if len(x) < 2 or x.max() == x.min():
        return x, y
    edges = np.linspace(x.min(), x.max(), bins + 1)
    place = np.clip(np.digitize(x, edges) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    total = np.bincount(place, weights=y, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = total / count
    middles = (edges[:-1] + edges[1:]) / 2
    order = np.sort(x)
    usual = float(np.quantile(np.diff(order), 0.95)) if len(order) > 2 else 0.0
    filled = count > 0
    since = np.diff(middles[filled], prepend=middles[filled][0])
    gap = np.flatnonzero(since > 6 * max(usual, float(edges[1] - edges[0])))
    found_x, found_y = middles[filled], means[filled]
    before = found_x[gap] - since[gap] / 2
    return np.insert(found_x, gap, before), np.insert(found_y, gap, np.nan)


def moments(times: Sequence[float] | Floats) -> list[str]:
    """Unix seconds as a date axis has them, in UTC."""
    return [datetime.fromtimestamp(float(each), UTC).strftime("%Y-%m-%d %H:%M:%S.%f") for each in times]
