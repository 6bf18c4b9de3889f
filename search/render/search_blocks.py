"""What a report prints of a search: its best trials or its front, and which axes mattered."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from search.render.blocks import SEARCH_ROWS, Block, Cell, Column, number, printable, short_count
from search.selection import terse

if TYPE_CHECKING:
    from search.comparison import Comparison

_ROOM = 70  # characters of settings on a terminal, beside the other columns
_HEADERS = {"flops_per_token": "FLOPs/token", "cache_bytes_per_token": "cache/token", "active_parameters": "active"}


def search_blocks(comparison: Comparison) -> list[Block]:
    """The tables of a search; none where nothing was searched."""
    if not len(comparison.search):
        return []
    several = len(comparison.searched.get("minimize", ())) > 1
    blocks = [_front(comparison) if several else _best(comparison)]
    if comparison.searched.get("importances"):
        blocks.append(_importances(comparison))
    return blocks


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


def _importances(comparison: Comparison) -> Block:
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
    """Which variants of the table are trials of the search, and what these have: whole, as a cell may be cut."""
    proposals = {row["key"]: row for row in comparison.search.to_dict("records")}
    repeats = comparison.trials[comparison.trials["role"].str.contains("repeat")].to_dict("records")
    found = {row["variant"]: proposals[row["key"]] for row in repeats if row["key"] in proposals}
    told = [f"; {name} is trial {row['number']} ({', '.join(terse(row['settings']))})" for name, row in found.items()]
    return printable("".join(told))
