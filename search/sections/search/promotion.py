"""Promotion in a search: what each rung of a plan trains, and which candidates go on.

A rung has seeds of its own, so that no candidate is judged again by the luck that it was chosen for. Who goes on is
decided once all trials of a rung have ended, from these alone; the decision is stored, and replayed ever after.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from archlab.arch_dsl.language.errors import SpecError
from archlab.search.formatting.numbers import count
from archlab.search.results.selection import loss
from archlab.search.sections.search.promotion_spec import Promotion, scales_of
from archlab.search.sections.seeds.spec import MAX_SEEDS
from archlab.search.store.roles import ROLE
from archlab.search.store.store import TERMINAL, Row
from archlab.search.utils.canonical import canonical_json
from archlab.search.variants.asked import Rung
from archlab.search.variants.asks import Builds, Planned
from archlab.search.variants.section import Made, Part
from archlab.search.variants.variant import Variant

DECISION = "promotion"  # how the names of a study's decisions about its rungs begin
_NAMED = 12  # trials that a sentence lists

Decide = Callable[[str, Callable[[], list[int]]], list[int]]  # a name, and what computes it the first time
Rank = Callable[[Mapping[int, float]], list[int]]  # numbers with losses, the best first


@dataclass(frozen=True)
class RungPlan:
    """A rung as it is trained; `number` counts from 1. Candidates are matched to the `target`, if there is one."""

    number: int
    scale: Rung
    keep: int
    seeds: tuple[int, ...]
    baseline: Variant
    target: Variant | None

    def named(self, variant: Variant) -> Variant:
        """A variant under its name at this rung, under which it has rows."""
        return replace(variant, name=f"{variant.name} (rung {self.number})")

    def rows(self, variant: Variant) -> list[Row]:
        """The trials of a variant at this rung, in the role of trials that stand in no table."""
        return [Row(variant.trial(seed), variant.name, ROLE, {"lr": variant.recipe.lr}, seed) for seed in self.seeds]

    def record(self) -> dict[str, Any]:
        """What the study's record keeps of it, before anything has reached it."""
        own, recipe = self.baseline, self.baseline.recipe
        said = {"rung": self.number, "tokens": recipe.all_tokens, "parameters": own.parameters, "keep": self.keep}
        return {**said, "seeds": [*self.seeds], "baseline": own.name, "entered": {}, "chosen": None}


class Promoting(Part):
    """The rungs of a plan."""

    def __init__(self, rungs: Sequence[RungPlan]) -> None:
        self.rungs = rungs


def rung_seeds(number: int, seeds: int) -> tuple[int, ...]:
    """The seeds of a rung: 1000, 1001, … of the first one, 2000, 2001, … of the second. Tables have those below."""
    return tuple(range(number * MAX_SEEDS, number * MAX_SEEDS + seeds))


def promoting(promote: Sequence[Promotion], builds: Builds, made: Made) -> Promoting:
    """The rungs with their baselines. Raises SpecError where one of these makes no sense."""
    study, found = builds.study, []
    for number, (each, scale) in enumerate(zip(promote, scales_of(promote), strict=True), 1):

        def at_rung(name: str, target: Variant | None, scale: Rung = scale, number: int = number) -> Variant:
            asked, _ = made[name]
            return builds.variant(replace(asked, name=f"{name} (rung {number})", rung=scale), target)

        try:
            target = at_rung(study.match.to, None) if study.match else None
            baseline = at_rung(study.report.baseline, target)
        except SpecError as error:
            told = f"at rung {number} of `promote`"
            mark = each.mark()
            problems = (replace(p, message=f"{p.message}, {told}", mark=p.mark or mark) for p in error.problems)
            raise SpecError(problems) from error
        found.append(RungPlan(number, scale, each.keep, rung_seeds(number, each.seeds), baseline, target))
    return Promoting(found)


def promoting_of(planned: Planned) -> Promoting | None:
    """The rungs of a plan; None where it promotes nothing."""
    return next((part for part in planned.parts if isinstance(part, Promoting)), None)


@dataclass(frozen=True)
class Standing:
    """How far a rung has come: who entered it, and who goes on, best first; None while trials are missing."""

    rung: RungPlan
    entered: Mapping[int, str]  # the names of their rows, by the number of the proposal
    chosen: tuple[int, ...] | None

    def record(self) -> dict[str, Any]:
        """What the study's record keeps of it."""
        entered = {str(number): name for number, name in self.entered.items()}
        chosen = None if self.chosen is None else [*self.chosen]
        return {**self.rung.record(), "entered": entered, "chosen": chosen}

    def __str__(self) -> str:
        which = ", ".join(map(str, (self.chosen or ())[:_NAMED]))
        more = f" and {len(self.chosen or ()) - _NAMED} more" if len(self.chosen or ()) > _NAMED else ""
        told = f"trials {which}{more}" if which else "none has a loss"
        return f"promotion: {len(self.chosen or ())} of {len(self.entered)} go on from rung {self.rung.number} ({told})"


