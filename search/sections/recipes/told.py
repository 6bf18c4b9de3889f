"""What a report says of several recipes: each row at its best recipe, and how far its verdict goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.formatting.frames import NAN, records
from archlab.search.formatting.tables import Block, column_of, interval, number, printable
from archlab.search.results.comparable import apart
from archlab.search.results.comparison import Comparison
from archlab.search.results.losses import lay_out
from archlab.search.results.selection import Selection, loss
from archlab.search.results.told import Seen, Told
from archlab.search.sections.recipes.average import DEPENDS, Cells, averaged, far_apart
from archlab.search.sections.seeds.decide import analysed, verdict_of

if TYPE_CHECKING:  # which needs scipy
    from archlab.search.statistics.contrast import Contrast

MEAN = ("row", "baseline", "n", "delta", "low", "high", "verdict")
UNDER = ("row", "recipe", "variant", "loss", "delta", "low", "high", "verdict")
BEST = ("row", "baseline", "recipe", "against", "n", "perplexity", "loss", "delta", "low", "high", "verdict", "holds")
LEGEND = (
    "each row at the recipe with its lowest mean validation loss, and its baseline at that one's; under recipes: the "
    "verdicts under all of them, each against the baseline under the same one"
)
OF_MEAN = (
    "the mean of each row's differences under all recipes, over the n seeds that all have; depends on the recipe: two "
    "differences are further apart than their intervals together allow, and have other verdicts"
)
_LOST = "diverged", "pruned", "left out"  # verdicts on rows that never have a mean
_MOST = 4  # recipes with a column of their own


class ToldOfRecipes(Told):
    """Of a study with `recipes:`."""

    key = "recipes"
    heads = True

    def frames(self, seen: Seen) -> dict[str, Any]:
        """under_recipes: a row per variant with its `row` and `recipe`, TEST loss, difference and verdict under it.
        mean_of_recipes: a row per `row` that has every recipe: the mean of its differences under all of them, over the
            `n` seeds that all have. mean_undocumented: those whose interval lacks the variance of documents.
        best_recipes: a row per `row` at its best recipe `against` its `baseline` at that one's best; `holds` says under
            how many recipes the verdict is the same. Without a recipe where nothing is known yet, or ever.
        """
        import pandas as pd

        rows = (seen.record.get(self.key) or {}).get("rows", {})
        under = [
            (*rows[row["variant"]], *(row[name] for name in TABLE))
            for row in records(seen.found.table)
            if row["variant"] in rows
        ]
        found = pd.DataFrame(under, columns=[*UNDER])
        mean, undocumented = _means(seen, rows, records(found))
        best = _at_best(seen, rows, found, {row: verdict for row, *_, verdict in mean})
        return {
            "under_recipes": found,
            "mean_of_recipes": pd.DataFrame(mean, columns=[*MEAN]),
            "mean_undocumented": undocumented,
            "best_recipes": pd.DataFrame(best, columns=[*BEST]),
        }

    def notes(self, found: Comparison) -> Iterable[str]:
        if rows := found.mean_undocumented:
            yield f"{', '.join(rows)}: document variance of the mean unknown, its interval holds seed noise only"
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
        means = records(found.mean_of_recipes)
        if any(math.isfinite(row["delta"]) for row in means):
            yield _mean_block(means, records(found.under_recipes), unit)


def _mean_block(rows: list[dict[str, Any]], under: list[dict[str, Any]], unit: str) -> Block:
    """The mean of each row's differences, beside that under each recipe."""
    recipes = list(dict.fromkeys(each["recipe"] for each in under))
    shown = recipes if len(recipes) <= _MOST else []
    single = {(each["row"], each["recipe"]): each["delta"] for each in under}
    column = partial(column_of, rows)

    def of_recipe(recipe: str, row: dict[str, Any]) -> str:
        return number(single[row["row"], recipe], "+.4f")

    columns = [
        column("variant", lambda row: row["row"], "l"),
        column("n", lambda row: str(row["n"]), keep=3),
        *(column(printable(f"Δ {recipe}"), partial(of_recipe, recipe), keep=5) for recipe in shown),
        column(f"Δ {unit}", lambda row: number(row["delta"], "+.4f")),
        column("95% interval", lambda row: interval(row["low"], row["high"])),
        column("verdict", lambda row: row["verdict"], "l"),
    ]
    return Block(f"Mean over {len(recipes)} recipes", columns, OF_MEAN)


