"""A study under several recipes as one under a single recipe: every trial of a row is the mean of its trials under all.

The mean of a row's differences over recipes with equal weights is the difference of such means. So they are compared as
the rows of any table are: paired by seed, each row's noise moderated by that of all, corrected for the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from archlab.search.results.comparable import apart, is_one_tokenizer
from archlab.search.results.selection import Selection
from archlab.search.results.told import Record
from archlab.search.utils.canonical import canonical_json

GROUP = "mean of the recipes"  # what a claim of a paper is judged in, beside each recipe
DEPENDS = "depends on the recipe"
AXIS = "recipe"  # what a cell is called by: `G1 [recipe=long warm-up]`

Cells = Mapping[str, Sequence[str]]  # of each variant its row and its recipe


def averaged(record: Record, selections: Sequence[Selection], cells: Cells) -> tuple[Record, list[Selection]]:
    """The record and the selections of the rows that can be averaged: none is where recipes change what is predicted.

    A row has a mean at a seed that has one under every recipe. It diverged where it did under every one, and has no
    mean at all where it has none under some. One whose variants have no baseline of one row, each under its own recipe,
    is its own.
    """
    own = {each.variant: each for each in selections}
    rows: dict[str, list[dict[str, Any]]] = {}
    for variant in sorted(record["variants"], key=lambda each: cells.get(each["name"], ("", ""))[1]):
        if variant["name"] in cells and variant["name"] in own:
            rows.setdefault(cells[variant["name"]][0], []).append(variant)
    recipes = len({recipe for _, recipe in cells.values()})
    whole = [
        row
        for row in dict.fromkeys(row for row, _ in cells.values())
        if len(mine := rows.get(row, [])) == recipes and not any(apart(record, mine[0], each) for each in mine)
        if is_one_tokenizer([own[each["name"]] for each in mine])
    ]
    variants = []
    for row in whole:
        base = _baseline(rows[row], cells)
        variants.append(_variant(row, base if base in whole else row, rows[row]))
    told = {**record, "variants": variants, "baseline": variants[0]["baseline"] if variants else ""}
    if published := record.get("published"):
        told["published"] = {**published, "variants": _rows_of_paper(published["variants"], cells)}
    return told, [_mean(row, [own[each["name"]] for each in rows[row]]) for row in whole]


def far_apart(differences: Iterable[tuple[float, float]]) -> bool:
    """Whether two of these differences, each with half the length of its interval, are further apart than the interval
    of two independent ones allows."""
    return any(abs(one - other) > math.hypot(a, b) for (one, a), (other, b) in combinations(differences, 2))


def without_recipe(group: str) -> str:
    """A group of rows of a published table without the recipe that it stands under."""
    return ", ".join(part for part in group.split(", ") if part and not part.startswith(f"{AXIS}="))


def _baseline(variants: Sequence[dict[str, Any]], cells: Cells) -> str:
    """The row of the baselines of a row's variants; nothing where one has its baseline under another recipe."""
    rows = {cells.get(each["baseline"], ("", ""))[0] for each in variants}
    same = all(cells.get(each["baseline"], ("", ""))[1] == cells[each["name"]][1] for each in variants)
    return rows.pop() if same and len(rows) == 1 else ""


def _variant(name: str, baseline: str, variants: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row as a variant of a record: what it is tested on, and what stands for its batches."""
    same = {key: variants[0][key] for key in ("test", "objective", "lossy") if key in variants[0]}
    batches = [each.get("batches") for each in variants]
    seen = {"batches": canonical_json(batches)} if all(batches) else {}
    return {"name": name, "baseline": baseline, **same, **seen}


def _rows_of_paper(mapped: Mapping[str, Any], cells: Cells) -> dict[str, Any]:
    """Which published row each averaged one is: that of its variants, where it is the same one under every recipe."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, (row, _) in cells.items():
        each = mapped.get(name) or {"rows": (), "group": ""}
        cell = without_recipe(each["group"])
        found.setdefault(row, []).append({**each, "group": f"{GROUP}, {cell}" if cell else GROUP})
    return {row: every[0] for row, every in found.items() if every[0]["rows"] and all(e == every[0] for e in every)}


def _mean(row: str, selections: Sequence[Selection]) -> Selection:
    """A row under all recipes."""
    seeds = sorted(set[int]().union(*(each.reported for each in selections)))
    if all(each.all_diverged for each in selections):
        tuned = () if seeds else selections[0].tuned
        return Selection(row, (), tuned, None, {seed: _ended("diverged", seed) for seed in seeds}, ())
    found = {seed: _ended("incomplete", seed) for seed in seeds}
    for seed in seeds if not any(each.has_no_mean for each in selections) else ():
        if all(seed in each.complete for each in selections):
            found[seed] = _mean_trial([each.complete[seed] for each in selections])
    return Selection(row, (), (), None, found, ())


def _ended(state: str, seed: int) -> dict[str, Any]:
    """A trial of a row that has no mean at a seed."""
    return {"state": state, "seed": seed, "key": None, "result": None}


def _mean_trial(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is compared of a trial, as the mean of several: losses, the losses of documents, what was measured."""
    result = {split: _mean_numbers([each["result"][split] for each in trials]) for split in ("validation", "test")}
    documents = [each.get("documents") for each in trials]
    whole = all(each is not None for each in documents)
    alike = whole and len({len(each["nll"]) for each in documents if each}) == 1
    names = ("nll", "tokens", "bytes")
    return {
        "state": "complete",
        "key": " ".join(each["key"] for each in trials),
        "seed": trials[0]["seed"],
        "result": result,
        "documents": {name: np.mean([each[name] for each in documents if each], axis=0) for name in names}
        if alike
        else None,
        "measures": [*_mean_findings([each.get("measures") or () for each in trials])],
    }


def _mean_numbers(of: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The means of the numbers that the first one has, None where some has none."""
    found: dict[str, float | None] = {}
    for name, value in of[0].items():
        if isinstance(value, int | float | None):
            values = [each.get(name) for each in of]
            found[name] = None if None in values else float(np.mean(np.array(values, np.float64)))
    return found


def _mean_findings(of: Sequence[Iterable[Mapping[str, Any]]]) -> Iterable[dict[str, Any]]:
    """The values of each measure that all trials have, in one version."""
    found = [{(each["measure"], each["version"]): each.get("values", {}) for each in findings} for findings in of]
    for measure, version in found[0]:
        if all((measure, version) in each for each in found):
            values = _mean_numbers([each[measure, version] for each in found])
            yield {"measure": measure, "version": version, "values": values}
