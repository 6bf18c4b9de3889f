"""What the rungs of a search found: who was chosen at which difference, and what was left of it on other seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.frames import NAN
from archlab.search.results.selection import loss
from archlab.search.statistics.rank_correlation import spearman

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd

TABLE = "table"
_RUNGS = ("rung", "tokens", "parameters", "seeds", "entered", "promoted", "chosen", "repeated", "shrinkage")
RUNGS = (*_RUNGS, "shrinkage_n", "rho", "rho_low", "rho_high", "one_scale")
CANDIDATES = ("rung", "number", "variant", "seeds", "loss", "delta", "promoted", "repeated", "shrinkage", "becomes")

Losses = Mapping[tuple[str, int], float]


def promotion_frames(record: Mapping[str, Any], trials: Iterable[Mapping[str, Any]]) -> dict[str, pd.DataFrame]:
    """All of VALIDATION, in nats/token; a difference is to the baseline of the same seeds; NaN: there is none yet.

    promotion: a row per rung. `entered` and `promoted` count candidates; `chosen` is the mean difference of those that
        went on, at the rung that chose them, `repeated` that of the same ones at the next rung, for the last rung in
        the table; `shrinkage` is repeated - chosen, over `shrinkage_n` candidates. `rho` is Spearman's of their losses
        at the two, with its 95% interval. `one_scale` says whether the two differ in their seeds alone.
    promoted: a row per rung and candidate, best first. `promoted` is None while the rung goes on; `becomes` is the
        variant of the table that a candidate of the last rung is.
    """
    import pandas as pd

    known = {
        (row["variant"], row["seed"]): value for row in trials if (value := loss(dict(row), "validation")) is not None
    }
    rungs = (record.get("search") or {}).get("promote") or []
    found = {int(number): name for number, name in (rungs[-1].get("found", {}) if rungs else {}).items()}
    table = {"seeds": record["seeds"], "baseline": record.get("baseline"), "entered": found}
    summaries: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for index, rung in enumerate(rungs):
        last = index == len(rungs) - 1
        following = table if last else rungs[index + 1]
        mine = [_candidate(rung, following, int(number), name, known) for number, name in rung["entered"].items()]
        mine.sort(key=lambda row: (math.inf if math.isnan(row["loss"]) else row["loss"], row["number"]))
        shown = [{**row, "becomes": found.get(row["number"], "") if last else ""} for row in mine]
        rows += [{name: row[name] for name in CANDIDATES} for row in shown]
        one = last or all(rung[name] == following[name] for name in ("tokens", "parameters"))
        summaries.append(_summary(rung, mine, one))
    return {
        "promotion": pd.DataFrame(summaries, columns=[*RUNGS]),
        "promoted": pd.DataFrame(rows, columns=[*CANDIDATES]),
    }


def _candidate(
    rung: Mapping[str, Any], following: Mapping[str, Any], number: int, name: str, known: Losses
) -> dict[str, Any]:
    """One candidate at a rung, and at what follows it if it went on."""
    promoted = None if rung["chosen"] is None else number in rung["chosen"]
    after = {int(each): variant for each, variant in following["entered"].items()}.get(number) if promoted else None
    delta = _difference(rung, name, known)
    repeated = _difference(following, after, known) if after else NAN
    return {
        "rung": rung["rung"],
        "number": number,
        "variant": name,
        "seeds": len(rung["seeds"]),
        "loss": _mean(known.get((name, seed)) for seed in rung["seeds"]),
        "delta": delta,
        "promoted": promoted,
        "repeated": repeated,
        "shrinkage": repeated - delta,
        "after": _mean(known.get((after, seed)) for seed in following["seeds"]) if after else NAN,
    }


def _difference(rung: Mapping[str, Any], name: str, known: Losses) -> float:
    """The mean difference of a variant to the baseline over the seeds of a rung; NaN unless both have all of them."""
    pairs = [(known.get((name, seed)), known.get((rung["baseline"], seed))) for seed in rung["seeds"]]
    return _mean(None if ours is None or theirs is None else ours - theirs for ours, theirs in pairs)


def _mean(values: Iterable[float | None]) -> float:
    found = [NAN if value is None else value for value in values]
    return fmean(found) if found else NAN


def _summary(rung: Mapping[str, Any], mine: list[dict[str, Any]], one_scale: bool) -> dict[str, Any]:
    """One rung, over those of its candidates that went on and were repeated."""
    again = [row for row in mine if not math.isnan(row["shrinkage"])]
    both = [row for row in mine if not math.isnan(row["after"])]
    rank = spearman([row["loss"] for row in both], [row["after"] for row in both])
    means = {new: _mean(row[old] for row in again) for new, old in (("chosen", "delta"), ("repeated", "repeated"))}
    return {
        **{name: rung[name] for name in ("rung", "tokens", "parameters")},
        "seeds": len(rung["seeds"]),
        "entered": len(mine),
        "promoted": len(rung["chosen"] or ()),
        **means,
        "shrinkage": _mean(row["shrinkage"] for row in again),
        "shrinkage_n": len(again),
        **{name: NAN if value is None else value for name, value in _of_rank(rank.record()).items()},
        "one_scale": one_scale,
    }


def _of_rank(record: Mapping[str, Any]) -> dict[str, float | None]:
    return {"rho": record["rho"], "rho_low": record["low"], "rho_high": record["high"]}
