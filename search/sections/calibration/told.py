"""What a report says of a calibration's whole trials: loss and noise of each recipe, and what each change is worth.

`archlab calibrate` leaves the record; there is no key of a study file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import scipy  # its special is imported when it is used

from archlab.search.formatting.frames import NAN, records
from archlab.search.formatting.tables import DASH, Block, Cell, Column, Row, column_of, interval, number, short_count
from archlab.search.results.comparison import Comparison
from archlab.search.results.selection import loss
from archlab.search.results.told import Record, Rows, Seen, Told
from archlab.search.statistics.contrast import MINIMUM_SEEDS, Floats
from archlab.search.statistics.intervals import pooled_spread, unbalanced_residual_variance
from archlab.search.statistics.moderated import expected_df
from archlab.search.statistics.pareto import front

RECIPES = (
    "recipe",
    "changes",
    "tokens",
    "seconds",
    "losses",
    "loss",
    "sd",
    "sd_low",
    "sd_high",
    "df",
    "seeds",
    "resolves",
    "front",
)
CHOICES = ("choice", "own", "best", "other", "chosen", "values", "inside", "worth", "low", "high")
TIMES = (1, 4)  # of the study's own time
MOST_SEEDS = 1000


class ToldOfCalibration(Told):
    """Of the last study of a calibration."""

    key = "calibration"
    heads = True

    def frames(self, seen: Seen) -> dict[str, Any]:
        """calibrated_recipes: a row per recipe: TEST losses of the `rows` that it was tried on, their mean, the
            standard deviation `sd` of one trial with its interval, and what a table of the study's variants resolves
            in `minutes` on one core; NaN for a recipe with a trial that has no loss.
        calibrated_choices: a row per choice of the `best` recipe of the short trials: its loss in longer ones less that
            with the `other` value of this choice, with an interval.
        """
        import pandas as pd

        told = seen.record.get(self.key) or {}
        if not told:
            return {}
        found = [*_recipes(told, seen.record["recipes"], seen.trials)]
        best = front([(row["loss"], row["sd"]) for row in found])
        minutes = [told["trials"] * found[0]["seconds"] * times / 60 for times in TIMES]
        rows = [
            {
                **row,
                "front": at in best and math.isfinite(row["loss"]),
                "resolves": [resolvable(row["sd"], each * 60 / row["seconds"], told["compared"]) for each in minutes],
            }
            for at, row in enumerate(found)
        ]
        cells = [np.array(row["seeds"]) for row in found if row["seeds"]]
        df = sum(cell.size - len(cell) for cell in cells)
        # recipes share no batches: their differences have all that seeds do
        spread = pooled_spread(np.concatenate(cells)) if df else None
        choices = [*_choices(told, spread or NAN, df)]
        return {
            "calibrated_recipes": pd.DataFrame(rows, columns=[*RECIPES]),
            "calibrated_choices": pd.DataFrame(choices, columns=[*CHOICES]),
            "calibrated": {name: told[name] for name in ("of", "chosen", "rows", "compared", "tried")}
            | {"minutes": minutes, "shares": told["shares"]},
        }

    def notes(self, found: Comparison) -> Iterable[str]:
        if "calibrated" not in found.told[self.key]:
            return
        told = found.calibrated
        for row in records(found.calibrated_recipes):
            if row["changes"]:
                yield f"{row['recipe']}: {_changes(row['changes'])}"
        if told["chosen"] == "as is":
            yield f"no recipe of the {told['tried']} tried is better than {told['of']}'s own"
        for row in records(found.calibrated_choices):
            if row["inside"] == "no":
                yield (
                    f"the {row['choice']} that was chosen, {row['chosen']}, is the last of its values: write the "
                    "recipe into the study and calibrate again"
                )

    def blocks(self, found: Comparison) -> Iterable[Block]:
        if "calibrated" in found.told[self.key]:
            yield _recipes_block(found)
            yield _choices_block(found)


def _recipes(told: Record, recipes: Record, trials: Rows) -> Iterable[dict[str, Any]]:
    """A row per recipe of the whole trials, the study's own first; `seeds` are its losses row by row."""
    for name, changes in recipes["named"].items():
        mine: dict[str, dict[int, float]] = {row: {} for row in told["rows"]}
        results, lost = [], False
        for trial in trials:
            row, recipe = recipes["rows"].get(trial["variant"], ("", ""))
            if recipe != name:
                continue
            value = loss(trial, "test")
            lost = lost or value is None
            if value is not None:
                mine[row][trial["seed"]] = value
                results.append(trial["result"])
        shared = sorted(set.intersection(*map(set, mine.values())))
        losses = np.array([[by_seed[seed] for seed in shared] for by_seed in mine.values()])
        whole = bool(shared) and not lost
        sd, df = _noise(losses) if whole else (NAN, 0)
        low, high = sd_interval(sd, df)
        means = losses.mean(1).tolist() if whole else [NAN] * len(mine)
        yield {
            "recipe": name,
            "changes": changes,
            "tokens": results[0]["tokens"] if whole else NAN,
            "seconds": float(np.mean([result["train_s"] for result in results])) if whole else NAN,
            "losses": dict(zip(mine, means, strict=True)),
            "loss": float(np.mean(means)),
            **{"sd": sd, "sd_low": low, "sd_high": high, "df": df},
            "seeds": losses.tolist() if whole else [],
        }