_SAYING = ("better", "worse", "within noise", "equivalent", "undecided")  # something of a difference
TABLE = ("variant", "loss_mean", "delta", "delta_low", "delta_high", "verdict")


def _means(seen: Seen, rows: Cells, under: list[dict[str, Any]]) -> tuple[list[tuple[Any, ...]], list[str]]:
    """The rows that have a mean over all recipes, compared as those of a table without recipes are, and which of them
    lack the losses of documents."""
    record, selections = averaged(seen.record, seen.selections, rows)
    if not selections:
        return [], []
    layout = lay_out(record, selections, seen.layout.unit)
    compared = {rows[v["name"]][0] for v in seen.record["variants"] if v["name"] in rows and v["name"] != v["baseline"]}
    variants = {variant["name"]: variant for variant in record["variants"]}
    found: list[tuple[Any, ...]] = []
    for name, contrast, selection in zip(variants, analysed(record, layout).contrasts, selections, strict=True):
        base = variants[name]["baseline"]
        if base == name:
            if name not in compared:
                found.append((name, base, len(selection.complete), *_difference(None), "baseline"))
            continue
        reason = apart(record, variants[name], variants[base])
        known = contrast if reason is None else None
        own = [each for each in under if each["row"] == name]
        verdict = reason or _said(record, known, own)
        found.append((name, base, known.pairs if known else 0, *_difference(known), verdict))
    return found, layout.undocumented


def _said(record: dict[str, Any], contrast: Contrast | None, under: list[dict[str, Any]]) -> str:
    """The verdict on a mean of differences, given those under each recipe."""
    lost = next((each["verdict"] for each in under if each["verdict"] in _LOST), None)
    if contrast is None and lost is not None:
        return str(lost)
    known = [(each["delta"], each["high"] - each["delta"]) for each in under if math.isfinite(each["high"])]
    one_way = {each["verdict"] for each in under} in ({"better"}, {"worse"})
    depends = contrast is not None and far_apart(known) and not one_way
    return DEPENDS if depends else verdict_of(contrast, record)


def _difference(contrast: Contrast | None) -> tuple[float, float, float]:
    """The difference with the ends of its interval, NaN where there is none."""
    if contrast is None:
        return NAN, NAN, NAN
    delta, half = contrast.difference, contrast.half_width
    return (delta, NAN, NAN) if half is None else (delta, delta - half, delta + half)


def _at_best(seen: Seen, rows: Cells, under: Any, means: Mapping[str, str]) -> Iterable[tuple[Any, ...]]:
    """The rows at their best recipes, compared as those of a table without recipes are; `means` are the verdicts on the
    means of their differences."""
    selections = {each.variant: each for each in seen.selections}
    variants = {each["name"]: each for each in seen.record["variants"] if each["name"] in rows}
    bases = {rows[name][0]: rows[each["baseline"]][0] for name, each in variants.items()}
    own = {row: [selections[name] for name in variants if rows[name][0] == row] for row in bases}
    best = {row: name for row, some in own.items() if (name := _lowest(some))}
    while alone := [row for row in best if bases[row] not in best]:
        best = {row: name for row, name in best.items() if row not in alone}
    verdicts = {row: {each["recipe"]: each["verdict"] for each in records(under[under["row"] == row])} for row in bases}
    chosen = [best[row] for row in bases if row in best]
    kept = [{**variants[name], "baseline": best[bases[rows[name][0]]]} for name in chosen]
    told = _compared(seen, rows, kept, selections)
    found = {rows[each["name"]][0]: numbers for each, numbers in zip(kept, told, strict=True)}
    for row in bases:
        at, numbers, verdict = found.get(row, (("", ""), (0, *[NAN] * 5), ""))
        if row not in found:
            said = {*verdicts[row].values()}  # of a baseline that is not there, a verdict says nothing
            verdict = "incomplete" if len(said) > 1 or said & {*_SAYING} else said.pop()
        extent = holds(verdicts[row], means.get(row, "")) if row in found else ""
        yield row, bases[row], *at, *numbers, verdict, extent


