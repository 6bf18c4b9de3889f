"""Which trials stand in the table: each variant's best learning rate, chosen on validation, and its seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from search.store import TERMINAL


@dataclass(frozen=True)
class Selection:
    """One variant's trials and the choice among them.

    `trials` has each trial once (a tune trial at the best rate is also the first seed's repeat, under "tune+repeat").
    `settings` is the choice, None while nothing is chosen; `reported` maps seeds to the trials at these settings.
    """

    variant: str
    trials: tuple[dict[str, Any], ...]
    tuned: tuple[dict[str, Any], ...]
    settings: dict[str, Any] | None
    reported: dict[int, dict[str, Any]]
    missing_seeds: tuple[int, ...]
    missing_rates: tuple[float, ...]

    def count(self, state: str) -> int:
        """How many of the variant's trials are in `state`."""
        return sum(t["state"] == state for t in self.trials)

    @property
    def complete(self) -> dict[int, dict[str, Any]]:
        """The reported trials that have a test loss, by seed."""
        return {s: t for s, t in self.reported.items() if t["state"] == "complete" and loss(t, "test") is not None}

    @property
    def diverged(self) -> bool:
        """A reported seed diverged, or every tried rate did: the variant has no mean."""
        if any(t["state"] == "diverged" for t in self.reported.values()):
            return True
        return self.settings is None and bool(self.tuned) and all(t["state"] == "diverged" for t in self.tuned)


def select(record: dict[str, Any], trials: list[dict[str, Any]]) -> list[Selection]:
    """The choice for each variant of a study, in its order: the lowest validation loss wins, a diverged one never."""
    grouped = group(trials)
    return [choose(record, v["name"], grouped.get(v["name"], [])) for v in record["variants"]]


def with_baselines(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a baseline for the study and for each variant: its own one, else the study's, else the first."""
    study = record.get("baseline") or record["variants"][0]["name"]
    variants = [{**variant, "baseline": variant.get("baseline") or study} for variant in record["variants"]]
    return {**record, "baseline": study, "variants": variants}


def baselines_of(record: dict[str, Any]) -> list[str]:
    """The names of all baselines of a record that went through `with_baselines`, the study's first."""
    return list(dict.fromkeys([record["baseline"], *(variant["baseline"] for variant in record["variants"])]))


def group(trials: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Trials by variant."""
    found: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        found.setdefault(trial["variant"], []).append(trial)
    return found


def choose(record: dict[str, Any], variant: str, mine: list[dict[str, Any]]) -> Selection:
    """The choice for one variant from its own trials."""
    tuned = [t for t in mine if t["role"] in ("tune", "search")]
    repeats = [t for t in mine if t["role"] == "repeat"]
    rates = record.get("tune", {}).get("lr", [])
    settings: dict[str, Any] | None
    if tuned or rates:
        stable = [(v, rate(t) or 0.0, i) for i, t in enumerate(tuned) if (v := loss(t, "validation")) is not None]
        settings = tuned[min(stable)[2]]["settings"] if stable else None
        reported = {t["seed"]: t for t in [*tuned, *repeats] if t["settings"] == settings}
    else:
        settings = repeats[0]["settings"] if repeats else None
        reported = {t["seed"]: t for t in repeats}
    wanted_rates = {float(r) for r in rates} | {r for t in tuned if t["role"] == "tune" and (r := rate(t)) is not None}
    done_rates = {rate(t) for t in tuned if t["state"] in TERMINAL}
    searched = any(t["role"] == "search" for t in tuned)
    hopeless = settings is None and bool(tuned) and all(t["state"] in TERMINAL for t in tuned)
    wanted_seeds = list(reported) if searched or hopeless else record["seeds"]
    return Selection(
        variant=variant,
        trials=tuple(_once(mine)),
        tuned=tuple(tuned),
        settings=settings,
        reported=reported,
        missing_seeds=tuple(s for s in wanted_seeds if reported.get(s, {}).get("state") not in TERMINAL),
        missing_rates=tuple(sorted(wanted_rates - done_rates)),
    )


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
    """Whether the best rate lies at the edge of the grid, and the sentence about it.

    At the edge nothing that finished lies beyond. Where the next rate up diverged, the optimum is enclosed: that is no
    edge, and the sentence says so.
    """
    tuned = [t for t in selection.tuned if t["role"] == "tune" and t["state"] in ("complete", "diverged", "pruned")]
    points = sorted({(r, t["state"] == "diverged") for t in tuned if (r := rate(t)) is not None})
    best = None if selection.settings is None else selection.settings.get("lr")
    if best is None or len(points) < 2:
        return False, None
    below = [r for r, _ in points if r < best]
    above = [(r, diverged) for r, diverged in points if r > best]
    if not above:
        return True, f"the best rate {best:g} is the largest that was tried: a larger one may be better"
    if not below:
        return True, f"the best rate {best:g} is the smallest that was tried: a smaller one may be better"
    if above[0][1]:
        return False, f"the best rate {best:g} is the largest stable one: {above[0][0]:g} diverged"
    return False, None


def _once(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each key once, in the first one's place, with all of its roles."""
    found: dict[str, dict[str, Any]] = {}
    for trial in trials:
        first = found.setdefault(trial["key"], trial)
        if first is not trial and trial["role"] not in first["role"].split("+"):
            found[trial["key"]] = {**first, "role": f"{first['role']}+{trial['role']}"}
    return list(found.values())