def _noise(losses: Floats) -> tuple[float, int]:
    """The standard deviation of one trial around its row and its seed, `[row, seed]`, as paired differences have it,
    and its degrees of freedom; of a single row around that."""
    if len(losses) == 1:
        return pooled_spread(losses) or NAN, losses.shape[1] - 1
    variance, df = unbalanced_residual_variance(losses)
    return NAN if variance is None else math.sqrt(variance), df


def sd_interval(sd: float, df: int) -> tuple[float, float]:
    """The 95% interval of a standard deviation that was estimated on so many degrees of freedom, from chi-squared."""
    if not df:
        return NAN, NAN
    low, high = (float(scipy.special.chdtri(df, tail)) for tail in (0.025, 0.975))
    return sd * math.sqrt(df / low), sd * math.sqrt(df / high)


def resolvable(sd: float, trials: float, variants: int) -> float:
    """The half-width of a difference's 95% interval where `variants` share so many trials, all compared with one of
    them, and one trial has the standard deviation `sd`; infinite where each has too few for an interval. Without
    documents."""
    from archlab.search.statistics.dunnett import dunnett_critical

    if not math.isfinite(trials) or not math.isfinite(sd):
        return NAN
    seeds = min(int(trials // variants), MOST_SEEDS)
    if seeds < MINIMUM_SEEDS or variants < 2:
        return math.inf
    return dunnett_critical(variants - 1, expected_df(variants, 1, seeds)) * sd * math.sqrt(2 / seeds)


def _choices(told: Record, sd: float, df: int) -> Iterable[dict[str, Any]]:
    """A row per choice. A difference of two recipes, each tried once on every row, has the variance 2 sd^2 / rows."""
    half = float(scipy.special.stdtrit(df, 0.975)) * sd * math.sqrt(2 / len(told["rows"])) if df else NAN
    for each in told["choices"]:
        with_, without = float(np.mean(each["with"])), float(np.mean(each["without"]))
        worth = with_ - without if math.isfinite(with_) and math.isfinite(without) else NAN
        values, chosen = each["tried"], told["places"][each["choice"]]
        last = chosen in each["ends"]
        yield {
            "choice": each["choice"],
            "own": shown(values[each["own"]]),
            "best": shown(values[each["best"]]),
            "other": shown(values[each["other"]]),
            "chosen": shown(values[chosen]),
            "values": len(values),
            "inside": "" if not each["ends"] else "no" if last else "yes",
            "worth": worth,
            "low": worth - half,
            "high": worth + half,
        }


def shown(value: Any) -> str:
    """A value of a choice as a cell."""
    if isinstance(value, list):  # the betas of an optimizer, of which the second was tried
        return str(value[-1])
    return f"{value:g}" if isinstance(value, float) else str(value)


def _changes(changes: Mapping[str, Any]) -> str:
    """What a recipe changes, in short."""
    said = []
    for path, value in changes.items():
        if path != "tokens":
            plain = value["type"] if isinstance(value, dict) and "type" in value else value
            said.append(f"{path.split('.')[-1]} {shown(plain)}")
    return ", ".join(said) or DASH


def _recipes_block(found: Comparison) -> Block:
    rows, told = records(found.calibrated_recipes), found.calibrated
    column = partial(column_of, rows)

    def noise(row: Row) -> str:
        return f"{number(row['sd'], '.4f')} [{number(row['sd_low'], '.4f')}, {number(row['sd_high'], '.4f')}]"

    def of_row(name: str) -> Column:
        return column(name, lambda row: number(row["losses"][name], ".4f"))

    def in_time(at: int, minutes: float) -> Column:
        return column(f"Δ in {number(minutes, '.1f')} min", lambda row: number(row["resolves"][at], ".4f"), keep=2)

    columns = [
        Column("recipe", [Cell(row["recipe"], row["recipe"] == told["chosen"]) for row in rows], "l"),
        column("tokens", lambda row: short_count(row["tokens"]), keep=1),
        column("s/trial", lambda row: number(row["seconds"], ".1f"), keep=3),
        *map(of_row, told["rows"]),
        column("sd of a trial", noise),
        *(in_time(at, minutes) for at, minutes in enumerate(told["minutes"])),
        column("front", lambda row: "✓" if row["front"] else "", "c", keep=3),
    ]
    legend = (
        "* chosen, by the mean validation loss. Test losses in nats per token. Δ: the smallest difference that a table "
        f"of {told['compared']} variants resolves under this recipe, trained for so long on one core (documents not "
        "counted). front: no other recipe has both less loss and less noise."
    )
    return Block("Recipes at equal time", columns, legend)


def _choices_block(found: Comparison) -> Block:
    rows, told = records(found.calibrated_choices), found.calibrated
    column = partial(column_of, rows)
    columns = [
        column("choice", lambda row: row["choice"], "l"),
        column("as is", lambda row: row["own"]),
        column("best", lambda row: row["best"]),
        column("other", lambda row: row["other"]),
        column("worth", lambda row: number(row["worth"], "+.4f")),
        column("95% interval", lambda row: interval(row["low"], row["high"])),
        column("chosen", lambda row: row["chosen"]),
        column("of", lambda row: str(row["values"])),
        column("inside", lambda row: row["inside"], "c"),
    ]
    legend = (
        f"best: in the best recipe of trials of {told['shares'][0]:g} of the time. worth: its validation loss in "
        f"trials of {told['shares'][1]:g} of it, in nats per token over {' and '.join(told['rows'])}, less that of "
        "the same with the other value; the interval is made of the noise of the whole trials. inside: of so many "
        "values the chosen one is not the last on its side."
    )
    return Block("What each choice is worth", columns, legend)
