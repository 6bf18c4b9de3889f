"""What a report says of a ladder: its rungs, power laws and gains, the loss surface, the best sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import DASH, Block, Cell, Column, Row, column_of, number, printable
from archlab.search.formatting.words import counted
from archlab.search.results.comparison import Comparison
from archlab.search.results.told import Seen, Told
from archlab.search.sections.ladder import frames as laws

_CONSTANTS = {"E": "E", "A": "A", "alpha": "alpha", "B": "B", "beta": "beta", "a": "N ~ C^"}
_POINTS = ("A", "B")  # that have no intervals
_UNBOUNDED = f"[{DASH}, {DASH}]"


class ToldOfLadder(Told):
    """Power laws, IsoFLOP minima and compute-equivalent gains, as far as the rungs hold them."""

    key = "ladder"
    paged = True

    def frames(self, seen: Seen) -> dict[str, Any]:
        """rungs, scaling: see scaling_frames in frames.py; both empty without a ladder."""
        table, nats = seen.found.table, seen.layout.unit == "nats/token"
        rungs, scaling = laws.scaling_frames(seen.record, seen.selections, table, seen.found.domains, nats)
        return {"rungs": rungs, "scaling": scaling}

    def notes(self, found: Comparison) -> Iterable[str]:
        """What fits leave out, and what could not be fitted, each reason once with the series that it holds for."""
        rungs, fits = records(found.rungs), found.scaling
        lost = [str(row["variant"]) for row in rungs if not math.isfinite(row["loss"])]
        if 0 < len(lost) < len(rungs):
            yield f"fits leave out what has no loss: {', '.join(lost)}"
        reasons: dict[tuple[str, str], dict[str, None]] = {}
        for row in records(fits[(fits["why"] != "") & (fits["of"] == laws.ALL)]):
            reasons.setdefault((row["law"], row["why"]), {})[row["series"]] = None
        yield from (f"{laws.TOLD[law]} of {', '.join(names)}: {why}" for (law, why), names in reasons.items())

    def blocks(self, found: Comparison) -> Iterable[Block]:
        if not len(found.rungs):
            return
        yield _rungs(found)
        fits = [row for row in records(found.scaling) if row["name"]]
        if lines := [row for row in fits if row["law"] in (laws.OVER_N, laws.OVER_C, laws.GAIN)]:
            yield _lines(lines)
        if surface := [row for row in fits if row["law"] == laws.SURFACE]:
            yield _surface(surface)
        if best := [row for row in fits if row["law"] == laws.ISOFLOP]:
            yield _isoflop(best, [row for row in fits if row["law"] == laws.BEST])

    def csv(self, found: Comparison) -> dict[str, dict[str, Any]]:
        """What each rung is, and the constants of what was fitted to its series."""
        rungs, fits = records(found.rungs), records(found.scaling)
        sized = [name for name in found.rungs.columns if name not in ("variant", "parameters", "loss")]
        columns = {f"ladder.{name}": {row["variant"]: row[name] for row in rungs} for name in sized if rungs}
        for fit in fits:
            if not isinstance(fit["name"], str) or not math.isnan(fit["at"]):
                continue  # why nothing was fitted; a minimum at one compute
            mine = [row["variant"] for row in rungs if row["series"] == fit["series"]]
            for kind, end in (("value", ""), ("low", "_low"), ("high", "_high")):
                name = f"scaling.{fit['of']}.{fit['law']}.{fit['name']}{end}"
                columns.setdefault(name, {}).update(dict.fromkeys(mine, fit[kind]))
        return columns


def _rungs(comparison: Comparison) -> Block:
    column, used = partial(column_of, records(comparison.rungs)), laws.size_of(comparison.provenance["ladder"])
    columns = [
        column("variant", lambda row: row["variant"], "l"),
        column("N", lambda row: counted(row["non_embedding"])),
        column("N with embeddings", lambda row: counted(row["parameters"])),
        column("tokens D", lambda row: counted(row["tokens"])),
        column("D/N", lambda row: number(row["tokens"] / row[used], ".3g")),
        column("FLOPs C", lambda row: number(row["compute"], ".3g")),
        column("loss ↓", lambda row: number(row["loss"], ".4f")),
        column("gain", lambda row: f"{row['gain']:.3g}×" if math.isfinite(row["gain"]) else DASH),
    ]
    named = "with embeddings" if used == "parameters" else "without embeddings"
    legend = (
        f"N {named} is the one that names, rules and fits take; C: training, three forward passes, mask-aware; loss on "
        "test in nats/token; gain: the factor of compute that the baseline needs for this loss, above 1 where the "
        "variant is better"
    )
    return Block("Ladder", columns, legend)


def _lines(fits: list[Row]) -> Block:
    """The power laws and the gain of every series, and of its domains."""
    keys = list(dict.fromkeys((row["series"], row["of"]) for row in fits))
    own = {(row["series"], row["of"], row["law"], row["name"]): row for row in fits}
    columns = [Column("variants", [Cell(printable(series)) for series, _ in keys], "l")]
    if any(of != laws.ALL for _, of in keys):
        columns.append(Column("loss of", [Cell(printable(of)) for _, of in keys], "l"))
    wanted = {"L = a N^-b": (laws.OVER_N, "b"), "L = a C^-b": (laws.OVER_C, "b")}
    wanted |= {"gain": (laws.GAIN, "gain"), "~ C^": (laws.GAIN, "trend")}
    for header, (law, name) in wanted.items():
        cells = [Cell(_told(own.get((*key, law, name)))) for key in keys]
        if any(cell.text != DASH for cell in cells):
            columns.append(Column(header.replace("~", "gain ~") if name == "trend" else header, cells))
    legend = (
        "exponents b by least squares in logarithms; gain: the factor of compute that the baseline needs for the same "
        f"losses, one for all rungs, and by what power of C it grows; 95% intervals (t, Fieller), {_UNBOUNDED} where "
        "nothing bounds them, none where as few rungs as constants leave nothing to make one from"
    )
    return Block("Power laws and compute-equivalent gain", columns, legend)


def _surface(fits: list[Row]) -> Block:
    names = list(dict.fromkeys(row["series"] for row in fits))
    own = {(row["series"], row["name"]): row for row in fits}
    columns = [Column("variants", [Cell(printable(name)) for name in names], "l")]
    for name, header in _CONSTANTS.items():
        columns.append(Column(header, [Cell(_told(own.get((series, name)))) for series in names]))
    legend = (
        "Huber loss of log L beyond 0.001, multi-start; 95% intervals by profile likelihood, none of A and B, a bound "
        "that the rungs do not give is a dash; N ~ C^: beta / (alpha + beta), the exponent of the best size"
    )
    return Block("L = E + A N^-alpha + B D^-beta", columns, legend)


def _isoflop(fits: list[Row], best: list[Row]) -> Block:
    keys = list(dict.fromkeys((row["series"], row["at"]) for row in fits))
    own = {(row["series"], row["at"], row["name"]): row for row in fits}
    grown = {row["series"]: row for row in best}
    columns = [
        Column("variants", [Cell(printable(series)) for series, _ in keys], "l"),
        Column("FLOPs C", [Cell(number(at, ".3g")) for _, at in keys]),
        Column("best N", [Cell(_sized(own[*key, "N"])) for key in keys]),
        Column("best D", [Cell(counted(float(f"{own[*key, 'D']['value']:.3g}"))) for key in keys]),
        Column("loss ↓", [Cell(number(own[*key, "L"]["value"], ".4f")) for key in keys]),
        Column("N ~ C^", [Cell(_told(grown.get(series))) for series, _ in keys]),
    ]
    legend = (
        f"minimum of a parabola in log N at equal compute; 95% intervals (Fieller), {_UNBOUNDED} where nothing bounds "
        "them, none where three sizes make it"
    )
    return Block("IsoFLOP minima", columns, legend)


def _told(row: Row | None) -> str:
    """A value with its interval, of which ends are missing where nothing bounds it."""
    if row is None or not math.isfinite(row["value"]):
        return DASH
    low, high = (number(row[end], ".3g") for end in ("low", "high"))
    return f"{row['value']:.3g}" + ("" if row["exact"] or row["name"] in _POINTS else f" [{low}, {high}]")


def _sized(row: Row) -> str:
    ends = [counted(row[end]) if math.isfinite(row[end]) else DASH for end in ("low", "high")]
    return counted(row["value"]) + ("" if row["exact"] else f" [{ends[0]}, {ends[1]}]")
