"""The table of a study: variants by components, means with their errors, differences, sizes, and what was measured."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import scipy  # its special is imported when it is used: an eighth of a second

from archlab.search.formatting.filters import Filter, parse_filter
from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import (
    DASH,
    Block,
    Cell,
    Column,
    Page,
    interval,
    number,
    printable,
    short_count,
    with_error,
)
from archlab.search.reporting.page import page_of
from archlab.search.reporting.shape import ERRORS, USUAL, Shape, known_column, known_error
from archlab.search.results.comparable import NO_DIFFERENCE

if TYPE_CHECKING:
    from archlab.search.results.comparison import Comparison
from archlab.search.results.told import sections_of

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")  # as JSON has it
EXTRA = ("loss", "memory", "cache", "trials")
"""Columns that a report prints only where it is asked for them; so are what varies and what was measured."""
OF_ROW = {
    **{name: name for name in ("variant", "baseline", "verdict", "lr", "n", "delta", "mismatch", "tokens_per_s")},
    **{name: f"{name}_mean" for name in ("perplexity", "loss")},
    **{"bits": "bits_per_byte_mean", "params": "parameters", "flops": "flops_per_token"},
    **{"memory": "peak_memory_bytes", "cache": "cache_bytes_per_token"},
    **{name: name for name in ("diverged", "failed", "pruned", "missing")},
}
"""What a filter calls the columns of the table."""
OF_TRIAL = (
    *("variant", "lr", "seed", "role", "state", "attempt", "reused", "reported", "reason", "validation_loss"),
    *("test_loss", "test_perplexity", "step", "tokens", "train_s", "tokens_per_s", "key"),
)
"""What a filter calls the columns of the trials."""

Row = dict[str, Any]


def main_block(comparison: Comparison, shape: Shape = USUAL) -> Block:
    """The table of the study, on test. Raises BadFilter for a filter that says nothing, ValueError for a shape that
    asks for a column or an error that there is not."""
    rows = records(comparison.table)
    error = known_error(shape.error)
    every = {column.key: column for column in _columns(comparison, rows, error)}
    usual = [key for key in every if key not in EXTRA and not key.startswith(("varied.", "measure."))]
    for key in shape.columns or ():
        known_column(key, every)
    shown = usual if shape.columns is None else [key for key in every if key == "variant" or key in shape.columns]
    kept = _shown(comparison, shape)
    columns = [_only(every[key], kept) for key in shown]
    return Block("", columns, _legend(comparison, rows, error))


def column_names(comparison: Comparison) -> dict[str, tuple[str, bool]]:
    """Every column that the table could have, by its key: (its header, whether it is usual)."""
    rows = records(comparison.table)
    extra = (*EXTRA, "varied.", "measure.")
    return {c.key: (c.header, not c.key.startswith(extra)) for c in _columns(comparison, rows, "std")}


def table_page(comparison: Comparison, shape: Shape) -> Page:
    """The table alone, in the shape that a reader gave it, with what a report says below it."""
    page, where = page_of(comparison, [main_block(comparison, shape)]), printable(shape.where.strip())
    return replace(page, lines=[*([f"Rows: {where}."] if where else []), *page.lines])


def narrowed(comparison: Comparison, shape: Shape) -> Comparison:
    """The comparison with those rows of its table alone; what was compared stays as it was. Raises BadFilter."""
    return replace(comparison, table=comparison.table[_shown(comparison, shape)].reset_index(drop=True))


def _shown(comparison: Comparison, shape: Shape) -> list[bool]:
    """Which rows of the table a shape has. Raises BadFilter."""
    kept, _ = kept_rows(comparison, shape.where)
    names = comparison.table["variant"]
    return [keep and (shape.variants is None or name in shape.variants) for name, keep in zip(names, kept, strict=True)]


def kept_rows(comparison: Comparison, where: str) -> tuple[list[bool], list[bool]]:
    """Which rows of the table and of the trials a filter keeps. Raises BadFilter.

    A filter may name what stands in the table, what varies, what was measured, and what a trial has: its `state`,
    `seed`, `role`, tuned settings. A row of the table stays when it holds of it and of at least one of its trials.
    """
    if not where.strip():
        return [True] * len(comparison.table), [True] * len(comparison.trials)
    table = records(comparison.table)
    trials = records(comparison.trials)
    rows, tried = row_values(comparison, table), [trial_values(trial) for trial in trials]
    names = dict.fromkeys(name for row in rows for name in row)
    own = dict.fromkeys(name for row in [OF_TRIAL, *tried] for name in row if name not in names)
    asked = parse_filter(where, [*names, *own])
    of_trial = asked.of(own)
    of_row = Filter(tuple(term for term in asked.terms if term.name not in own))
    holds = {row["variant"]: of_row.holds(row) for row in rows}
    kept = [holds.get(trial["variant"], True) and of_trial.holds(trial) for trial in tried]
    some = {trial["variant"] for trial, keep in zip(tried, kept, strict=True) if keep}
    return [holds[row["variant"]] and (not of_trial.terms or row["variant"] in some) for row in rows], kept


def row_values(comparison: Comparison, rows: Iterable[Row]) -> list[Row]:
    """What a filter can ask of each row of the table, by name."""
    measured: dict[str, Row] = {}
    for each in comparison.measures.to_dict("records"):
        measured.setdefault(each["variant"], {})[each["name"]] = each["mean"]
    return [
        _cell(row["variant"])
        | {name: row[column] for name, column in OF_ROW.items()}
        | {name: bool(has) for name, has in row["components"].items()}
        | row["varied"]
        | measured.get(row["variant"], {})
        for row in rows
    ]


def _cell(variant: str) -> Row:
    """What stands in the brackets of a variant's name: its values on the axes of a grid, its recipe, its rung."""
    told = re.search(r" \[(.*)\]$", variant)
    parts = [part.partition("=") for part in told[1].split(", ")] if told else []
    return {name: json.loads(value) if _NUMBER.fullmatch(value) else value for name, _, value in parts if value}


