"""Several recipes that every variant is trained under: the `recipes:` section of a study.

    recipes: {as is: {}, long warm-up: {schedule.warmup: 0.2}, small batches: {batch: 2, lr: 2e-3}}

Paths are those of `train`; of the model a recipe may change how it starts, `model.init`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.parse import INVALID, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.patching.patch import Setting, apply, settings_of
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.sections.recipes.average import AXIS
from archlab.search.utils.canonical import canonical_json
from archlab.search.variants.asks import Planned, Question
from archlab.search.variants.patches import spelt
from archlab.search.variants.section import Section

_NAME = re.compile(r"[^\s\[\],=]+( [^\s\[\],=]+)*")
_START = "model.init"


@dataclass(frozen=True)
class Named:
    """What one recipe changes, by paths of a whole study: `train.batch`, `init.std`."""

    settings: tuple[Setting, ...]


class Recipes(Section):
    """Crosses all variants with recipes. Each recipe has its own baseline, and its own tuned values."""

    key = "recipes"
    title: ClassVar[str] = "recipes"
    named: dict[str, Named] = field(default_factory=dict)

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping of names to mappings of paths."""
        if not isinstance(node.value, dict) or len(node.value) < 2:
            found = f"{len(node.value)}" if isinstance(node.value, dict) else node.kind
            return refuse(problems, path, f"must be a mapping of at least two recipes, found {found}", node.mark)
        before, named = len(problems), dict[str, Named]()
        for name, child in node.value.items():
            place, mark = f"{path}.{name}", node.key_marks.get(name, child.mark)
            if not _NAME.fullmatch(name) or len(name) > 40:
                message = "is no name of a recipe: 1 to 40 characters, words and single spaces, none of []=,"
                refuse(problems, place, message, mark)
            elif not isinstance(child.value, dict | None):
                refuse(problems, place, f"must be a mapping of paths of `train`, found {child.kind}", child.mark)
            else:
                named[name] = Named(tuple(recipe_settings(name, child, place, problems)))
        return INVALID if len(problems) > before else cls(named=named)

    def crossing(self) -> Iterator[list[tuple[str, tuple[Setting, ...]]]]:
        yield [(f"{AXIS}={name}", each.settings) for name, each in self.named.items()]

    def problems(self, study: Question) -> Iterator[Problem]:
        """A recipe must be one, differ from the others, and leave to `tune` and `grid` what these vary."""
        if study.search is not None:
            message = "a search takes its variants from `space:`; vary the recipe there"
            yield Problem(self.key, message, study.mark(self.key))
        seen: dict[str, str] = {}
        for name, each in self.named.items():
            for setting in each.settings:
                if why := _varied_elsewhere(setting.path, study):
                    yield Problem(f"{self.key}.{name}.{_short(setting.path)}", why, setting.mark)
            try:
                key = meaning(each.settings, study)
            except SpecError as error:
                yield from (replace(p, path=f"{self.key}.{name}.{_short(p.path)}") for p in error.problems)
                continue
            if (first := seen.setdefault(key, name)) != name:
                mark = next((s.mark for s in each.settings), None) or study.mark(self.key)
                yield Problem(f"{self.key}.{name}", f"is the same recipe as '{first}'; a table needs each once", mark)

    def record(self, planned: Planned) -> dict[str, Any]:
        """What each recipe changes; for every variant its row, and the recipe that it stands under."""
        named = {name: {_short(s.path): s.node.plain() for s in each.settings} for name, each in self.named.items()}
        rows = {}
        for variant in planned.variants:
            cell = [f"{axis}={value}" for axis, value in variant.axes.items() if axis != AXIS]
            others = ", ".join([*cell, *filter(None, [variant.rung])])
            rows[variant.name] = [f"{variant.base} [{others}]" if others else variant.base, variant.axes[AXIS]]
        return {"named": named, "rows": rows}

    def lines(self, planned: Planned) -> Iterable[str]:
        """Which recipes there are."""
        yield f"under {len(self.named)} recipes, each with its own baseline:"
        for name, each in self.named.items():
            changes = spelt(replace(setting, path=_short(setting.path)) for setting in each.settings)
            yield f"  {name}: {', '.join(changes) or 'as `train` says'}"

    @classmethod
    def edited(cls, before: Any, now: Any) -> Iterable[str]:
        old, new = ((each or {}).get("named", {}) for each in (before, now))
        for name in old.keys() | new.keys():
            if old.get(name) != new.get(name):
                what = "is new" if name not in old else "has changed" if name in new else "is gone"
                yield f"the recipe '{name}' {what}"


def recipe_settings(name: str, node: Node, path: str, problems: list[Problem]) -> Iterator[Setting]:
    """What a recipe sets, by paths of the study."""
    for setting in settings_of(node, f"recipe {name}"):
        if setting.path == _START or setting.path.startswith(f"{_START}."):
            yield replace(setting, path=setting.path.removeprefix("model."))
        elif setting.path.startswith("train."):
            message = f"write '{setting.path.removeprefix('train.')}': the paths of a recipe are those of `train`"
            refuse(problems, f"{path}.{setting.path}", message, setting.mark)
        elif not setting.path or setting.path.split(".")[0] in ("model", "block", "train"):
            message = (
                f"is no path of `train`; of the model a recipe may change `{_START}` alone, variants change the rest"
            )
            refuse(problems, f"{path}.{setting.path}", message, setting.mark)
        else:
            yield replace(setting, path=f"train.{setting.path}")


def _short(path: str) -> str:
    """A path as a recipe writes it."""
    return path.removeprefix("train.") if path.startswith("train.") else f"model.{path}"


def _varied_elsewhere(path: str, study: Question) -> str:
    """Why a recipe must not set a path, if it must not."""
    if study.tune is not None and path in study.tune.axes:
        return "`tune` chooses it for every variant; this one would be ignored"
    return "is an axis of the grid already" if path in study.grid else ""


def meaning(settings: Iterable[Setting], study: Question) -> str:
    """What recipe and start these changes make, to hold them against others. Raises SpecError."""
    mine = [replace(s, path=s.path.removeprefix("train.")) for s in settings if s.path.startswith("train.")]
    try:
        recipe = apply(study.train, mine)
    except SpecError as error:
        raise SpecError(replace(problem, path=f"train.{problem.path}") for problem in error.problems) from error
    model = apply(study.model, [s for s in settings if not s.path.startswith("train.")])
    return canonical_json([recipe.told(), canonical(model.init)])
