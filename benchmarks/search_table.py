"""Trains every model of studies/search/table.yaml, and writes their losses as a table that searches are measured on.

    python benchmarks/search_table.py --store tables       # trains what is missing; some hours of one core
    python benchmarks/search_table.py --store tables --write benchmarks/results/search-table.json
    python benchmarks/search_table.py --store others --begin benchmarks/results/search-table.json   # on another machine

386 models (432 points of the space, of which some are the same model), each at two lengths and with two seeds: 1544
trials of one plain study. A line of the table has the points of a model by their places on the axes. For each length it
has the validation losses in nats/token, and the core-seconds to train and evaluate a trial, the mean of its seeds. A
table may be written while trials are missing, and another store goes on from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import archlab
from archlab.search.planning.builder import Builder
from archlab.search.results.selection import loss
from archlab.search.sections.search.axes import Choice, Components
from archlab.search.sections.search.points import Points
from archlab.search.sections.search.space import Space, component_of
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from archlab.search.variants.asked import Asked

STUDY = Path(__file__).resolve().parents[1] / "studies" / "search" / "table.yaml"
LENGTHS = {"short": 32_000, "full": 128_000}  # tokens
SEEDS = 2
MOST = 10_000  # points of a space that is trained as a whole
NAME = "search-table-whole"

Point = dict[str, Any]  # a value for each axis
Table = dict[str, dict[str, Any]]  # what is known of a model, by its points as JSON


def axes_of(space: Space) -> dict[str, list[Any]]:
    """The values of each axis of a space of choices."""
    return {path: list(axis.values) for path, axis in space.axes.items() if isinstance(axis, Choice)}


def distinct(study: Study, root: Path) -> dict[str, list[Point]]:
    """The models of the space by the key of their trials, that of the base first: the points of each."""
    assert isinstance(study.space, Space)
    builder = Builder(study, root / "data")
    builder.settled = None
    target = builder.variant(Asked("baseline", "baseline", "", ()), None)
    found: dict[str, list[Point]] = {target.trial(0).key: []}
    for point in Points(study.space, {}).all(MOST) or []:
        settings = [s for path, value in point.items() for s in study.space.settings(path, value, study.components)]
        variant = builder.variant(Asked("point", "point", "", tuple(settings)), target)
        found.setdefault(variant.trial(0).key, []).append(point)
    return found


def patch(space: Space, point: Point) -> list[Any]:
    """A point as a variant is written."""
    parts: list[Any] = []
    for path, value in point.items():
        if isinstance(space.axes[path], Components):
            parts += [name] if (name := component_of(path, value)) else []
        else:
            parts.append({path: value})
    return parts


def names(models: dict[str, list[Point]]) -> list[str]:
    """What the models are called in the study of all."""
    return ["baseline", *(f"model {index}" for index in range(1, len(models)))]


def whole(study: Study, models: dict[str, list[Point]], begun: Table) -> dict[str, Any]:
    """The study of all models that a table lacks a length of, and of the baseline, whose size they have."""
    assert isinstance(study.space, Space)
    written = yaml.safe_load(STUDY.read_text())
    for name in ("search", "space", "study", "question"):
        written.pop(name)
    named = zip(names(models), models.values(), lacking(study, models, begun), strict=True)
    variants = {name: patch(study.space, each[0]) for name, each, missing in named if missing}
    recipes = {name: {"tokens": tokens} for name, tokens in LENGTHS.items()}
    return {
        **written,
        "study": NAME,
        "variants": {**variants, "baseline": {}},
        "recipes": recipes,
        "seeds": SEEDS,
        "keep": {"final": False},
    }


def lacking(study: Study, models: dict[str, list[Point]], begun: Table) -> list[bool]:
    """Of each model whether a table lacks a length of it."""
    assert isinstance(study.space, Space)
    places = map(places_of(study.space), models.values())
    return [not LENGTHS.keys() <= begun.get(json.dumps(each), {}).keys() for each in places]


def places_of(space: Space) -> Callable[[list[Point]], list[list[int]]]:
    """The points of a model by their places on the axes."""
    axes = axes_of(space)
    return lambda points: [[axes[path].index(value) for path, value in point.items()] for point in points]


def read(file: Path | None) -> Table:
    """What a table has of each model, by its points."""
    models = json.loads(file.read_text())["models"] if file else []
    return {json.dumps(model.pop("points")): model for model in models}


def table(study: Study, models: dict[str, list[Point]], root: Path, begun: Table) -> str:
    """What was trained, as JSON of a line for each model, and what a table had before."""
    assert isinstance(study.space, Space)
    axes = axes_of(study.space)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    with Store.open(root, create=False) as store:
        for row in store.study_trials(NAME):
            if loss(row, "validation") is not None:
                found[row["variant"], row["seed"]] = row
    lines, missing = [], 0
    for name, places in zip(names(models), map(places_of(study.space), models.values()), strict=True):
        line: dict[str, Any] = {"points": places, **begun.get(json.dumps(places), {})}
        for length in [each for each in LENGTHS if each not in line]:
            rows = [found.get((f"{name} [recipe={length}]", seed)) for seed in range(SEEDS)]
            if None in rows:
                missing += 1
                continue
            line[length] = [round(loss(row, "validation") or 0.0, 5) for row in rows if row]
            times = [row["result"]["train_s"] + row["result"]["evaluate_s"] for row in rows if row]
            line[f"{length}_s"] = round(fmean(times), 2)
        lines.append(json.dumps(line))
    print(f"{missing} of {len(LENGTHS) * len(models)} lengths of models are missing" if missing else "whole")
    head = {"axes": axes, "tokens": LENGTHS}
    return json.dumps(head)[:-1] + ', "models": [\n' + ",\n".join(lines) + "\n]}"


def main() -> None:
    """Trains, or writes what was trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, type=Path, help="where trials are kept")
    parser.add_argument("--write", type=Path, help="the table; without it what is missing is trained")
    parser.add_argument("--begin", type=Path, help="a table of which nothing is trained again")
    given = parser.parse_args()
    study = load_study(STUDY)
    models = distinct(study, given.store)
    print(len(models), "models,", sum(map(len, models.values())), "points", flush=True)
    begun = read(given.begin)
    if given.write:
        given.write.write_text(table(study, models, given.store, begun) + "\n")
    elif any(lacking(study, models, begun)):
        archlab.run(load_study(whole(study, models, begun)), store=given.store)


if __name__ == "__main__":
    main()
