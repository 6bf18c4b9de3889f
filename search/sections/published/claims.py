"""What our data say of the claims of a paper: holds, reversed, undecided, or why nothing can be said.

A claim is a set of ordered pairs of variants. It holds if the interval of every pair excludes zero in the claimed
direction: where at least one pair is not as claimed, all of them are found to be with at most the chance of that one
(intersection-union test, R. L. Berger, 1982), so that no correction for the pairs is needed. It is reversed if the
interval of some pair excludes zero in the other direction, which is one of several chances and is corrected for them
(Bonferroni). The claims of a study on one number share the error of 5%. A claim that rows are equal holds if every
interval lies within its margin, and is reversed if one lies outside.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from archlab.search.results.measured import PERPLEXITY
from archlab.search.results.pairs import Differences
from archlab.search.results.selection import Selection

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd

HOLDS, REVERSED, UNDECIDED = "holds", "reversed", "undecided"
NOT_TESTABLE, NOT_COVERED = "not testable at this scale", "not covered"
FEWEST = 2
"""Seeds at which a variant must have diverged, none having finished, to be called higher than one that finished."""
_COLUMNS = ("claim", "where", "group", "on", "verdict", "reason", "n", "comparisons", "margin", "pairs")

Row = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """The first variant less the second, over `n` pairs of seeds, with the ends of its interval (None: there is none).

    `diverged` is the one of the two that diverged at all of its seeds where the other finished.
    """

    lower: str
    than: str
    n: int
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    diverged: str = ""


@dataclass(frozen=True)
class Judged:
    """What the data say of one pair: whether it is as claimed, whether it is the other way."""

    pair: Pair
    holds: bool = False
    reversed: bool = False

    def decides(self, verdict: str) -> bool:
        """Whether the verdict on the claim rests on this pair."""
        return verdict == HOLDS or (self.reversed if verdict == REVERSED else not self.holds)


def claims_frame(record: Row, differences: Differences) -> pd.DataFrame:
    """A row per claim of the published table and group of variants, with its `pairs`, `n` pairs of seeds at least.

    `comparisons` is how many claims share the error; `reason` says why one was not tested. Empty without a table.
    """
    import pandas as pd

    asked = record.get("published") or {}
    variants: dict[str, Row] = asked.get("variants", {})
    groups: dict[str, dict[str, str]] = {}
    for name, mapped in variants.items():
        groups.setdefault(mapped["group"], {}).update(dict.fromkeys(mapped["rows"], name))
    covered = [
        claim["on"] for rows in groups.values() for claim in asked.get("claims", ()) if not _missing(claim, rows)
    ]
    found = [
        {
            **{key: claim[key] for key in ("claim", "where", "on", "margin")},
            "group": group,
            "comparisons": covered.count(claim["on"]),
            **_judge(claim, rows, differences, max(covered.count(claim["on"]), 1)),
        }
        for group, rows in groups.items()
        for claim in asked.get("claims", ())
    ]
    return pd.DataFrame(found, columns=[*_COLUMNS])


def _missing(claim: Row, rows: dict[str, str]) -> list[str]:
    """The rows of a claim that the study has no variant of."""
    condition = claim["testable"]
    named = [row for pair in claim["pairs"] for row in pair] + ([condition["of"]] if condition else [])
    return [row for row in dict.fromkeys(named) if row not in rows]


def _judge(claim: Row, rows: dict[str, str], differences: Differences, comparisons: int) -> Row:
    """verdict, reason, n, pairs."""
    nothing: Row = {"n": 0, "pairs": []}
    if missing := _missing(claim, rows):
        return {"verdict": NOT_COVERED, "reason": f"no variant is {', '.join(missing)}", **nothing}
    pairs = [(rows[one], rows[other]) for one, other in claim["pairs"]]
    if why := _unknown(claim["on"], pairs, differences):
        return {"verdict": NOT_COVERED, "reason": why, **nothing}
    if claim["margin"] and claim["on"] == PERPLEXITY and differences.layout.unit != "nats/token":
        reason = f"its margin is in nats/token, and losses here are in {differences.layout.unit}"
        return {"verdict": NOT_COVERED, "reason": reason, **nothing}
    if claim["testable"]:
        verdict, why = _condition(claim["testable"], rows, differences)
        if verdict:
            return {"verdict": verdict, "reason": why, **nothing}
    seen = [_pair(claim, one, other, differences, comparisons, len(pairs)) for one, other in pairs]
    verdict = HOLDS if all(each.holds for each in seen) else UNDECIDED
    verdict = REVERSED if any(each.reversed for each in seen) else verdict
    told = [asdict(each.pair) | {"decides": each.decides(verdict)} for each in seen]
    return {"verdict": verdict, "reason": "", "n": min(each.pair.n for each in seen), "pairs": told}


def _unknown(on: str, pairs: list[tuple[str, str]], differences: Differences) -> str:
    """Why the pairs of a claim cannot be compared at all, or nothing."""
    for one, other in pairs:
        for name in (one, other):
            if name not in differences.rows:
                return f"{name} {differences.absent}"
        if not differences.compare(one, other):
            return f"{one} and {other} have other objectives, tokenizers or test texts"
        for name in (one, other):
            finished = bool(differences.selections[name].complete)
            if on != PERPLEXITY and finished and not differences.has(on, name):
                return f"{on} of {name} was not measured"
    return ""


def _condition(condition: Row, rows: dict[str, str], differences: Differences) -> tuple[str, str]:
    """The verdict and the reason where what a claim needs is not so, else nothing."""
    name = rows[condition["of"]]
    values = {key: differences.mean(condition[key], name) for key in ("number", "times") if condition[key]}
    for key, value in values.items():
        if math.isnan(value):
            return NOT_COVERED, f"it needs {condition[key]} of {name}, which was not measured"
    bound = condition["at_least"] * values.get("times", 1.0)
    if values["number"] >= bound:
        return "", ""
    times = f" times {condition['times']}" if condition["times"] else ""
    said = f"{condition['number']} of {name} is {values['number']:.3g}, below {condition['at_least']:g}{times}"
    return NOT_TESTABLE, f"{said} ({bound:.3g})" if times else said


def _pair(claim: Row, one: str, other: str, differences: Differences, comparisons: int, pairs: int) -> Judged:
    """What the data say of one pair, at the level of its claim and, for a reversal, at that level over its pairs."""
    sides = [differences.selections[name] for name in (one, other)]
    if claim["on"] == PERPLEXITY and (gone := _gone(*sides)):
        n = min(max(len(each.reported), len(each.tuned)) for each in sides)
        pair = Pair(one, other, n, diverged=gone)
        return Judged(pair, gone == other and not claim["margin"], gone == one or bool(claim["margin"]))
    found = differences.of(claim["on"], one, other, comparisons)
    if found is None:
        return Judged(Pair(one, other, 0))
    if found.half_width is None:
        return Judged(Pair(one, other, found.pairs, found.difference))
    middle, half = found.difference, found.half_width
    pair = Pair(one, other, found.pairs, middle, middle - half, middle + half)
    wider = differences.of(claim["on"], one, other, comparisons * pairs)
    reach = math.inf if wider is None or wider.half_width is None else wider.half_width
    if claim["margin"]:
        return Judged(pair, abs(middle) + half < claim["margin"], abs(middle) - reach > claim["margin"])
    return Judged(pair, middle + half < 0, middle - reach > 0)


def diverged_everywhere(selection: Selection) -> bool:
    """Whether a variant diverged at every seed (or every value that was tuned), at two of them or more."""
    return len(selection.reported or selection.tuned) >= FEWEST and selection.all_diverged


def _gone(one: Selection, other: Selection) -> str:
    """The one of two that diverged everywhere, the other having finished every seed, at two of them or more."""
    for lost, kept in ((one, other), (other, one)):
        finished = len(kept.complete) >= FEWEST and len(kept.complete) == len(kept.reported)
        if diverged_everywhere(lost) and finished:
            return lost.variant
    return ""
