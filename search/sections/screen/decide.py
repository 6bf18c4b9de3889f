"""Which variants a study's screen lets through to its own recipe, as a function of its rows. Needs no torch.

Every variant is trained by the cheap recipe, its probe, with the first seed. Some are trained by the study's recipe
whatever their probes say; over these the two losses must rank alike, or the rule is off and all are trained. Then the
best by probe are, and some of the others; over all of them the losses must still rank alike, or the rest are too. Both
sets follow from the probes alone, so that nothing depends on what ended first, and no decision is taken back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from archlab.search.results.selection import (
    baselines_of,
    choose,
    group,
    is_lost,
    saved_by_brackets,
    tuned_paths,
    with_baselines,
)
from archlab.search.statistics.rank_correlation import Correlation, ranks, spearman
from archlab.search.store.roles import ROLE
from archlab.search.store.store import TERMINAL

SPARE = 2  # variants beside those that calibrate, or there is nothing to choose
_NAMED = 8  # variants that a sentence lists

State = Literal["probes", "calibration", "check", "on", "off"]
DECIDED = ("on", "off")


@dataclass(frozen=True)
class Screened:
    """What the rows say by now. Losses are on validation, in nats/token, infinite where a trial diverged.

    `probes` and `losses` hold those that ended (a probe that failed is infinite, a variant whose first seed failed has
    no loss); `calibrators`, `kept` and `audited` overlap but for the last. `first` is the correlation over the
    calibrators, `last` that over all three. `wanted` are the variants to be trained by now.
    """

    state: State
    probes: Mapping[str, float]
    losses: Mapping[str, float]
    calibrators: tuple[str, ...]
    kept: tuple[str, ...] = ()
    audited: tuple[str, ...] = ()
    first: Correlation | None = None
    last: Correlation | None = None
    wanted: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()

    def part(self, name: str) -> str:
        """Why a variant is trained, or is not."""
        if name in self.left_out:
            return "left out"
        parts = (("calibrates", self.calibrators), ("kept", self.kept), ("audited", self.audited))
        told = ", ".join(word for word, names in parts if name in names)
        return told or ("the rule is off" if self.state == "off" else "waits")


def screened(record: Mapping[str, Any], trials: Iterable[dict[str, Any]]) -> Screened:
    """What the screen of a study has decided: a function of its record and of its rows, whatever ended when.

    While a decision waits, variants that have begun stay wanted: a trial that failed is tried again without the others
    leaving the table.
    """
    trials = [*trials]
    record, options, grouped = with_baselines(dict(record)), record["screen"], group(trials)
    names = [variant["name"] for variant in record["variants"]]
    rows = {row["variant"]: row for row in reversed(trials) if row["role"] == ROLE}
    probes = {name: _loss(rows[name]) for name in names if name in rows and rows[name]["state"] in TERMINAL}
    draw = sorted(names, key=lambda name: hashlib.sha256(f"{record['study']}\n{name}".encode()).hexdigest())
    calibrators = _calibrators(record, names, draw)
    started = (row for row in trials if row["state"] != "planned" or row.get("attempt"))
    begun = frozenset(names) & {row["variant"] for row in started if row["role"] != ROLE}
    if len(probes) < len(names):
        return Screened("probes", probes, {}, calibrators, wanted=begun)
    losses: dict[str, float] = {}

    def settled(names: Iterable[str]) -> bool:
        ended = {name: _outcome(record, name, grouped.get(name, [])) for name in names}
        losses.update({name: value for name, (_, value) in ended.items() if value is not None})
        return all(over for over, _ in ended.values())

    def agreement(names: Iterable[str]) -> Correlation:
        both = [name for name in names if name in losses]
        return spearman([probes[name] for name in both], [losses[name] for name in both])

    if not settled(calibrators):
        return Screened("calibration", probes, losses, calibrators, wanted=begun | {*calibrators})
    first = agreement(calibrators)
    if not _holds(first, options):
        settled(names)
        return Screened("off", probes, losses, calibrators, first=first, wanted=frozenset(names))
    kept, audited = _going_on(options, probes, calibrators, draw)
    chosen = [name for name in names if name in {*calibrators, *kept, *audited}]
    check = Screened("check", probes, losses, calibrators, kept, audited, first, wanted=begun | {*chosen})
    if not settled(chosen):
        return check
    last = agreement(chosen)
    if _holds(last, options):
        rest = tuple(name for name in names if name not in chosen)
        return replace(check, state="on", last=last, wanted=frozenset(chosen), left_out=rest)
    settled(names)
    return replace(check, state="off", last=last, wanted=frozenset(names))


def ranks_of(losses: Mapping[str, float]) -> dict[str, float]:
    """The rank of each variant's loss, 1 for the lowest."""
    return dict(zip(losses, ranks([*losses.values()]), strict=True))