def trial_values(trial: Mapping[Any, Any]) -> Row:
    """What a filter can ask of a trial, by name: each setting by its path, and its roles as each and all of them."""
    settings = {name: value for name, value in trial["settings"].items() if name not in OF_TRIAL}
    roles = tuple(dict.fromkeys([trial["role"], *trial["role"].split("+")]))
    return {name: trial[name] for name in OF_TRIAL} | {"role": roles} | settings


def _columns(comparison: Comparison, rows: list[Row], error: str) -> Iterator[Column]:
    """All columns that the table can have, in their order."""
    more: dict[str, list[Column]] = {}
    for told in sections_of(comparison):
        more.setdefault(told.beside, []).extend(told.columns(comparison, rows))
    for column in _own_columns(comparison, rows, error):
        yield column
        yield from more.get(column.key, ())
    yield from more.get("", ())
    yield from _measured(comparison, rows, error)


def _own_columns(comparison: Comparison, rows: list[Row], error: str) -> Iterator[Column]:
    """Those that every study's table has."""
    unit, margin = comparison.noise["unit"], comparison.noise.get("margin")
    best = best_rows(rows)
    digits = _decimals([row["perplexity_std"] for row in rows])

    def of(name: str) -> list[Any]:
        return [row[name] for row in rows]

    def column(
        key: str, header: str, values: Iterable[Any], texts: Iterable[str], align: str = "r", keep: int = 0
    ) -> Column:
        cells = [Cell(printable(text), key == "perplexity" and i in best) for i, text in enumerate(texts)]
        return Column(header, cells, align, keep, key=key, values=tuple(map(_plain, values)))

    def counted(key: str, header: str, name: str, keep: int) -> Column:
        return column(key, header, of(name), map(_count, of(name)), keep=keep)

    def numbered(key: str, header: str, name: str, form: str, keep: int = 0) -> Column:
        return column(key, header, of(name), [number(value, form) for value in of(name)], keep=keep)

    several = len({round(size, 4) for size in of("bytes_per_token") if size > 0}) > 1
    goal = "flops_per_token" in comparison.searched.get("minimize", ())
    sparse = any(row["active_parameters"] < row["parameters"] for row in rows)
    yield column("variant", "variant", of("variant"), of("variant"), "l")
    for name in dict.fromkeys(name for row in rows for name in row["components"]):
        has = [bool(row["components"].get(name)) for row in rows]
        yield column(f"component.{name}", name, has, ["✓" if each else DASH for each in has], "c", 6)
    for path in dict.fromkeys(path for row in rows for path in row["varied"]):
        levels = [str(row["varied"].get(path, DASH)) for row in rows]
        yield column(f"varied.{path}", path, levels, levels, "l", 9)
    rates = [number(row["lr"], "g") + ("^" if row["lr_at_edge"] else "") for row in rows]
    yield column("lr", "lr", of("lr"), rates, keep=8)
    yield column("n", "n", of("n"), map(str, of("n")))
    yield column("perplexity", "perplexity ↓", of("perplexity_mean"), [_spread(row, error, digits) for row in rows])
    yield numbered("loss", "loss ↓", "loss_mean", ".4f", 5)
    yield numbered("bits", "bits/byte ↓", "bits_per_byte_mean", ".4f", 5)
    if several:
        yield numbered("bytes", "bytes/token", "bytes_per_token", ".3f", 5)
    yield numbered("delta", f"Δ {unit}", "delta", "+.4f")
    yield column("interval", "95% interval", of("delta"), map(interval, of("delta_low"), of("delta_high")))
    said = {"equivalent": "equivalent" if margin is None else f"equivalent within {margin:g}"}
    yield column("verdict", "verdict", of("verdict"), [said.get(each, each) for each in of("verdict")], "l")
    yield column("trials", "trials", of("missing"), map(_standing, rows), "l", 9)
    yield counted("params", "params", "parameters", 7)
    if sparse:
        yield counted("active", "active", "active_parameters", 7)
    if not any(map(math.isnan, of("mismatch"))):
        shares = [number(100 * each, "+.2f") + "%" for each in of("mismatch")]
        yield column("mismatch", "mismatch", of("mismatch"), shares, keep=4)
    if sparse:
        yield numbered("load", "max load", "router_load_max", ".2f", 4)
    yield counted("flops", "FLOPs/token", "flops_per_token", 0 if goal else 3)
    yield counted("speed", "tokens/s", "tokens_per_s", 2)
    yield column("memory", "peak memory", of("peak_memory_bytes"), map(_bytes, of("peak_memory_bytes")))
    caches = [DASH if math.isnan(each) else f"{each:,.0f} B" for each in of("cache_bytes_per_token")]
    yield column("cache", "cache/token", of("cache_bytes_per_token"), caches)


