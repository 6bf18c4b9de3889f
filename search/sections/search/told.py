"""What a report says of a search: its best trials or its front, which axes mattered, searches that asked the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import Block, Cell, Column, Row, column_of, number, printable, short_count
from archlab.search.formatting.words import terse
from archlab.search.results.comparison import Comparison
from archlab.search.results.told import Record, Rows, Seen, Told
from archlab.search.sections.search.frames import rivals_frame, rivals_of, search_frame, search_summary
from archlab.search.sections.search.promotion_frames import promotion_frames
from archlab.search.sections.search.promotion_tables import promotion_blocks, promotion_notes

if TYPE_CHECKING:
    from archlab.search.store.store import Store

SEARCH_ROWS = 20
_ROOM = 70  # characters of settings on a terminal, beside the other columns
_HEADERS = {"flops_per_token": "FLOPs/token", "cache_bytes_per_token": "cache/token", "active_parameters": "active"}


class ToldOfSearch(Told):
    """What was proposed is in the record; what it scored in the rows."""

    key = "search"

    def others(self, store: Store, record: Record) -> Iterable[tuple[Record, Rows]]:
        return ((each, store.study_trials(each["study"])) for each in rivals_of(store, record))

    def frames(self, seen: Seen) -> dict[str, Any]:
        """search: the trials of a search, best validation perplexity first; empty for other studies.
        searched: goals, constraints, what was refused, importances: search_summary in frames.py.
        promotion, promoted: the rungs and their candidates: promotion_frames.py.
        rivals: a row per search of the store that asks the same, this one first; empty where there is no other.
        """
        searches = [(each, search_frame(each, rows)) for each, rows in ((seen.record, seen.trials), *seen.others)]
        summary = search_summary(*searches[0])
        told = {"search": searches[0][1], "searched": summary, "rivals": rivals_frame(searches)}
        return told | promotion_frames(seen.record, seen.trials)

    def notes(self, found: Comparison) -> Iterable[str]:
        """What a reader of a search must know besides its trials."""
        if not (summary := found.searched):
            return
        if count := summary["infeasible"]:
            why = ", ".join(f"{name} {times}" for name, times in summary["broken"].items())
            those = "proposals break a constraint and were" if count > 1 else "proposal breaks a constraint and was"
            yield f"search: {count} {those} not trained ({why})"
        if count := summary["senseless"]:
            those = (
                "proposals make no sense, and count as trials" if count > 1 else "proposal makes no sense: a trial too"
            )
            yield f"search: {count} {those} ({summary['why']})"
        drawn, most = summary["trials"] + summary["senseless"], summary["most"]
        if summary["proposals"] >= most and drawn < summary["asked"]:
            yield f"search: {drawn} of {summary['asked']} trials: of {most} proposals no more were feasible"
        yield from promotion_notes(found)
        if len(found.search) and any("train.lr" in settings for settings in found.search["settings"]):
            yield (
                "search: what it found has a learning rate of its own, the baseline that of the recipe, so that a part "
                "of the difference may be the rate's: a study of both with `tune: {lr: …}` separates them"
            )

    def blocks(self, found: Comparison) -> Iterable[Block]:
        if len(found.search):
            yield trials_block(found)
            yield from promotion_blocks(found)
            if len(found.rivals):
                yield rivals_block(found)
            if found.searched.get("importances"):
                yield importances_block(found)


def trials_block(comparison: Comparison) -> Block:
    """The best trials of a search; with several goals the front and some of what it dominates."""
    return _front(comparison) if len(comparison.searched.get("minimize", ())) > 1 else _best(comparison)


def _best(comparison: Comparison) -> Block:
    """The best trials of a search for one goal, by validation."""
    rows = records(comparison.search.head(SEARCH_ROWS))
    best = rows[0]["validation_perplexity"]
    columns = [
        column_of(rows, "trial", lambda row: str(row["number"])),
        Column("perplexity ↓", [Cell(number(p := r["validation_perplexity"], ".3f"), p == best) for r in rows]),
        column_of(rows, "state", lambda row: row["state"], "l"),
        _settings(rows),
    ]
    total = len(comparison.search)
    shown = f"the best {len(rows)} of {total} trials" if total > len(rows) else f"{total} trials"
    legend = "* lowest"
    if comparison.searched.get("sampler") == "effects":
        legend += "; effects goes by its model of all trials, not by the lowest loss"
    return Block(f"Search, validation ({shown})", columns, legend + _repeated(comparison))


def _front(comparison: Comparison) -> Block:
    """The trials of a search for several goals: the front first, by perplexity, then what it dominates."""

    def place(row: Row) -> str:
        if row["state"] != "complete":
            return str(row["state"])
        if not row["feasible"]:
            return "breaks a constraint"
        return "front" if row["front"] else "dominated"

    summary = comparison.searched
    ordered = comparison.search.sort_values("front", ascending=False, kind="stable")
    rows = records(ordered.head(max(SEARCH_ROWS, int(ordered["front"].sum()))))
    columns = [
        column_of(rows, "trial", lambda row: str(row["number"])),
        Column("perplexity ↓", [Cell(number(r["validation_perplexity"], ".3f"), r["front"]) for r in rows]),
    ]
    for goal in summary["minimize"]:
        if goal != "perplexity":
            cells = [Cell(_shown(goal, r[goal]), r["front"]) for r in rows]
            columns.append(Column(f"{_named(goal)} ↓", cells))
    columns += [column_of(rows, "place", place, "l"), _settings(rows)]
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
    rows, several = records(comparison.rivals), len(comparison.searched["minimize"]) > 1
    best, after = _finite(min, (row["perplexity"] for row in rows)), rows[0]["after"]
    courses = list(zip(*(row["course"] for row in rows), strict=True))
    column = partial(column_of, rows)
    columns = [
        column("search", lambda row: row["study"], "l"),
        column("sampler", lambda row: row["sampler"], "l"),
        column("complete", lambda row: str(row["complete"])),
        Column("perplexity ↓", [Cell(number(p := row["perplexity"], ".3f"), p == best) for row in rows]),
    ]
    if several:
        columns += [
            column("own front", lambda row: str(row["front"])),
            column("common front", lambda row: str(row["common_front"])),
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


def _settings(rows: list[Row]) -> Column:
    paths = {path for row in rows for path in row["settings"]} - {"train.lr"}
    return column_of(rows, "settings", lambda row: ", ".join(terse(row["settings"], paths)), "l", room=_ROOM)


def _repeated(comparison: Comparison) -> str:
    """Which variants of the table are trials of the search, and what these have: whole, as a cell may be cut. Of equal
    proposals it is the first."""
    latest = comparison.search.sort_values("number", ascending=False)
    proposals = {row["key"]: row for row in records(latest)}
    repeats = records(comparison.trials[comparison.trials["role"].str.contains("repeat")])
    found = {row["variant"]: proposals[row["key"]] for row in repeats if row["key"] in proposals}
    told = [f"; {name} is trial {row['number']} ({', '.join(terse(row['settings']))})" for name, row in found.items()]
    return printable("".join(told))
