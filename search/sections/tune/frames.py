"""The curves over what was tuned, and what those over the learning rate say: optimum, stability, sensitivity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.formatting.frames import NAN
from archlab.search.formatting.words import is_number, spelled
from archlab.search.results.selection import Selection, loss, rate

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd

FITTED = 2  # neighbours on each side of the best that a parabola is fitted through


@dataclass(frozen=True)
class Curve:
    """The final validation loss at each rate, ascending: infinite where the trial diverged, NaN where it ended early.

    All other tuned settings are those that were chosen.
    """

    best: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]

    def at(self, rate: float) -> float:
        """The loss at a rate; NaN where there is none."""
        return self.losses[self.rates.index(rate)] if rate in self.rates else NAN


def curve_of(selection: Selection) -> Curve | None:
    """The curve of a variant that has chosen a rate among several."""
    chosen = selection.settings or {}
    line: dict[float, float] = {}
    for trial in selection.tuned:
        settings = trial["settings"]
        if trial["role"] == "tune" and is_number(settings.get("lr")) and _others(trial).items() <= chosen.items():
            value = loss(trial, "validation") if trial.get("until") is None else None
            line[settings["lr"]] = math.inf if trial["state"] == "diverged" else NAN if value is None else value
    if len(line) < 2 or not is_number(chosen.get("lr")):
        return None
    rates = sorted(line)
    return Curve(float(chosen["lr"]), tuple(rates), tuple(line[rate] for rate in rates))


def fit(curve: Curve) -> tuple[float, float, float] | None:
    """(rate, loss, curvature) at the lowest point of the least-squares parabola in ln(rate).

    It goes through the best rate and up to two more on each side that came to their end. None where one side has none,
    where the parabola has no lowest point, or where that is not between the rates used.
    """
    low, high = _around_best(curve, [math.isfinite(value) for value in curve.losses], FITTED)
    if curve.best in (curve.rates[low], curve.rates[high]):
        return None
    x = np.log(curve.rates[low : high + 1])
    a, b, c = np.polyfit(x - x.mean(), curve.losses[low : high + 1], 2)
    if a <= 0 or not x[0] <= (where := x.mean() - b / (2 * a)) <= x[-1]:
        return None
    return float(np.exp(where)), float(c - b * b / (4 * a)), float(2 * a)


def stable(curve: Curve) -> tuple[float, float]:
    """The largest rate that came to its end below any that diverged, and the smallest that did; NaN where none is."""
    diverged = min((r for r, value in zip(curve.rates, curve.losses, strict=True) if value == math.inf), default=NAN)
    ended = [r for r, value in zip(curve.rates, curve.losses, strict=True) if math.isfinite(value)]
    return max((r for r in ended if not r >= diverged), default=NAN), diverged


def sensitivity(curve: Curve, start: float) -> tuple[float, float, float]:
    """(sensitivity, from, to): E[min(loss, start) - lowest] over rates evenly spread in their logarithm.

    LR sensitivity (M. Wortsman et al., arXiv:2309.14322, section 2.2), by the trapezoidal rule over the rates around
    the best that came to their end or diverged; `start` is the loss of an untrained model. NaN for fewer than three.
    """
    low, high = _around_best(curve, [not math.isnan(value) for value in curve.losses], len(curve.losses))
    if high - low < 2:
        return NAN, NAN, NAN
    x = np.log(curve.rates[low : high + 1])
    y = np.minimum(curve.losses[low : high + 1], start)
    mean = float((np.diff(x) * (y[1:] + y[:-1]) / 2).sum() / (x[-1] - x[0]))
    return mean - float(y.min()), curve.rates[low], curve.rates[high]


def _around_best(curve: Curve, known: list[bool], most: int) -> tuple[int, int]:
    """The first and the last of the places around the best rate that are known, at most so many on each side."""
    low = high = place = curve.rates.index(curve.best)
    while low > max(place - most, 0) and known[low - 1]:
        low -= 1
    while high < min(place + most, len(known) - 1) and known[high + 1]:
        high += 1
    return low, high


def verdict(ours: Curve, base: Curve, noise: float) -> str:
    """What a variant's difference to its baseline owes to the rate, from the validation losses of one seed.

    With both at their own best rate it differs by D, at a rate that both tried to the end by d. `noise` is the largest
    |D| that says nothing. Better (D < -noise): "robust" if d < 0 at every common rate, else "LR-dependent". Worse (D >
    noise): "inverted" if d < -noise at some common rate, where a comparison at that rate alone would have said the
    opposite, else "worse". Otherwise "within noise"; "" for fewer than two common rates.
    """
    common = [rate for rate in ours.rates if not (math.isnan(ours.at(rate)) or math.isnan(base.at(rate)))]
    both = [(ours.at(rate), base.at(rate)) for rate in common]
    differences = [mine - theirs for mine, theirs in both if math.isfinite(mine) or math.isfinite(theirs)]
    if len(differences) < 2:
        return ""
    tuned = ours.at(ours.best) - base.at(base.best)
    if tuned < -noise:
        return "robust" if all(difference < 0 for difference in differences) else "LR-dependent"
    if tuned > noise:
        return "inverted" if any(difference < -noise for difference in differences) else "worse"
    return "within noise"


def tuning_frame(
    record: dict[str, Any], selections: Sequence[Selection], seed_sd: float | None, comparable: set[str]
) -> pd.DataFrame:
    """A row per variant that tuned its learning rate; verdicts for the variants in `comparable`.

    A difference within the 95% interval of one pair of seeds, 1.96 sqrt(2) seed_sd, is noise; where that is not known
    there are no verdicts. Needs a record with baselines.
    """
    import pandas as pd

    curves = {selection.variant: curve for selection in selections if (curve := curve_of(selection))}
    noise = None if seed_sd is None else 1.96 * math.sqrt(2) * seed_sd
    rows = []
    for variant in record["variants"]:
        name, base = variant["name"], variant["baseline"]
        if name not in curves:
            continue
        curve = curves[name]
        fitted = fit(curve) or (NAN, NAN, NAN)
        vocab = (variant.get("spec") or {}).get("vocab")
        spread = sensitivity(curve, math.log(vocab) if vocab else math.inf)
        known = name in comparable and base in curves
        said = "baseline" if name == base else ""
        if name != base and known and noise is not None:
            said = verdict(curve, curves[base], noise)
        rows.append((name, curve.best, *fitted, *stable(curve), *spread, said))
    columns = ["variant", "lr", "fitted_lr", "fitted_loss", "curvature", "stable_lr", "diverged_lr"]
    spread_over = ["sensitivity", "sensitivity_from", "sensitivity_to"]
    return pd.DataFrame(rows, columns=[*columns, *spread_over, "verdict"])


def rates_frame(record: dict[str, Any], selections: list[Selection]) -> pd.DataFrame:
    """A row per variant and tuned setting, rates ascending: the curve beside the table.

    `setting` names it: the rate alone where nothing else is tuned. `step` is how far a trial came, `share` that of its
    steps; `settled` is whether the variant's tuning is over, else one that is paused waits for the others; `along` is
    whether all but the rate is as it was chosen.
    """
    import pandas as pd

    rows = []
    batches = {variant["name"]: variant.get("batches") for variant in record["variants"]}
    first = record["variants"][0]["name"]
    names = {name for s in selections for t in s.tuned if t["role"] == "tune" for name in t["settings"]}
    alone = names <= {"lr"} or not names
    for selection in selections:
        tuned = [(rate(t), t) for t in selection.tuned if t["role"] == "tune"]
        ends = [t["result"].get("step") for _, t in tuned if t["state"] == "complete"]
        planned = record.get("steps") if batches[selection.variant] == batches[first] else None
        whole = max(filter(None, ends), default=planned)
        for lr, trial in sorted(tuned, key=lambda pair: pair[0] or 0.0):
            value = loss(trial, "validation")
            step = (trial["result"] or {}).get("step")
            rows.append(
                {
                    "variant": selection.variant,
                    "lr": NAN if lr is None else lr,
                    "seed": trial["seed"],
                    "state": trial["state"],
                    "validation_loss": NAN if value is None else value,
                    "validation_perplexity": NAN if value is None else trial["result"]["validation"]["perplexity"],
                    "best": trial["settings"] == selection.settings and value is not None,
                    "setting": f"{lr:g}" if alone and lr is not None else spelled(trial["settings"]),
                    "step": step or NAN,
                    "share": step / whole if step and whole else NAN,
                    "settled": selection.settled,
                    "along": _others(trial).items() <= (selection.settings or trial["settings"]).items(),
                }
            )
    measured = ["validation_loss", "validation_perplexity", "best"]
    columns = ["variant", "lr", "seed", "state", *measured, "setting", "step", "share", "settled", "along"]
    return pd.DataFrame(rows, columns=columns)


def _others(trial: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in trial["settings"].items() if name != "lr"}
