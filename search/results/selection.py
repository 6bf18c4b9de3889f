"""Which trials stand in the table: each variant's best learning rate, chosen on validation, and its seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from archlab.search.formatting.words import is_number
from archlab.search.store.store import TERMINAL
from archlab.search.utils.canonical import canonical_json

TUNE_OPTIONS = ("extend", "brackets")  # the keys of `tune` that are no paths


@dataclass(frozen=True)
class Selection:
    """One variant's trials and the choice among them.

    `trials` has each trial once (a tune trial at the best rate is also the first seed's repeat, under "tune+repeat").
    `settings` is the choice, None while nothing is chosen; `reported` maps seeds to the trials at these settings.
    The trials that a section trains for itself are none of the variant's, which may be `left_out` because of them.
    """

    variant: str
    trials: tuple[dict[str, Any], ...]
    tuned: tuple[dict[str, Any], ...]
    settings: dict[str, Any] | None
    reported: dict[int, dict[str, Any]]
    missing_seeds: tuple[int, ...]
    missing_points: tuple[dict[str, Any], ...] = ()  # settings that were to be tried, or tried for longer
    left_out: bool = False

    def count(self, state: str) -> int:
        """How many of the variant's trials are in `state`."""
        return sum(t["state"] == state for t in self.trials)

    @cached_property
    def complete(self) -> dict[int, dict[str, Any]]:
        """The reported trials that have a test loss, by seed."""
        return {s: t for s, t in self.reported.items() if t["state"] == "complete" and loss(t, "test") is not None}

    @property
    def diverged(self) -> bool:
        """A reported seed diverged, or every tried rate did or waits where it has no loss: the variant has no mean."""
        if any(t["state"] == "diverged" for t in self.reported.values()):
            return True
        lost = all(t["state"] == "diverged" or is_lost(t) for t in self.tuned)
        return self.settings is None and bool(self.tuned) and lost

    @property
    def all_diverged(self) -> bool:
        """Every reported seed diverged, or without one every value that was tuned."""
        return {t["state"] for t in (self.reported.values() or self.tuned)} == {"diverged"}

    @property
    def pruned(self) -> bool:
        """A reported seed was pruned: the mean of the others would be that of the lucky ones."""
        return any(t["state"] == "pruned" for t in self.reported.values())

    @property
    def settled(self) -> bool:
        """Whether the tuning is over: nothing is missing, and a value is chosen or none can be any more."""
        lost = all(is_lost(t) or t["state"] in TERMINAL for t in self.tuned)
        return not self.missing_points and (self.settings is not None or lost)

    def gone(self) -> Selection:
        """The same of a variant that is left out: nothing of it is missing."""
        return replace(self, missing_seeds=(), missing_points=(), left_out=True)

    @property
    def has_no_mean(self) -> bool:
        """Whether some of its seeds have no loss and never will."""
        return self.diverged or self.pruned


def with_tuned_size(variant: dict[str, Any], selection: Selection) -> dict[str, Any]:
    """A variant of a record with what it costs at the settings that it chose, where these change its size."""
    chosen = (selection.settings or {}).items()
    for sizes in variant.get("tuned", ()):
        if sizes["settings"].items() <= chosen:
            return {**variant, **{name: value for name, value in sizes.items() if name != "settings"}}
    return variant


def with_baselines(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a baseline for the study and for each variant: its own one, else the study's, else the first."""
    study = record.get("baseline") or record["variants"][0]["name"]
    variants = [{**variant, "baseline": variant.get("baseline") or study} for variant in record["variants"]]
    return {**record, "baseline": study, "variants": variants}


def baselines_of(record: dict[str, Any]) -> list[str]:
    """The names of all baselines of a record that went through `with_baselines`, the study's first."""
    return list(dict.fromkeys([record["baseline"], *(variant["baseline"] for variant in record["variants"])]))


def varied_in(record: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Of each variant, for every path that some variant changes in the base, the text of what stands there in it.

    What was solved to match a size follows from the rest and is left out.
    """
    changes = {
        variant["name"]: {
            path: (str(before), str(after))
            for path, before, after in variant.get("changes") or ()
            if path not in (variant.get("matched") or {})
        }
        for variant in record["variants"]
    }
    base = {path: before for mine in changes.values() for path, (before, _) in mine.items()}
    return {
        name: {path: mine[path][1] if path in mine else before for path, before in base.items()}
        for name, mine in changes.items()
    }


def tuned_paths(record: dict[str, Any]) -> dict[str, list[Any]]:
    """Path to values of a study's record, `lr` for train.lr; older versions' hold that alone."""
    return {name: values for name, values in (record.get("tune") or {}).items() if name not in TUNE_OPTIONS}


def saved_by_brackets(points: int, rungs: Iterable[float], keep: float) -> float:
    """How many whole trials brackets save of so many values; less where neighbours go on after all."""
    standing, saved = points, 0.0
    for rung in rungs:
        going = math.ceil(keep * standing)
        saved, standing = saved + (standing - going) * (1 - rung), going
    return saved


def group(trials: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Trials by variant."""
    found: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        found.setdefault(trial["variant"], []).append(trial)
    return found


def choose(record: dict[str, Any], variant: str, mine: list[dict[str, Any]]) -> Selection:
    """The choice for one variant from its own trials."""
    mine = [t for t in mine if t["role"] != "screen"]
    first = min((t["seed"] for t in mine if t["role"] == "tune"), default=None)
    again = [t for t in mine if t["role"] == "tune" and t["seed"] != first]  # of values that one seed can't tell apart
    tuned = [t for t in mine if t["role"] == "search" or (t["role"] == "tune" and t["seed"] == first)]
    repeats = [t for t in mine if t["role"] == "repeat"]
    axes = tuned_paths(record)
    settings: dict[str, Any] | None
    if tuned or axes:
        ends = [(loss(t, "validation"), rate(t) or 0.0, i) for i, t in enumerate(tuned) if t.get("until") is None]
        stable = [(value, lr, i) for value, lr, i in ends if value is not None]
        settings = tuned[min(_over_seeds(stable, tuned, again))[2]]["settings"] if stable else None
        reported = {t["seed"]: t for t in [*tuned, *again, *repeats] if t["settings"] == settings}
    else:
        settings = repeats[0]["settings"] if repeats else None
        reported = {t["seed"]: t for t in repeats}
    searched = any(t["role"] == "search" for t in tuned)
    hopeless = settings is None and bool(tuned) and all(is_lost(t) or t["state"] in TERMINAL for t in tuned)
    given_up = any(t["state"] == "pruned" for t in repeats)
    wanted_seeds = list(reported) if searched or hopeless or given_up else record["seeds"]
    return Selection(
        variant=variant,
        trials=tuple(_once(mine)),
        tuned=tuple(tuned),
        settings=settings,
        reported=reported,
        missing_seeds=tuple(s for s in wanted_seeds if reported.get(s, {}).get("state") not in TERMINAL),
        missing_points=tuple(_missing(axes, [t for t in [*tuned, *again] if t["role"] == "tune"])),
    )


def _over_seeds(
    stable: list[tuple[float, float, int]], tuned: list[dict[str, Any]], again: list[dict[str, Any]]
) -> list[tuple[float, float, int]]:
    """The mean losses of the values that ended with the most seeds: those that were held against each other again."""
    losses = {place: [value] for value, _, place in stable}
    for trial in again:
        value = loss(trial, "validation")
        for place in losses:
            if value is not None and tuned[place]["settings"] == trial["settings"]:
                losses[place].append(value)
    most = max(map(len, losses.values()))
    return [(sum(losses[i]) / most, lr, i) for _, lr, i in stable if len(losses[i]) == most]


def _missing(axes: dict[str, list[Any]], tuned: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The settings that were not tried as far as is wanted, those without a trial first."""
    known = {canonical_json({name: t["settings"].get(name) for name in axes}) for t in tuned}
    for values in itertools.product(*axes.values()) if axes else ():
        point = dict(zip(axes, values, strict=True))
        if canonical_json(point) not in known:
            yield point
    for trial in tuned:
        if not is_over(trial):
            yield {name: value for name, value in trial["settings"].items() if name in axes or not axes}


def is_over(trial: dict[str, Any]) -> bool:
    """Whether a trial has come as far as it is wanted: to its end, or to the step where it pauses."""
    if trial["state"] != "paused":
        return trial["state"] in TERMINAL
    until = trial.get("until")
    return until is not None and bool(trial["result"]["step"] >= until)


def is_lost(trial: dict[str, Any]) -> bool:
    """Whether a trial waits where its loss is not finite: from there none goes on."""
    if trial["state"] != "paused" or not is_over(trial):
        return False
    value = trial["result"]["validation"]["loss"]
    return value is None or not math.isfinite(value)


def rate(trial: dict[str, Any]) -> float | None:
    """The learning rate in a trial's settings; None where the study sets none."""
    value = trial["settings"].get("lr")
    return None if value is None else float(value)


def loss(trial: dict[str, Any], split: str) -> float | None:
    """A complete trial's "validation" or "test" loss in nats/token; None for any other trial, or no finite number."""
    measures = (trial["result"] or {}).get(split) if trial["state"] == "complete" else None
    value = (measures or {}).get("loss")
    return float(value) if value is not None and math.isfinite(value) else None


def edge(selection: Selection) -> tuple[bool, str | None]:
    """Whether the best of a tuned number lies at the edge of those tried, and the sentence about it.

    At the edge nothing that finished, or ended early because it was behind, lies beyond. Where the next value up
    diverged, the optimum is enclosed: that is no edge, and the sentence says so.
    """
    if selection.settings is None:
        return False, None
    found = [_edge(selection, name) for name in selection.settings]
    return any(at_edge for at_edge, _ in found), "; ".join(text for _, text in found if text) or None


def _edge(selection: Selection, name: str) -> tuple[bool, str | None]:
    """What `edge` says of one setting: among the trials that have all others as they were chosen."""
    chosen = selection.settings or {}
    best, what = chosen[name], "rate" if name == "lr" else name
    line = [
        t
        for t in selection.tuned
        if t["role"] == "tune"
        and t["state"] in ("complete", "diverged", "pruned", "paused")
        and all(t["settings"].get(other) == value for other, value in chosen.items() if other != name)
        and is_number(t["settings"].get(name))
    ]
    states = {t["settings"][name]: t["state"] == "diverged" for t in line}
    if len(states) < 2 or not is_number(best):
        return False, None
    above = sorted(value for value in states if value > best)
    if not above:
        return True, f"the best {what} {best:g} is the largest that was tried: a larger one may be better"
    if not any(value < best for value in states):
        return True, f"the best {what} {best:g} is the smallest that was tried: a smaller one may be better"
    if states[above[0]]:
        return False, f"the best {what} {best:g} is the largest stable one: {above[0]:g} diverged"
    return False, None


def _once(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each key once, in the first one's place, with all of its roles."""
    found: dict[str, dict[str, Any]] = {}
    for trial in trials:
        first = found.setdefault(trial["key"], trial)
        if first is not trial and trial["role"] not in first["role"].split("+"):
            found[trial["key"]] = {**first, "role": f"{first['role']}+{trial['role']}"}
    return list(found.values())
