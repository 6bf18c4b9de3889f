"""Values of a study that are replaced for one command, by dotted path, as `--set` does; and where several values go."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import fields_of
from archlab.arch_dsl.model.model import DecoderModel, EncoderDecoderModel
from archlab.search.recipe.recipe import Recipe

# sections whose keys are paths themselves, after so many steps: `grid.train.batch`, `variants.gated.block.ffn.width`
_PATHS = {"grid": 1, "space": 1, "tune": 1, "variants": 2, "components": 2, "recipes": 2}
_LISTS = ("tune", "grid", "evaluate", "plugins")  # which take several values where they stand
_SWEEP = re.compile(r"(?:choice|range|interval)\((.*)\)|([^\s,\[\]{}]+(?:,[^\s,\[\]{}]+)+)")


def overridden(node: Node, dotted: str, value: Node) -> Node:
    """A study's tree with a value at a path. Raises SpecError for a path through a value that has no parts."""
    return _set(node, dotted.split("."), value, dotted, _PATHS.get(dotted.partition(".")[0], -1))


def _set(node: Node, steps: list[str], value: Node, dotted: str, until: int) -> Node:
    """`until`: how many steps are left until keys are paths; below 0 where none are."""
    if not steps:
        return value
    if node.value is None and until == 0:
        node = Node({}, node.mark)  # a variant that changes nothing
    if isinstance(node.value, list) and steps[0] in map(str, range(len(node.value))):
        items = [*node.value]
        items[int(steps[0])] = _set(items[int(steps[0])], steps[1:], value, dotted, until - 1)
        return Node(items, node.mark)
    if not isinstance(node.value, dict):
        listed = isinstance(node.value, list) and node.value
        what = f"a list, of which the parts are 0 to {len(listed) - 1}" if listed else "a value that has no parts"
        raise SpecError.of(dotted, f"leads into {what}", node.mark)
    rest = ".".join(steps)
    # a path is itself a key: `grid.train.batch`, `model.block.attention.heads` where the model is one of the zoo
    if rest in node.value or ("zoo" in node.value and steps[0] not in node.value):
        steps = [rest]
    elif until == 0:
        parts = [key for key, child in node.value.items() if isinstance(child.value, dict)]
        key = max((key for key in parts if rest.startswith(f"{key}.")), key=len, default="")
        steps = [key, *rest[len(key) + 1 :].split(".")] if key else [rest]
    child = node.value.get(steps[0], Node({}))
    new = {**node.value, steps[0]: _set(child, steps[1:], value, dotted, until - 1)}
    return Node(new, node.mark, {k: v for k, v in node.key_marks.items() if k != steps[0]})


def without_effect(node: Node, overrides: Mapping[str, Any]) -> Iterator[Problem]:
    """The values that were set in `train` or `model` where every variant has those of the study's `tune` or `grid`."""
    sections = node.value if isinstance(node.value, dict) else {}
    for path, value in overrides.items():
        names = {"lr", path} if path == "train.lr" else {path, path.removeprefix("model.")}
        for section in ("tune", "grid"):
            tried = sections[section].value if section in sections else None
            for name in names.intersection(tried if isinstance(tried, dict) else ()):
                told = f"{section}.{name}"
                more = (
                    f"would be ignored: every variant has the values of `{told}`; set these: --set '{told}=[{value}]'"
                )
                yield Problem(path, more)


def place_of(dotted: str) -> Mark:
    """Where a value stands that was set for one command: in no line of a file."""
    return Mark(f"<--set {dotted}>", 0, 0, "")


def explained(problems: Iterable[Problem], overrides: Mapping[str, Any], search: bool = False) -> list[Problem]:
    """The problems, of which those with a value that was set say where it belongs: to another path, or, if there are
    several, into a section that tries each. `search`: whether a search makes the variants."""
    return [_explained(problem, overrides, search) for problem in problems]


def _explained(problem: Problem, overrides: Mapping[str, Any], search: bool) -> Problem:
    for path, value in overrides.items():
        head = path.partition(".")[0]
        whole = _whole(path) if problem.path == head and "is not a key of study" in problem.message else None
        if whole:
            message = f"is no key of a study; did you mean `{whole}`?{_several(whole, value, search)}"
            return dataclasses.replace(problem, path=path, message=message, mark=None)
        if problem.path == path and (more := _several(path, value, search)):
            said = problem.message.partition("; `tune:")[0]  # which is told with the values here
            return dataclasses.replace(problem, message=said + more)
    return problem


def _whole(path: str) -> str | None:
    """The path of a study that is meant by one that begins below `train` or `model`."""
    head = path.partition(".")[0]
    homes = [
        home
        for home, kinds in (("train", (Recipe,)), ("model", (DecoderModel, EncoderDecoderModel)))
        if any(head in fields_of(kind) for kind in kinds)
    ]
    return f"{homes[0]}.{path}" if len(homes) == 1 else None


def _several(path: str, value: Any, search: bool) -> str:
    """Where several values belong that were set at a path of one; "" for a single value."""
    values = [*_values(value)]
    if not values or path in ("seeds", "study", "question"):
        return ""
    listed = f"[{', '.join(values)}]"
    head, _, rest = path.partition(".")
    if head in _LISTS:
        return f"; several values stand in brackets: --set '{path}={listed}'"
    if path == "train.lr":
        more = f"; several rates are `tune: {{lr: {listed}}}`, of which each variant gets its best"
        return f"{more} (for one command: --set 'tune.lr={listed}')"
    if head in ("train", "model"):
        own = path if head == "train" else rest
        if search:
            return f"; several values are an axis of the search: `space: {{{own}: {{choice: {listed}}}}}`"
        more = f"; several values are `grid: {{{own}: {listed}}}`, which trains every variant with each"
        return f"{more} (for one command: --set 'grid.{own}={listed}')"
    if head in ("scale", "resources"):
        return f"; a command takes one value: run it with --set '{path}={values[0]}', then with the next"
    return ""


def _values(value: Any) -> Iterator[str]:
    """The values of a list, or of what other programs read as one: `64,128`, `choice(64,128)`; none of one value."""
    if isinstance(value, list | tuple):
        yield from (each if isinstance(each, str) else json.dumps(each) for each in value)
    elif isinstance(value, str) and (found := _SWEEP.fullmatch(value)):
        yield from (each.strip() for each in (found[1] or found[2] or "").split(",") if each.strip())
