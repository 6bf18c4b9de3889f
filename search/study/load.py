"""A study read from its file: its scale chosen, overrides applied, plug-ins allowed, mistakes told all at once."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from archlab.arch_dsl.language.errors import Problem, SpecError, shorten
from archlab.arch_dsl.language.include import INCLUDE, read_whole, text_of, with_included
from archlab.arch_dsl.language.parse import INVALID, parse_value
from archlab.arch_dsl.language.source import Node, read_text
from archlab.search.sections.design.written_out import with_base, written_out
from archlab.search.sections.ladder.rungs import written_sizes
from archlab.search.sections.ladder.spec import below, filled
from archlab.search.sections.ladder.spec import problems_of as ladder_problems
from archlab.search.sections.search.promotion_spec import with_sizes as sized_promotions
from archlab.search.store.addresses import store_root
from archlab.search.store.plugins import load_listed
from archlab.search.study import calibrated
from archlab.search.study.asked import asked_variants
from archlab.search.study.changes import changed
from archlab.search.study.checks import problems_in, unknown_components
from archlab.search.study.overrides import explained, overridden, place_of, without_effect
from archlab.search.study.scales import at_scale
from archlab.search.study.study import Study, other_sections
from archlab.search.variants.mistakes import Mistakes
from archlab.search.variants.patches import Patch
from archlab.search.variants.section import Section
from archlab.search.variants.zoo import with_sizes

_WRITABLE = (dict, list, str, int, float, bool, type(None), datetime.date, datetime.datetime)


def load_study(
    study: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    allow_plugins: bool = False,
    store: str | Path | None = None,
    text: str | None = None,
) -> Study:
    """A study from its file, or from the same as nested mappings and lists. A `text` stands in the place of what the
    file holds, and need not be saved there. What it includes is merged first. `overrides` replaces values by dotted
    path (`train.tokens`), as `--set` does.

    Of a study with `scales` it is the one at its first, or at the override `scale`; other overrides come after that.
    A calibrated recipe is taken from the `store`. The Python files that it lists under `plugins` are executed if
    `allow_plugins`, and refused otherwise. Raises
    SpecError with everything that is wrong with it, each with line and column.
    """
    own = _text(study) if isinstance(study, Mapping) else ""
    if isinstance(study, Mapping):
        written = with_included(read_text(own, "<study>"), Path())
    else:
        written = read_whole(study, text)
    own = text_of(written) or own or text or ""
    try:
        node = _said(written, overrides or {})
        load_listed(node, Path() if isinstance(study, Mapping) else Path(study).parent, allow_plugins)
        if calibrated.is_asked(node):
            node = calibrated.with_calibrated(node, store_root(store), parse_study)
        parsed = parse_study(node)
        if problems := [*without_effect(node, overrides or {})]:
            raise SpecError(problems)
        return parsed.replace(_written=own)
    except SpecError as error:
        if not overrides:
            raise
        searched = isinstance(written.value, dict) and "search" in written.value
        raise SpecError(explained(error.problems, overrides, searched)) from error


def _said(written: Node, overrides: Mapping[str, Any]) -> Node:
    """A study's tree at the scale that is asked for, with the values that are set for one command. Raises SpecError."""
    node = at_scale(written, Node.of(overrides["scale"]) if "scale" in overrides else None)
    for dotted, value in overrides.items():
        if dotted.partition(".")[0] == INCLUDE:
            message = "can't be set for one command: it is read with the file, before anything is set"
            raise SpecError.of(INCLUDE, message)
        if dotted != "scale":
            node = overridden(node, dotted, Node.of(value, place_of(dotted)))
    return node


def _text(study: Mapping[str, Any]) -> str:
    """The YAML of a mapping. Raises SpecError for a value that a file could not hold."""
    node = Node.of(study)
    if problems := [*_unwritable(node, "")]:
        raise SpecError(problems)
    return str(yaml.safe_dump(node.plain(), sort_keys=False))


def _unwritable(node: Node, path: str) -> Iterator[Problem]:
    """The values of a mapping that no file can hold."""
    inner = node.value if isinstance(node.value, dict | list) else {}
    for key, child in inner.items() if isinstance(inner, dict) else enumerate(inner):
        yield from _unwritable(child, f"{path}.{key}" if path else str(key))
    if type(node.value) not in _WRITABLE:
        found = shorten(repr(node.value))
        yield Problem(path, f"a study holds mappings, lists, texts and numbers; found {found}", node.mark)