def only_of(record: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The record of a study that holds these variants alone, without a screen."""
    variants = [variant for variant in record["variants"] if variant["name"] in names]
    return {**record, "screen": None, "variants": variants}


def _holds(found: Correlation, options: Mapping[str, Any]) -> bool:
    return found.rho is not None and bool(found.rho >= options["correlation"])


def _loss(row: Mapping[str, Any]) -> float:
    """The validation loss of a trial that ended, infinite where it has none."""
    value = ((row["result"] or {}).get("validation") or {}).get("loss") if row["state"] == "complete" else None
    return float(value) if value is not None and math.isfinite(value) else math.inf


def _outcome(record: Mapping[str, Any], name: str, rows: list[dict[str, Any]]) -> tuple[bool, float | None]:
    """Whether the first seed at the settings that a variant chose has ended, and its validation loss; None: it failed.

    A repeat stands in the table only once the tuning is over.
    """
    selection = choose(dict(record), name, rows)
    if selection.missing_points:
        return False, None
    if selection.settings is None and tuned_paths(dict(record)):
        over = all(row["state"] in TERMINAL or is_lost(row) for row in selection.tuned)
        failed = all(row["state"] == "failed" for row in selection.tuned)
        return over, math.inf if over and not failed else None
    first = next((r for r in rows if r["role"] == "repeat" and r["seed"] == record["seeds"][0]), None)
    if first is None or first["settings"] != selection.settings or first["state"] not in TERMINAL:
        return False, None
    return True, None if first["state"] == "failed" else _loss(first)


def _calibrators(record: Mapping[str, Any], names: list[str], draw: list[str]) -> tuple[str, ...]:
    """The variants that others are compared with or matched to, and as many as it takes of the others, in the order of
    the draw."""
    target = (record.get("match") or {}).get("to")
    needed = {*baselines_of(dict(record)), *(name for name in names if name.partition(" [")[0] == target)}
    drawn = [name for name in draw if name not in needed][: max(0, record["screen"]["calibrate"] - len(needed))]
    return tuple(name for name in names if name in needed or name in drawn)


def _going_on(
    options: Mapping[str, Any], probes: Mapping[str, float], calibrators: tuple[str, ...], draw: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The best share of all variants by probe, with what ties with the last of them, and the audited share of those
    that neither are among these nor calibrate."""
    last = sorted(probes.values())[_share(options["keep"], len(probes)) - 1]
    kept = tuple(name for name, loss in probes.items() if loss <= last)
    others = [name for name in draw if name not in kept and name not in calibrators]
    drawn = others[: _share(options["audit"], len(others))]
    return kept, tuple(name for name in probes if name in drawn)


def most_left_out(record: Mapping[str, Any]) -> int:
    """How many variants a screen may leave out at most: where all that calibrate are among the best."""
    options, names = record["screen"], [variant["name"] for variant in record["variants"]]
    calibrate = len(_calibrators(with_baselines(dict(record)), names, names))
    spare = len(names) - max(_share(options["keep"], len(names)), calibrate)
    return spare - _share(options["audit"], spare)


def _share(share: float, count: int) -> int:
    """So much of so many, rounded up; 0.1 of 30 is 3."""
    return math.ceil(share * count - 1e-9)


def trials_of_each(record: Mapping[str, Any]) -> float:
    """The whole trials' worth that a variant takes when it is trained, before grids and seeds grow."""
    points = math.prod(map(len, tuned_paths(dict(record)).values()))
    seeds: int = (record.get("sequential") or {}).get("min") or len(record["seeds"])
    brackets = (record.get("tune") or {}).get("brackets")
    return points - 1 + seeds - (saved_by_brackets(points, **brackets) if brackets else 0.0)


def tokens_of(record: Mapping[str, Any], names: Iterable[str]) -> int:
    """The tokens of all trials of these variants, their probes not counted."""
    wanted, each = {*names}, trials_of_each(record)
    mine = (variant for variant in record["variants"] if variant["name"] in wanted)
    return sum(round(each * (v["tokens"] + sum(stage["tokens"] for stage in v.get("stages", ())))) for v in mine)


def probe_tokens(record: Mapping[str, Any]) -> int:
    """The tokens of all probes."""
    return sum(int(variant["probe"]["tokens"]) for variant in record["variants"])


def sentences(record: Mapping[str, Any], found: Screened) -> Iterator[str]:
    """What the screen has found and decided, for people."""
    total, floor = len(record["variants"]), record["screen"]["correlation"]
    if found.state == "probes":
        yield f"screen: {len(found.probes)} of {total} probes have ended; nothing else begins before all have"
        return
    names = found.calibrators
    if found.first is None:
        yield f"screen: waits for the {len(names)} variants that calibrate it ({_listed(names)})"
        return
    rho = "Spearman's rho of probe and validation loss"
    yield f"screen: {rho} over the {found.first.n} variants that calibrate it {_is(found.first)} ({_listed(names)})"
    if found.kept:
        more = f" and {len(found.audited)} of the others for audit" if found.audited else ""
        yield f"screen: the best {len(found.kept)} of {total} by probe go on{more}"
    if found.last is not None:
        yield f"screen: {rho} over all {found.last.n} that went on {_is(found.last)}"
    if found.state == "off":
        when = "is off" if found.last is None else "was switched off"
        low = found.first if found.last is None else found.last
        why = "where there is no rho nothing tells" if low.rho is None else f"rho is below {floor:g}"
        cost = f"its probes took {probe_tokens(record):,} tokens"
        yield f"screen: the rule {when}, every variant is trained: {why}; {cost}"
    elif found.state == "on":
        yield f"screen: the rule stayed on: {_saved(record, found)}"


def _is(found: Correlation) -> str:
    return f"is {found}" if found.rho is not None else str(found)


def _saved(record: Mapping[str, Any], found: Screened) -> str:
    if not found.left_out:
        return f"no variant was left to leave out; its probes took {probe_tokens(record):,} tokens"
    places = ranks_of(found.probes)
    shown = [f"{n} (probe {found.probes[n]:.4f}, rank {places[n]:g} of {len(places)})" for n in found.left_out]
    every = tokens_of(record, (variant["name"] for variant in record["variants"]))
    saved = tokens_of(record, found.left_out)
    return (
        f"left out {_listed(shown)}, which saved {saved:,} of {every:,} tokens; its probes took "
        f"{probe_tokens(record):,}"
    )


def _listed(names: Iterable[str]) -> str:
    given = [*names]
    return ", ".join(given[:_NAMED]) + (f" and {len(given) - _NAMED} more" if given[_NAMED:] else "")
