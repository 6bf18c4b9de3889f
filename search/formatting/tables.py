"""What anything printed is made of: cells, columns, blocks of a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
DASH = "\N{EN DASH}"


IDENTITIES = "Identities: sha256 of each variant's resolved model, and of its recipe but for rate, precision, compiling"


@dataclass(frozen=True)
class Cell:
    """A formatted value; `strong` marks the best."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Column:
    """`align` is "l", "r" or "c"; of a table too wide for its medium, the highest `keep` is kept first (0 always).

    `room`: from so many characters on a terminal leaves out the middle of a text, or lets a last column of words
    go on below. Of the first table's columns `key` is the name in filters and addresses, and `values` what the cells
    show (None: nothing), to sort by.
    """

    header: str
    cells: list[Cell]
    align: str = "r"
    keep: int = 0
    room: int = 40
    key: str = ""
    values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Block:
    """A table with its title and the legend of its marks. A terminal prints one with `detail` when it is asked for."""

    title: str
    columns: list[Column]
    legend: str = ""
    detail: bool = False


@dataclass(frozen=True)
class Page:
    """A whole report. `lines` and `notes` are printed below the first table, then `provenance`; `findings` are its
    conclusions in sentences. For what is kept in a repository, each variant has the `identities` of its model and
    recipe."""

    study: str
    question: str
    blocks: list[Block]
    lines: list[str]
    notes: list[str]
    provenance: str
    identities: list[tuple[str, str]]
    findings: list[str] = field(default_factory=list)


def printable(text: str) -> str:
    """One line without control characters: what a study or a traceback says must not steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def number(value: float | None, form: str) -> str:
    """A formatted number, or a dash where there is none."""
    return DASH if value is None or not math.isfinite(value) else format(value, form)


def interval(low: float, high: float) -> str:
    """The ends of an interval of differences; a dash where there is none."""
    return DASH if math.isnan(low) else f"[{low:+.4f}, {high:+.4f}]"


def with_error(mean: float, half: float) -> str:
    """A mean and what stands behind its ±, with so many decimals that this shows two digits; nothing behind it for a
    single value, whose `half` is NaN."""
    if not math.isfinite(mean):
        return DASH
    if not half > 0:
        return f"{mean:.4g}" + (" ± 0" if half == 0 else "")
    decimals = 1 - math.floor(math.log10(half))
    if decimals > 6 or abs(mean) >= 1e6:
        return f"{mean:.4g} ± {half:.2g}"
    return f"{mean:.{max(decimals, 0)}f} ± {half:.{max(decimals, 0)}f}"


def short_count(value: float) -> str:
    """1234 -> 1.23k, 861312 -> 861k, 2.5e6 -> 2.50M: three digits."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{max(0, 2 - int(math.log10(max(scaled, 1)) + 1e-3))}f}{unit}"
    return f"{value:g}"


def column_of(
    rows: Iterable[Row], header: str, show: Callable[[Row], str], align: str = "r", keep: int = 0, room: int = 40
) -> Column:
    """A column with a cell for each of the rows, as `show` says it."""
    return Column(header, [Cell(printable(show(row))) for row in rows], align, keep, room)