def climb(
    rungs: Sequence[RungPlan],
    candidates: Mapping[int, Sequence[Variant]] | None,
    trials: Iterable[Mapping[str, Any]],
    decide: Decide,
    rank: Rank,
) -> tuple[list[Row], list[Standing]]:
    """The trials that the rungs want by now beside the search's own, and how far those rungs have come that began.

    `candidates` has the proposals that the search completed, by number, as each rung trains them; None while it goes
    on. `trials` are the study's rows. Equal proposals count once. `rank` says who is best at the first rung.
    """
    first, done = rungs[0], {row["key"]: row for row in trials}
    rows, found = first.rows(first.baseline), list[Standing]()
    if candidates is None:
        return rows, found
    distinct: dict[str, int] = {}
    for number, variants in sorted(candidates.items()):
        distinct.setdefault(variants[0].trial(first.seeds[0]).key, number)
    left = [*distinct.values()]
    for place, rung in enumerate(rungs):
        named = {number: candidates[number][place] for number in left}
        if rung is not first:
            named = {number: rung.named(variant) for number, variant in named.items()}
        each, beside = {number: rung.rows(variant) for number, variant in named.items()}, rung.rows(rung.baseline)
        if rung is not first:
            rows += [*beside, *(row for mine in each.values() for row in mine)]
        entered = {number: variant.name for number, variant in named.items()}
        if not all(_ended(done, row) for mine in (beside, *each.values()) for row in mine):
            return rows, [*found, Standing(rung, entered, None)]
        keys = [[number, *(row.trial.key for row in mine)] for number, mine in each.items()]
        digest = hashlib.sha256(canonical_json([rung.keep, keys]).encode()).hexdigest()[:16]
        ranks = rank if rung is first else by_loss
        left = decide(f"{DECISION} {rung.number} {digest}", partial(_best, done, each, rung.keep, ranks))
        found.append(Standing(rung, entered, tuple(left)))
        if not left:
            break
    return rows, found


def _ended(done: Mapping[str, Mapping[str, Any]], row: Row) -> bool:
    return row.trial.key in done and done[row.trial.key]["state"] in TERMINAL


def _best(done: Mapping[str, Mapping[str, Any]], each: Mapping[int, list[Row]], keep: int, rank: Rank) -> list[int]:
    """The best numbers by their mean validation loss; what has a seed without one goes no further."""
    means = {
        number: _mean(loss(dict(done[row.trial.key]), "validation") for row in mine) for number, mine in each.items()
    }
    return rank({number: mean for number, mean in means.items() if math.isfinite(mean)})[:keep]


def by_loss(losses: Mapping[int, float]) -> list[int]:
    """The numbers, the lowest loss first."""
    return sorted(losses, key=lambda number: (losses[number], number))


def _mean(losses: Iterable[float | None]) -> float:
    found = [*losses]
    known = [each for each in found if each is not None]
    return fmean(known) if len(known) == len(found) else math.inf


def trials_of_rungs(promote: Sequence[Promotion], trials: int) -> list[int]:
    """How many trials each rung takes at most, those of the baseline among them."""
    reach = [trials, *(each.keep for each in promote[:-1])]
    return [(many + 1) * each.seeds for many, each in zip(reach, promote, strict=True)]


def flops_of(variant: Variant) -> float:
    """FLOPs that training a variant takes, forward and backward."""
    return float(variant.figures["training_flops_per_token"] * variant.recipe.all_tokens)


def rung_lines(part: Promoting, takes: Sequence[int], found: int, planned: Planned) -> Iterator[str]:
    """What the rungs train and what that costs, as their baseline takes it; `takes` are the trials of each."""
    yield "promotion, rung by rung, each on seeds of its own (FLOPs: as the baseline takes them):"
    total, tokens, flops = 0, 0, 0.0
    for rung, many in zip(part.rungs, takes, strict=True):
        own, reach = rung.baseline, many // len(rung.seeds) - 1
        who = f"{reach} {'proposals' if rung is part.rungs[0] else 'candidates'} and the baseline"
        seeds = f"seed {rung.seeds[0]}" if len(rung.seeds) == 1 else f"seeds {rung.seeds[0]} to {rung.seeds[-1]}"
        scale = f"{count(own.recipe.all_tokens)} tokens, {own.parameters:,} parameters"
        cost = many * own.recipe.all_tokens, many * flops_of(own)
        took = f"{many} trials, {count(cost[0])} tokens, {count(cost[1])} FLOPs"
        yield f"  rung {rung.number}: {who}, {seeds}, {scale}: {took}; the best {rung.keep} go on"
        total, tokens, flops = total + many, tokens + cost[0], flops + cost[1]
    last, seeds_of = part.rungs[-1].baseline, planned.seeds
    variants = len(planned.variants)
    named = "found" if found == 1 else f"up to {found} found"
    seeds = f"seed {seeds_of[0]}" if len(seeds_of) == 1 else f"seeds {seeds_of[0]} to {seeds_of[-1]}"
    many = (variants + found) * len(seeds_of)
    yield f"  table: {named} and {variants} variant{'s' * (variants > 1)}, {seeds}, as the last rung: {many} trials"
    total, tokens, flops = total + many, tokens + many * last.recipe.all_tokens, flops + many * flops_of(last)
    yield f"  together at most {total} trials, {count(tokens)} tokens, {count(flops)} FLOPs"
