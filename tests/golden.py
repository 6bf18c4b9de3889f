"""The committed studies written out, every variant resolved, and their list: `python -m tests.golden` writes both.

A study says little and defaults say the rest. Its golden text is the model and the recipe of each variant at the first
scale with nothing left open, so that a default that changes shows in review.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.planning.builder import Builder
from archlab.search.recipe.recipe import Recipe
from archlab.search.sections.ladder.rungs import climbed
from archlab.search.sections.seeds.spec import most
from archlab.search.study.asked import asked_variants
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from archlab.search.variants.asked import Asked

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "studies"
GOLDEN = STUDIES / "golden"
PAGE = STUDIES / "README.md"
BEGIN, END = "<!-- the studies: make golden -->\n", "<!-- end -->\n"
_PLANNED = 100_000  # minutes that nobody waits for
_FLOPS = 1.7e12 / 40  # a second of one core: of a step of Llama's kind at 64 channels, which trains 1M tokens in 40 s


class _Vocabulary:
    """The data sets of a study as far as models depend on them: how many tokens there are."""

    def of(self, recipe: Recipe) -> Any:
        """What stands for the data of a recipe."""
        data: Any = recipe.data
        if data.holds_answers:
            return SimpleNamespace(vocab=data.kinds + 1)
        return SimpleNamespace(vocab=getattr(recipe.tokenizer, "vocab", 257))


class _Resolver(Builder):
    """Builds variants as planning does, without their data."""

    def __init__(self, study: Study) -> None:
        super().__init__(study, Path())
        self.datasets = _Vocabulary()  # type: ignore[assignment]


def files() -> list[Path]:
    """The committed studies."""
    return sorted(path for folder in (STUDIES, STUDIES / "search") for path in folder.glob("*.yaml"))


def golden_of(file: Path) -> Path:
    """Where the golden text of a study lies."""
    return (GOLDEN / file.relative_to(STUDIES)).with_suffix(".txt")


def resolved(study: Study) -> Iterator[tuple[Asked, Any, Any]]:
    """Each variant with its recipe and what was built of it, or the reason why a design leaves it out."""
    builder = _Resolver(study)
    targets: dict[str, Any] = {}
    asked = climbed(study.ladder, builder, asked_variants(study))
    found: dict[str, list[tuple[Asked, Any, Any]]] = {}
    for item in sorted(asked, key=lambda item: study.match is None or item.base != study.match.to):
        recipe = builder.recipe(item.settings, item.rung, item.over)
        built: Any
        try:
            built = builder.build(item, targets.get(item.cell), builder.datasets.of(recipe), recipe)
        except SpecError as error:
            if item.impossible == "refuse":
                raise
            built = error
        if study.match and item.base == study.match.to:
            targets[item.cell] = built
        found[item.name] = [(item, recipe, built)]
        if study.match and study.match.report_unmatched and item.base != study.match.to:
            own = replace(item, name=f"{item.name} unmatched")
            found[item.name].append((own, recipe, builder.build(item, None, builder.datasets.of(recipe), recipe)))
    if builder.matcher and (problems := [*builder.matcher.problems()]):
        raise SpecError(problems)
    return (each for item in asked for each in found[item.name])


def text_of(file: Path) -> str:
    """The golden text of a study: the first variant whole, of the others the lines that differ from it."""
    study = load_study(file)
    name = file.relative_to(ROOT).as_posix()
    parts = [
        f"{name}{f', scale {study.scale}' if study.scale else ''}: what its variants are. Written by `make golden`."
    ]
    first: dict[str, str] = {}
    for item, recipe, built in resolved(study):
        if isinstance(built, SpecError):
            parts += ["", f"== {item.name}", f"left out: {built.problems[0].message}"]
            continue
        lines = dict([*_lines(canonical(built.model), "model"), *_lines(canonical(recipe), "train")])
        parts += ["", f"== {item.name}"]
        parts += [f"{path}: {value}" for path, value in lines.items() if first.get(path) != value]
        parts += [f"{path}: gone" for path in first if path not in lines]
        first = first or lines
    return "\n".join(parts) + "\n"


def _lines(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every field of a spec as path and value; a list of primitives is one value, a list of branches is not."""
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _lines(child, f"{path}.{name}")
    elif isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        for item in value:
            yield from _lines({key: child for key, child in item.items() if key != "name"}, f"{path}.{item['name']}")
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def row_of(file: Path) -> str:
    """The row of a study in the list: its question, scales, trials at the first scale, time of one core, paper."""
    study = load_study(file)
    built = [(recipe, model) for _, recipe, model in resolved(study) if not isinstance(model, SpecError)]
    points = len(study.tune.points) if study.tune else 1
    each = points - 1 + most(study.seeds)
    trials = each * len(built)
    flops = sum(3 * model.figures["flops_per_token"] * recipe.all_tokens * each for recipe, model in built)
    if study.search:
        more = study.search.trials + study.search.found * (most(study.seeds) - 1)
        flops *= (more + trials) / trials
        trials += more
    if study.screen:
        trials += len(built)  # a probe of each
    name = file.relative_to(STUDIES).as_posix()
    scales = ", ".join(study.scales) or "one"
    paper = f"{', '.join(f'`{name}`' for name in study.report.published.table)}" if study.report.published else ""
    minutes = max(1, round(flops / _FLOPS / 60))
    time = f"{minutes}" if minutes < _PLANNED else "plan alone"
    return f"| [{name}]({name}) | {study.question} | {scales} | {trials} | {time} | {paper} |"


def page_of(text: str) -> str:
    """The page with its list written anew."""
    before, _, rest = text.partition(BEGIN)
    header = "| study | question | scales | trials | minutes | beside it |\n|---|---|---|---|---|---|\n"
    return before + BEGIN + header + "\n".join(map(row_of, files())) + "\n" + END + rest.partition(END)[2]


def write() -> None:
    """Writes every golden text and the list, and removes the texts of studies that are gone."""
    for old in set(GOLDEN.glob("**/*.txt")) - set(map(golden_of, files())):
        old.unlink()
    for file in files():
        golden_of(file).parent.mkdir(parents=True, exist_ok=True)
        golden_of(file).write_text(text_of(file))
    PAGE.write_text(page_of(PAGE.read_text()))


if __name__ == "__main__":
    write()
