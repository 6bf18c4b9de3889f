"""What a report prints of a search: its best trials or its front, and which axes mattered."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.tables import Block, Cell, Column, number, printable, short_count
from archlab.search.formatting.words import terse

if TYPE_CHECKING:
    from archlab.search.results.comparison import Comparison

_ROOM = 70  # characters of settings on a terminal, beside the other columns
_HEADERS = {"flops_per_token": "FLOPs/token", "cache_bytes_per_token": "cache/token", "active_parameters": "active"}


def search_blocks(comparison: Comparison) -> list[Block]:
    """The tables of a search; none where nothing was searched."""
    if not len(comparison.search):
        return []
    blocks = [trials_block(comparison)]
    if len(comparison.rivals):
        blocks.append(rivals_block(comparison))
    if comparison.searched.get("importances"):
        blocks.append(importances_block(comparison))
    return blocks


def trials_block(comparison: Comparison) -> Block:
    """The best trials of a search; with several goals the front and some of what it dominates."""
    return _front(comparison) if len(comparison.searched.get("minimize", ())) > 1 else _best(comparison)


def _best(comparison: Comparison) -> Block:
    """The best trials of a search for one goal, by validation."""
    rows = comparison.search.head(SEARCH_ROWS).to_dict("records")
    best = rows[0]["validation_perplexity"]
    columns = [
        Column("trial", [Cell(str(r["number"])) for r in rows]),
        Column("perplexity ↓", [Cell(number(p := r["validation_perplexity"], ".3f"), p == best) for r in rows]),
        Column("state", [Cell(r["state"]) for r in rows], "l"),
        _settings(rows),
    ]
    total = len(comparison.search)
    shown = f"the best {len(rows)} of {total} trials" if total > len(rows) else f"{total} trials"
    return Block(f"Search, validation ({shown})", columns, "* best" + _repeated(comparison))


def _front(comparison: Comparison) -> Block:
    """The trials of a search for several goals: the front first, by perplexity, then what it dominates."""
    summary = comparison.searched
    ordered = comparison.search.sort_values("front", ascending=False, kind="stable")
    rows = ordered.head(max(SEARCH_ROWS, int(ordered["front"].sum()))).to_dict("records")
    columns = [
        Column("trial", [Cell(str(r["number"])) for r in rows]),
        Column("perplexity ↓", [Cell(number(r["validation_perplexity"], ".3f"), r["front"]) for r in rows]),
    ]
    for goal in summary["minimize"]:
        if goal != "perplexity":
            header = f"{_HEADERS.get(goal, goal.replace('_', ' '))} ↓"
            columns.append(Column(header, [Cell(_shown(goal, r[goal]), r["front"]) for r in rows]))
    columns += [
        Column("place", [Cell(_place(r)) for r in rows], "l"),
        _settings(rows),
    ]
    count, total = int(ordered["front"].sum()), len(ordered)
    legend = "* on the front: no other trial is as good in all goals and better in one"
    if "hypervolume" in summary:
        worst = ", ".join(f"{_named(goal)} {_shown(goal, value)}" for goal, value in summary["reference"].items())
        legend += (
            f"; hypervolume {summary['hypervolume']:.4g} in natural logarithms, reference: the worst of the complete "
            f"trials, {worst}"
        )
    return Block(f"Search, validation (front of {count} of {total} trials)", columns, legend + _repeated(comparison))


def rivals_block(comparison: Comparison) -> Block:
    """This search beside others of the same space, goals and constraints."""
    rows, several = comparison.rivals.to_dict("records"), len(comparison.searched["minimize"]) > 1
    best, after = _finite(min, (row["perplexity"] for row in rows)), rows[0]["after"]
    courses = list(zip(*(row["course"] for row in rows), strict=True))
    columns = [
        Column("search", [Cell(row["study"]) for row in rows], "l"),
        Column("sampler", [Cell(row["sampler"]) for row in rows], "l"),
        Column("complete", [Cell(str(row["complete"])) for row in rows]),
        Column("perplexity ↓", [Cell(number(p := row["perplexity"], ".3f"), p == best) for row in rows]),
    ]
    if several:
        columns += [
            Column("own front", [Cell(str(row["front"])) for row in rows]),
            Column("common front", [Cell(str(row["common_front"])) for row in rows]),
        ]
    form, least = (".4g", max) if several else (".3f", min)
    for count, found in zip(after, courses, strict=True):
        header, cells = f"after {count} {'↑' if several else '↓'}", [number(value, form) for value in found]
        marks = [value == _finite(least, found) for value in found]
        columns.append(Column(header, [Cell(*cell) for cell in zip(cells, marks, strict=True)]))
    of_several = "hypervolume in natural logarithms, reference: the worst of the complete trials of them all"
    legend = "* best; validation; after so many trials of each: "
    legend += of_several if several else "the lowest perplexity"
    legend += "; one search each, so that luck is not told apart"
    return Block("Searches of the same space", columns, legend)


def _finite(pick: Callable[[list[float]], float], values: Iterable[float]) -> float | None:
    """The least or the most of what is a number; None where nothing is."""
    known = [value for value in values if math.isfinite(value)]
    return pick(known) if known else None


def _place(row: Mapping[Any, Any]) -> str:
    if row["state"] != "complete":
        return str(row["state"])
    if not row["feasible"]:
        return "breaks a constraint"
    return "front" if row["front"] else "dominated"


def _named(goal: str) -> str:
    return _HEADERS.get(goal, goal.replace("_", " "))


def _shown(goal: str, value: float) -> str:
    forms: dict[str, Callable[[float], str]] = {
        "perplexity": lambda each: number(each, ".3f"),
        "step_time": lambda each: number(each * 1000, ".3g") + " ms",
        "peak_memory": lambda each: short_count(each) + "B",
        "cache_bytes_per_token": lambda each: short_count(each) + "B",
    }
    return number(None, "") if value != value else forms.get(goal, short_count)(value)


def importances_block(comparison: Comparison) -> Block:
    """How much each axis had to do with being among the best."""
    shares: dict[str, float] = comparison.searched["importances"]
    columns = [
        Column("axis", [Cell(printable(path)) for path in shares], "l"),
        Column("importance", [Cell(f"{share:.0%}") for share in shares.values()]),
    ]
    complete = int((comparison.search["state"] == "complete").sum())
    legend = (
        "share in being among the best quarter by validation loss (PED-ANOVA); about these trials, which the sampler "
        f"{comparison.searched['sampler']} chose, and not about the whole space"
    )
    return Block(f"Importance of the axes ({complete} trials)", columns, legend)


def _settings(rows: list[dict[Hashable, Any]]) -> Column:
    paths = {path for row in rows for path in row["settings"]} - {"train.lr"}
    return Column("settings", [Cell(printable(", ".join(terse(r["settings"], paths)))) for r in rows], "l", room=_ROOM)


def _repeated(comparison: Comparison) -> str:
    """Which variants of the table are trials of the search, and what these have: whole, as a cell may be cut. Of equal
    proposals it is the first."""
    latest = comparison.search.sort_values("number", ascending=False)
    proposals = {row["key"]: row for row in latest.to_dict("records")}
    repeats = comparison.trials[comparison.trials["role"].str.contains("repeat")].to_dict("records")
    found = {row["variant"]: proposals[row["key"]] for row in repeats if row["key"] in proposals}
    told = [f"; {name} is trial {row['number']} ({', '.join(terse(row['settings']))})" for name, row in found.items()]
    return printable("".join(told))


SEARCH_ROWS = 20