def parse_study(node: Node) -> Study:
    """A study from a node tree. Raises SpecError."""
    if not isinstance(node.value, dict):
        raise SpecError.of(
            "", f"a study is a mapping with `study`, `model`, `variants`, `train`; found {node.kind}", node.mark
        )
    if "grid" in node.value and node.value["grid"].value is None:  # as `tune: null` has none of its own
        node = Node({name: child for name, child in node.value.items() if name != "grid"}, node.mark, node.key_marks)
    assert isinstance(node.value, dict)
    problems: list[Problem] = []
    given = set(node.value)
    others, node = _others(with_sizes(with_base(node, problems)), problems)
    parsed = parse_value(Study, filled(node), "", problems)
    if "ablate" in given:
        problems = list(_of_ablate(problems, "model" in given))
    if parsed is INVALID or problems:
        raise SpecError([*problems, *_model_mistakes(node, problems)])
    study: Study
    study, problems = written_out(parsed.replace(_others=others))
    sized = written_sizes(study.ladder, study.model, node, problems)
    if sized is not study.ladder:
        study = study.replace(ladder=sized)
    if study.search and any(each.size for each in study.search.promote or ()):
        promote = sized_promotions(study.search.promote, node, problems)
        study = study.replace(search=study.search.replace(promote=promote))
    if study.search and not study.variants:
        study = study.replace(variants={study.report.baseline: Patch()})
    if problems := [
        *problems,
        *problems_in(study),
        *ladder_problems(study.ladder, study, {*below(node, "train")}),
        *study.train.problems("train"),
    ]:
        raise SpecError([*problems, *_model_mistakes(node, problems)])
    return study


def check(study: Study) -> None:
    """Raises SpecError with what a study gets wrong that was made of another one."""
    if problems := [*problems_in(study)]:
        raise SpecError(problems)


def _others(node: Node, problems: list[Problem]) -> tuple[tuple[Section, ...], Node]:
    """The sections of a study's node that are no fields of Study, and the node without them."""
    assert isinstance(node.value, dict)
    kinds = {name: kind for name, kind in other_sections().items() if name in node.value}
    found = [parse_value(kind, node.value[name], name, problems) for name, kind in kinds.items()]
    rest = {name: child for name, child in node.value.items() if name not in kinds}
    return tuple(each for each in found if each is not INVALID), Node(rest, node.mark, node.key_marks)


def _of_ablate(problems: Iterable[Problem], has_model: bool) -> Iterator[Problem]:
    """The problems of a study with `ablate`, whose own mistakes say why there is no base, and whose `from` is it."""
    for problem in problems:
        head, *rest = problem.path.split(".")
        if head != "model" or has_model:
            yield problem
        elif rest or not problem.message.startswith("is missing"):
            yield dataclasses.replace(problem, path=".".join(["ablate", "from", *rest]))


def _model_mistakes(node: Node, known: list[Problem]) -> list[Problem]:
    """What is wrong with the models of a study whose file has other mistakes already, so that all are said at once."""
    assert isinstance(node.value, dict)
    sections = ("model", "ablate", "components", "design", "variants", "grid")
    if any(problem.path.split(".")[0] in sections for problem in known):
        return []
    kept = {name: node.value[name] for name in sections if name in node.value}
    recipe = Node.of({"tokens": 1, "lr": 1.0})
    named = {"study": Node("named"), "train": recipe}  # its own name may be one of the mistakes
    study = parse_value(Study, Node({**kept, **named}, node.mark, node.key_marks), "", [])
    if study is INVALID:
        return []
    study, problems = written_out(study)
    if problems:
        return []
    if wrong := list(unknown_components(study)):
        return wrong
    asked = asked_variants(study)
    mistakes = Mistakes(len(asked))
    for item in asked:
        if item.impossible != "refuse":
            continue  # left out or repaired when the study is planned
        of_model = [setting for setting in item.settings if not setting.path.startswith("train.")]
        try:
            model, _ = changed(study, of_model, item.rung)
        except SpecError as error:
            mistakes.add(error.problems, item.name)
            continue
        mistakes.add(model.replace(max_positions=model.max_positions or 1).check(), item.name)  # the recipe's, later
    return list(mistakes.problems())
