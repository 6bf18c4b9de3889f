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
            standard deviation `sd` of one trial with its interval, and what tables of the study resolve in `minutes`.
        calibrated_choices: a row per choice: what it is `worth` (nats/token) to go from the study's own value to the
            best one, with its interval, NaN where both are one.
        """
        import pandas as pd

        told = seen.record.get(self.key) or {}
        if not told:
            return {}
        found = [*_recipes(told, seen.record["recipes"], seen.trials)]
        best = front([(row["loss"], row["sd"]) for row in found])
        rows = [{**row, "front": at in best} for at, row in enumerate(found)]
        noise = next(((row["sd"], row["df"]) for row in rows if row["recipe"] == told["chosen"]), (NAN, 0))
        choices = [*_choices(told, *noise)]
        return {
            "calibrated_recipes": pd.DataFrame(rows, columns=[*RECIPES]),
            "calibrated_choices": pd.DataFrame(choices, columns=[*CHOICES]),
            "calibrated": {name: told[name] for name in ("of", "chosen", "rows", "compared", "tried")}
            | {"minutes": [_minutes(told, found) * times for times in TIMES]},
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
    """A row per recipe of the whole trials, without the front."""
    for name, changes in recipes["named"].items():
        mine = [
            t for t in trials if recipes["rows"].get(t["variant"], ("", ""))[1] == name and t["state"] == "complete"
        ]
        by_row: dict[str, list[float]] = {row: [] for row in told["rows"]}
        for trial in mine:
            if (value := loss(trial, "test")) is not None:
                by_row[recipes["rows"][trial["variant"]][0]].append(value)
        if not all(by_row.values()):
            continue
        squares = sum(float(np.var(values) * len(values)) for values in by_row.values())
        df = sum(len(values) - 1 for values in by_row.values())
        sd = math.sqrt(squares / df) if df else NAN
        seconds = float(np.mean([trial["result"]["train_s"] for trial in mine]))
        minutes = [told["trials"] * seconds * times / 60 for times in TIMES]
        losses = {row: float(np.mean(values)) for row, values in by_row.items()}
        low, high = sd_interval(sd, df)
        yield {
            "recipe": name,
            "changes": changes,
            "tokens": mine[0]["result"]["tokens"],
            "seconds": seconds,
            "losses": losses,
            "loss": float(np.mean([*losses.values()])),
            **{"sd": sd, "sd_low": low, "sd_high": high, "df": df},
            "resolves": [resolvable(sd, each * 60 / seconds, told["compared"]) for each in minutes],
        }


def sd_interval(sd: float, df: int) -> tuple[float, float]:
    """The 95% interval of a standard deviation that was estimated on so many degrees of freedom, from chi-squared."""
    if not df:
        return NAN, NAN
    low, high = (float(scipy.special.chdtri(df, tail)) for tail in (0.025, 0.975))
    return sd * math.sqrt(df / low), sd * math.sqrt(df / high)


def resolvable(sd: float, trials: float, variants: int) -> float:
    """The half-width of a difference's 95% interval where `variants` share so many trials, all compared with one of
    them, and one trial has the standard deviation `sd`; infinite where each has less than two. Without documents."""
    from archlab.search.statistics.dunnett import dunnett_critical

    seeds = min(int(trials // variants), MOST_SEEDS)
    if seeds < 2 or variants < 2:
        return math.inf
    return dunnett_critical(variants - 1, expected_df(variants, 1, seeds)) * sd * math.sqrt(2 / seeds)


def _minutes(told: Record, rows: list[dict[str, Any]]) -> float:
    """What the study itself takes, in minutes of training."""
    own = next((row["seconds"] for row in rows if row["recipe"] == "as is"), NAN)
    return float(told["trials"] * own / 60)


def _choices(told: Record, sd: float, df: int) -> Iterable[dict[str, Any]]:
    """A row per choice. A difference of two recipes, each tried once on every row, has the variance 2 sd^2 / rows."""
    half = float(scipy.special.stdtrit(df, 0.975)) * sd * math.sqrt(2 / len(told["rows"])) if df else NAN
    for each in told["choices"]:
        worth = float(np.mean(each["with"]) - np.mean(each["without"]))
        values, chosen = each["tried"], told["places"][each["choice"]]
        last = each["ordered"] and len(values) > 2 and chosen in (0, len(values) - 1)
        yield {
            "choice": each["choice"],
            "own": shown(values[each["own"]]),
            "best": shown(values[each["best"]]),
            "other": shown(values[each["other"]]),
            "chosen": shown(values[chosen]),
            "values": len(values),
            "inside": "" if not each["ordered"] else "no" if last else "yes",
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
        return column(f"Δ in {minutes:.1f} min", lambda row: number(row["resolves"][at], ".4f"), keep=2)

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
        f"of {told['of']}'s {told['compared']} variants resolves when its trials take so long on one core (documents "
        "not counted). front: no other recipe has both less loss and less noise."
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
        "best: in the best recipe of the short trials. worth: its validation loss in longer ones, in nats per token "
        f"over {' and '.join(told['rows'])}, less that of the same recipe with the other value. inside: of so many "
        "values the chosen one is not the last on its side."
    )
    return Block("What each choice is worth", columns, legend)
