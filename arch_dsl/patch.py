"""A patch changes a spec by paths: a value replaces, a list edit edits, a knob turns its sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from arch_dsl.errors import Mark, Problem, SpecError, unknown
from arch_dsl.knobs import Knob, knobs_of
from arch_dsl.parse import INVALID
from arch_dsl.paths import Steps, get, names_at, set_node
from arch_dsl.source import Node
from arch_dsl.spec import Spec

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True)
class Setting:
    """One change of a patch: where, to what, and which component or variant asks for it."""

    path: str
    node: Node
    source: str = ""
    mark: Mark | None = None


def settings_of(node: Node, source: str = "") -> list[Setting]:
    """The changes of a mapping from paths to values."""
    if node.value is None:
        return []
    if not isinstance(node.value, dict):
        raise SpecError.of(source, f"a patch is a mapping from paths to values, found {node.kind}", node.mark)
    return [Setting(path, child, source, node.key_marks.get(path, child.mark)) for path, child in node.value.items()]


def patch(spec: S, changes: Mapping[str, Any] | Node) -> S:
    """A copy of `spec` with these paths changed. Raises SpecError for a path that matches nothing or a value that
    does not fit; `spec` is not touched."""
    return apply(spec, settings_of(Node.of(changes)))


def apply(spec: S, settings: Iterable[Setting]) -> S:
    """A copy of `spec` with these changes made in order.

    Setting one path twice is an error, and so is setting a path after a part of it: the first would be lost.
    """
    problems: list[Problem] = []
    done: dict[Steps, Setting] = {}
    current: Any = spec
    for setting in settings:
        try:
            targets = _expand(current, tuple(setting.path.split(".")), setting)
        except SpecError as error:
            problems.extend(error.problems)
            continue
        for steps in targets:
            if clash := _clash(done, steps, setting):
                problems.append(clash)
                continue
            done[steps] = setting
            new = _apply_one(current, steps, setting, problems)
            current = current if new is INVALID else new
    if problems:
        raise SpecError(problems)
    return current  # type: ignore[no-any-return]


def _clash(done: dict[Steps, Setting], steps: Steps, setting: Setting) -> Problem | None:
    for other, first in done.items():
        if other[: len(steps)] == steps:
            by = f" by {first.source}" if first.source and first.source != setting.source else ""
            at = f" on line {first.mark.line}" if first.mark else ""
            what = "is set twice: it was set" if other == steps else f"would undo {'.'.join(other)}, which was set"
            return Problem(".".join(steps), f"{what}{by}{at}", setting.mark)
    return None


def _expand(root: Any, steps: Steps, setting: Setting) -> list[Steps]:
    """The concrete paths that a path with `*` matches; at least one."""
    found: list[Steps] = [()]
    for step in steps:
        following = []
        tried: dict[str, None] = {}
        for prefix in found:
            value = _value_at(root, prefix)
            names = [*names_at(value), *knobs_of(value)]
            tried.update(dict.fromkeys(names))
            if step == "*":
                following += [(*prefix, name) for name in names_at(value)]
            elif step in names or isinstance(value, dict) or _is_index(value, step):
                following.append((*prefix, step))
            elif "*" not in steps:
                where = ".".join(prefix) or f"the {getattr(root, 'title', 'spec')}"
                message = f"matches nothing: in {where}, {unknown(step, 'name', names)}"
                raise SpecError.of(setting.path, message, setting.mark)
        if not following:
            raise SpecError.of(setting.path, f"matches nothing: {unknown(step, 'name there', tried)}", setting.mark)
        found = following
    return found


def _is_index(value: Any, step: str) -> bool:
    return isinstance(value, tuple) and step.isdigit() and int(step) < len(value)


def _value_at(root: Any, steps: Steps) -> Any:
    """What stands at a path; a knob's plain data inside a knob."""
    value: Any = root
    for index, step in enumerate(steps):
        if knob := knobs_of(value).get(step):
            data = knob.read(root, steps[:index])
            if data is None:
                raise SpecError.of(".".join(steps), f"the sites hold more than this knob can say; set {step} whole")
            inner: Any = {"type": data} if isinstance(data, str) else dict(data)
            for name in steps[index + 1 :]:
                inner = inner.get(name, {})
            return inner
        value = get(value, (step,))
    return value


def _knob_in(root: Any, steps: Steps) -> tuple[Knob, int] | None:
    value: Any = root
    for index, step in enumerate(steps):
        if knob := knobs_of(value).get(step):
            return knob, index
        value = get(value, (step,))
    return None


def _apply_one(root: Any, steps: Steps, setting: Setting, problems: list[Problem]) -> Any:
    found = _knob_in(root, steps)
    if found is None:
        return set_node(root, steps, setting.node, problems)
    knob, index = found
    where, inside = steps[:index], steps[index + 1 :]
    node = setting.node
    if inside:
        data = knob.read(root, where)
        word = {} if knob.name == "gate" else {"type": data}
        base = word if isinstance(data, str) else data
        if inside == ("type",):
            base = {name: value for name, value in base.items() if name in ("placement", "position")}
        place = setting.mark or node.mark
        node = Node({**Node.of(base).value, inside[0]: node}, node.mark, {inside[0]: place} if place else {})  # type: ignore[dict-item]
    return knob.turn(root, where, node, ".".join(steps[: index + 1]), problems)
