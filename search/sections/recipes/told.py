"""What a report says of several recipes: each row at its best recipe, and how far its verdict goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from archlab.search.formatting.frames import NAN, records
from archlab.search.formatting.tables import Block, column_of, interval, number
from archlab.search.results.comparable import apart
from archlab.search.results.comparison import Comparison
from archlab.search.results.losses import lay_out
from archlab.search.results.selection import Selection, loss
from archlab.search.results.told import Seen, Told
from archlab.search.sections.seeds.decide import analysed, verdict_of

UNDER = ("row", "recipe", "variant", "loss", "delta", "low", "high", "verdict")
BEST = ("row", "recipe", "against", "n", "perplexity", "loss", "delta", "low", "high", "verdict", "holds")
LEGEND = (
    "each row at the recipe with its lowest mean validation loss, and its baseline at that one's; under recipes: the "
    "verdicts under all of them, each against the baseline under the same one"
)


class ToldOfRecipes(Told):
    """Of a study with `recipes:`."""

    key = "recipes"
    heads = True

    def frames(self, seen: Seen) -> dict[str, Any]:
        """under_recipes: a row per variant with its `row` and `recipe`, TEST loss, difference and verdict under it.
        best_recipes: a row per `row` at its best recipe `against` its baseline at that one's best; `holds` says under
            how many recipes the verdict is the same.
        """
        import pandas as pd

        rows = (seen.record.get(self.key) or {}).get("rows", {})
        under = [
            (*rows[row["variant"]], *(row[name] for name in TABLE))
            for row in records(seen.found.table)
            if row["variant"] in rows
        ]
        found = pd.DataFrame(under, columns=[*UNDER])
        return {"under_recipes": found, "best_recipes": pd.DataFrame(_at_best(seen, rows, found), columns=[*BEST])}

    def notes(self, found: Comparison) -> Iterable[str]:
        for row in records(found.best_recipes):
            if row["holds"].startswith("reversed"):
                yield f"{row['row']}: {row['holds']}: the difference is the recipe's as much as the architecture's"

    def blocks(self, found: Comparison) -> Iterable[Block]:
        rows, unit = records(found.best_recipes), found.noise["unit"]
        if not rows:
            return
        column = partial(column_of, rows)
        columns = [
            column("variant", lambda row: row["row"], "l"),
            column("best recipe", lambda row: row["recipe"], "l"),
            column("n", lambda row: str(row["n"]), keep=3),
            column("perplexity", lambda row: number(row["perplexity"], "#.4g"), keep=4),
            column(f"Δ {unit}", lambda row: number(row["delta"], "+.4f")),
            column("95% interval", lambda row: interval(row["low"], row["high"])),
            column("verdict", lambda row: row["verdict"], "l"),
            column("under recipes", lambda row: row["holds"].replace(" recipes", ""), "l", room=60),
        ]
        yield Block("Every variant at its best recipe", columns, LEGEND)


TABLE = ("variant", "loss_mean", "delta", "delta_low", "delta_high", "verdict")


def _at_best(seen: Seen, rows: Mapping[str, tuple[str, str]], under: Any) -> Iterable[tuple[Any, ...]]:
    """The rows at their best recipes, compared as those of a table without recipes are."""
    selections = {each.variant: each for each in seen.selections}
    variants = {each["name"]: each for each in seen.record["variants"] if each["name"] in rows}
    best: dict[str, str] = {}
    for name in sorted(variants, key=lambda name: _validation(selections[name])):
        if np.isfinite(_validation(selections[name])):
            best.setdefault(rows[name][0], name)
    bases = {rows[name][0]: rows[each["baseline"]][0] for name, each in variants.items()}
    chosen = [best[row] for row in bases if row in best and bases[row] in best]
    if not chosen:
        return
    kept = [{**variants[name], "baseline": best[bases[rows[name][0]]]} for name in chosen]
    record = {**seen.record, "variants": kept, "baseline": kept[0]["baseline"]}
    analysis = analysed(record, lay_out(record, [selections[name] for name in chosen]))
    losses, at = {row["variant"]: row for row in records(seen.found.table)}, {each["name"]: each for each in kept}
    for variant, contrast in zip(kept, analysis.contrasts, strict=True):
        row, recipe = rows[variant["name"]]
        half = None if contrast is None else contrast.half_width
        delta = NAN if contrast is None else contrast.difference
        ends = (NAN, NAN) if half is None else (delta - half, delta + half)
        table = losses[variant["name"]]
        yield (
            row,
            recipe,
            rows[variant["baseline"]][1],
            table["n"],
            table["perplexity_mean"],
            table["loss_mean"],
            delta,
            *ends,
            "baseline"
            if bases[row] == row
            else apart(record, variant, at[variant["baseline"]]) or verdict_of(contrast, record),
            holds({each["recipe"]: each["verdict"] for each in records(under[under["row"] == row])}),
        )


def _validation(selection: Selection) -> float:
    """The mean validation loss over the seeds; infinite for a variant that has no mean, or none yet."""
    found = [loss(trial, "validation") for trial in selection.complete.values()]
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known and not selection.has_no_mean else np.inf


def holds(verdicts: Mapping[str, str]) -> str:
    """What the verdicts under several recipes, by their names, say together."""
    under = {word: [name for name, said in verdicts.items() if said == word] for word in ("better", "worse")}
    if "baseline" in verdicts.values():
        return ""
    if under["better"] and under["worse"]:
        return "reversed: " + ", ".join(f"{word} under {' and '.join(names)}" for word, names in under.items())
    word = "better" if under["better"] else "worse"
    names, count = under[word], len(verdicts)
    if len(names) == 1:
        return f"{word} under one recipe only ({names[0]})"
    if names:
        return f"{word} under {len(names)} of {count} recipes"
    same = set(verdicts.values())
    return f"{same.pop()} under {count} of {count} recipes" if len(same) == 1 else "decided under no recipe"