def _compared(
    seen: Seen, rows: Cells, kept: list[dict[str, Any]], selections: Mapping[str, Selection]
) -> Iterator[tuple[tuple[str, str], tuple[Any, ...], str]]:
    """Of each variant that is its row's best the recipes of both sides, what the frame has of it, and the verdict."""
    if not kept:
        return
    record = {**seen.record, "variants": kept, "baseline": kept[0]["baseline"]}
    analysis = analysed(record, lay_out(record, [selections[each["name"]] for each in kept], seen.layout.unit))
    losses, at = {row["variant"]: row for row in records(seen.found.table)}, {each["name"]: each for each in kept}
    for variant, contrast in zip(kept, analysis.contrasts, strict=True):
        table, base = losses[variant["name"]], variant["baseline"]
        verdict = apart(record, variant, at[base]) or verdict_of(contrast, record)
        yield (
            (rows[variant["name"]][1], rows[base][1]),
            (table["n"], table["perplexity_mean"], table["loss_mean"], *_difference(contrast)),
            "baseline" if base == variant["name"] else verdict,
        )


def _lowest(selections: Iterable[Selection]) -> str | None:
    """The variant with the lowest mean validation loss, over the seeds that all have, or where they share none over its
    own; None where none has a loss. One that will have no mean is left out, as is one without a loss yet."""
    found = {each.variant: _validation(each) for each in selections if not each.has_no_mean}
    found = {name: by_seed for name, by_seed in found.items() if by_seed}
    seeds = set.intersection(*map(set, found.values())) if found else set()
    means = {name: np.mean([by_seed[seed] for seed in seeds or by_seed]) for name, by_seed in found.items()}
    return min(means, key=lambda name: means[name], default=None)


def _validation(selection: Selection) -> dict[int, float]:
    """The validation losses by seed."""
    found = {seed: loss(trial, "validation") for seed, trial in selection.complete.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def holds(verdicts: Mapping[str, str], mean: str = "") -> str:
    """What the verdicts under several recipes, by their names, say together, and that on the mean of the differences
    where it says more: what is beyond noise under some recipes only need not depend on them."""
    under = {word: [name for name, said in verdicts.items() if said == word] for word in ("better", "worse")}
    if "baseline" in verdicts.values():
        return ""
    if under["better"] and under["worse"]:
        return "reversed: " + ", ".join(f"{word} under {' and '.join(names)}" for word, names in under.items())
    word = "better" if under["better"] else "worse"
    names, count = under[word], len(verdicts)
    silent = [f"{said} under {recipe}" for recipe, said in verdicts.items() if said not in _SAYING]
    if mean in under and not names:
        return f"{mean} on average, under none of {count} recipes alone"
    if mean == word and len(names) < count:
        return f"{word} under {len(names)} of {count} recipes, and on average"
    if len(names) == 1 and not silent:
        return f"{word} under one recipe only ({names[0]})"
    if names:
        return "; ".join([f"{word} under {len(names)} of {count} recipes", *silent])
    same = set(verdicts.values())
    return f"{same.pop()} under {count} of {count} recipes" if len(same) == 1 else "decided under no recipe"