def _measured(comparison: Comparison, rows: list[Row], error: str) -> Iterator[Column]:
    """A column per number that `evaluate` asked for."""
    known = {(each["variant"], each["name"]): each for each in comparison.measures.to_dict("records")}
    for name in dict.fromkeys(name for _, name in known):
        mine = [known.get((row["variant"], name)) for row in rows]
        cells = [
            Cell(with_error(each["mean"], spread_of(each["std"], each["n"], error)) if each else DASH) for each in mine
        ]
        values = tuple(None if each is None else _plain(each["mean"]) for each in mine)
        yield Column(printable(str(name)), cells, "r", 9, key=f"measure.{name}", values=values)


def _spread(row: Row, error: str, digits: int) -> str:
    behind = spread_of(row["perplexity_std"], row["n"], error)
    return number(row["perplexity_mean"], f".{digits}f") + (f" ± {behind:.{digits}f}" if behind >= 0 else "")


def spread_of(std: float, n: int, error: str) -> float:
    """What stands behind ± for a mean over n values with that standard deviation (n - 1); NaN for a single one."""
    if error == "std" or n < 2:
        return std
    standard_error = std / math.sqrt(n)
    return standard_error if error == "se" else standard_error * float(scipy.special.stdtrit(n - 1, 0.975))


def best_rows(rows: list[Row]) -> set[int]:
    """The rows to print bold: of those with one baseline the lowest, by their paired differences, if it is better than
    the baseline. The baseline itself must have only worse variants."""
    cells: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if not math.isnan(row["perplexity_mean"]) and row["verdict"] not in NO_DIFFERENCE:
            cells.setdefault(row["baseline"], []).append(i)
    found = set()
    for known in cells.values():
        best = min(known, key=lambda i: _difference(rows[i]))
        verdict, others = rows[best]["verdict"], {rows[i]["verdict"] for i in known if i != best}
        if verdict == "better" or (verdict == "baseline" and others == {"worse"}):
            found.add(best)
    return found


def _difference(row: Row) -> float:
    """To the baseline; infinite where there is none, which no interval can call better."""
    delta = 0.0 if row["verdict"] == "baseline" else float(row["delta"])
    return math.inf if math.isnan(delta) else delta


def _legend(comparison: Comparison, rows: list[Row], error: str) -> str:
    legend = f"perplexity, bits/byte and Δ on test, mean ± {ERRORS[error]} over n seeds"
    legend += "; * lowest, beyond noise"
    if any(row["active_parameters"] < row["parameters"] for row in rows):
        legend += "; active: parameters that one token meets; max load: of an expert, 1 where all are used alike"
    if (match := comparison.provenance.get("match")) and match["kind"] != "parameters":
        legend += f"; mismatch: of {match['kind'].replace('_', ' ')}, from {match['to']}"
    if any(row["lr_at_edge"] for row in rows):
        legend += "; ^ rate at the edge of those tried"
    return legend


def _only(column: Column, kept: list[bool]) -> Column:
    cells = [cell for cell, keep in zip(column.cells, kept, strict=True) if keep]
    return replace(column, cells=cells, values=tuple(v for v, keep in zip(column.values, kept, strict=True) if keep))


def _standing(row: Row) -> str:
    """What became of the trials of a variant beside those that are complete."""
    if row["verdict"] == "left out":
        return "none"
    said = [f"{row[state]} {state}" for state in ("diverged", "failed", "pruned", "missing", "reused") if row[state]]
    return ", ".join(said) or "all complete"


def _plain(value: Any) -> Any:
    """Without NaN, which sorts nowhere."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _count(value: float) -> str:
    return DASH if math.isnan(value) else short_count(value)


def _bytes(value: float) -> str:
    return DASH if math.isnan(value) else f"{value / 2**20:,.0f} MiB"


def _decimals(stds: list[float]) -> int:
    """So many decimals that the smallest spread shows two digits, 2 to 4."""
    known = [s for s in stds if s > 0]
    return min(4, max(2, 1 - math.floor(math.log10(min(known))))) if known else 2


def trial_cells(comparison: Comparison, shape: Shape = USUAL) -> dict[str, list[tuple[Row, dict[str, Cell]]]]:
    """Of each variant its trials that a filter keeps, those that stand in the table first: (the trial, its cells by the
    key of their column)."""
    digits = _decimals(list(comparison.table["perplexity_std"]))
    kept = kept_rows(comparison, shape.where)[1]
    trials = records(comparison.trials)
    shown = [trial for trial, keep in zip(trials, kept, strict=True) if keep]
    found: dict[str, list[tuple[Row, dict[str, Cell]]]] = {}
    for trial in sorted(shown, key=lambda each: (not each["reported"], each["lr"], each["seed"])):
        role = "" if trial["reported"] else f" · {'tuning' if trial['role'] == 'tune' else trial['role']}"
        cells = {
            "variant": f"seed {trial['seed']}{role}",
            "lr": number(trial["lr"], "g"),
            "perplexity": number(trial["test_perplexity"], f".{digits}f"),
            "loss": number(trial["test_loss"], ".4f"),
            "bits": number(trial["test_bits_per_byte"], ".4f"),
            "verdict": trial["state"],
            "trials": _history(trial),
            "speed": _count(trial["tokens_per_s"]),
            "memory": _bytes(trial["peak_memory_bytes"]),
        }
        found.setdefault(trial["variant"], []).append((trial, {k: Cell(printable(text)) for k, text in cells.items()}))
    return found


def _history(trial: Row) -> str:
    """Whether a trial was reused, continued, and why it ended as it did."""
    said = ["reused"] if trial["reused"] else []
    said += [f"{trial['attempt']} attempts"] if trial["attempt"] > 1 else []
    said += [trial["reason"]] if isinstance(trial["reason"], str) else []  # a frame has NaN where there is none
    return ", ".join(said)
