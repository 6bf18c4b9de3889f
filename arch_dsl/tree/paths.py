"""Paths into a spec: `block.attention.query`, `block.*.pre`, `block.attention.sdpa.gate.activation`.

A step is a field, a branch name, a position in a site, or the type of a primitive in a site.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from archlab.arch_dsl.language.errors import Problem, SpecError, nearest, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_value, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import (
    Family,
    Spec,
    aliases_of,
    alternatives,
    families,
    fields_of,
    marks_of,
    members_of,
    set_marks,
)
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.tree.block import Block, with_type
from archlab.arch_dsl.tree.identity import canonical
from archlab.arch_dsl.tree.overrides import Overrides

Steps = tuple[str, ...]
Change = Callable[[Any, Any], Any]  # (value, annotation) -> new value

EDITS = ("prepend", "append", "remove", "replace", "before")


def stack_at(where: Steps) -> tuple[Steps, Steps]:
    """A path to a block or into one as the path of its stack, () for that of a decoder, and the rest."""
    start = where.index("block")
    return where[:start], where[start:]


def overrides_at(steps: Steps) -> int | None:
    """Where in a path the slice of some overrides stands; None if it leads into none."""
    start = next((index + 1 for index, step in enumerate(steps[:2]) if step == "overrides"), None)
    return start if start is not None and start < len(steps) else None


def names_at(value: Any) -> list[str]:
    """The steps that can follow from a value."""
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, tuple):
        return [item.type for item in value if isinstance(item, Family)]
    if isinstance(value, Spec):
        members = getattr(value, "branches", None)
        own = ["type"] if isinstance(value, Family) else []
        fields = [name for name in fields_of(type(value)) if name != "branches"]
        return [*own, *fields, *(members if isinstance(members, Block) else ())]
    return []


def get(spec: Any, steps: Steps) -> Any:
    """The value at a path. Raises SpecError naming the step that leads nowhere."""
    for index, step in enumerate(steps):
        spec = _child(spec, step, ".".join(steps[: index + 1]))
    return spec


def _child(value: Any, step: str, path: str) -> Any:
    if isinstance(value, Overrides) and step in value:
        return value[step].plain()
    if isinstance(value, Mapping) and step in value:
        return value[step]
    if (index := index_of(value, step)) is not None:
        return value[index]
    if isinstance(value, Spec):
        if step in fields_of(type(value)):
            return getattr(value, step)
        members = getattr(value, "branches", None)
        if isinstance(members, Block) and step in members:
            return members[step]
        if step == "type" and isinstance(value, Family):
            return value.type
    raise SpecError.of(path, unknown(step, "part of this", names_at(value)))


def index_of(items: Any, step: str) -> int | None:
    """The position in a site that a step names, by its number or by the type that stands there."""
    if not isinstance(items, tuple):
        return None
    if step.isdigit():
        return int(step) if int(step) < len(items) else None
    return next((index for index, item in enumerate(items) if isinstance(item, Family) and item.type == step), None)


def update(value: Any, annotation: Any, steps: Steps, change: Change) -> Any:
    """A copy of `value` in which what stands at `steps` is changed. The path must exist."""
    if not steps:
        return change(value, annotation)
    step, rest = steps[0], steps[1:]
    if isinstance(value, Block):
        branch = update(value.get(step), Branch, rest, change)
        return value.without(step) if branch is None else value.set(step, branch)
    if isinstance(value, Mapping):
        return {**value, step: update(value[step], typing.get_args(annotation)[1], rest, change)}
    if isinstance(value, tuple):
        index = index_of(value, step)
        assert index is not None
        item = typing.get_args(next(a for a in alternatives(annotation) if typing.get_origin(a) is tuple))[0]
        return (*value[:index], update(value[index], item, rest, change), *value[index + 1 :])
    assert isinstance(value, Spec)
    fields = fields_of(type(value))
    if step not in fields:
        members = value.branches  # type: ignore[attr-defined]
        return value.replace(branches=update(members, Block, steps, change))
    new = update(getattr(value, step), fields[step].annotation, rest, change)
    return value.replace(**{step: new})


def set_node(root: Spec, steps: Steps, node: Node, problems: list[Problem]) -> Any:
    """A copy of `root` with the value at `steps` set from a node: replaced, or edited if it is a list edit."""
    path = ".".join(steps)
    if (start := overrides_at(steps)) is not None:
        stack = steps[: start - 1]
        return update(root, type(root), stack, lambda old, kind: _set_override(old, steps, start, node, problems))
    if steps[-1] == "type":
        return update(root, type(root), steps[:-1], lambda old, kind: _retype(old, kind, node, path, problems))

    def change(old: Any, annotation: Any) -> Any:
        if annotation is Branch and node.value in (None, "none"):
            return None
        if annotation is Branch and old is None:
            return parse_value(Branch, with_type(steps[-1], node), path, problems)
        if isinstance(old, tuple) and (edit := _edit_of(node)):
            return _edit(old, annotation, edit, node, path, problems)
        if isinstance(old, tuple) and (message := _no_edit(node)):
            return refuse(problems, path, message, node.mark)
        if isinstance(old, Branch) and isinstance(node.value, dict) and "type" not in node.value:
            typed = {"type": Node(old.type), **node.value}
            return parse_value(annotation, Node(typed, node.mark, node.key_marks), path, problems)
        return parse_value(annotation, node, path, problems)

    def changed(old: Any, annotation: Any) -> Any:
        new = change(old, annotation)
        return old if new is INVALID else new  # which must never enter a spec: the problem is noted

    before = len(problems)
    new = update(root, type(root), steps, changed)
    if len(problems) > before:
        return INVALID
    owner = get(new, steps[:-1])
    if node.mark and isinstance(owner, Spec):  # so that a later complaint about a field points at the patch
        set_marks(owner, {**marks_of(owner), steps[-1]: node.mark})
    return new


def _set_override(stack: Any, steps: Steps, start: int, node: Node, problems: list[Problem]) -> Any:
    """The stack with one slice of its overrides set, whole or at one path of its patch."""
    layers, inner = steps[start], ".".join(steps[start + 1 :])
    new = stack.overrides.set(layers, inner, node)
    before = len(problems)
    Overrides.parse_node(Node({layers: new[layers]}, node.mark), ".".join(steps[:start]), problems)
    return stack.replace(overrides=new) if len(problems) == before else stack


def _retype(old: Any, annotation: Any, node: Node, path: str, problems: list[Problem]) -> Any:
    """Another member of the family; the fields that both have keep their values."""
    kinds = families(annotation)
    probe: list[Problem] = []
    found = parse_value(annotation, Node({"type": node}, node.mark), path.removesuffix(".type"), probe)
    missing = [problem for problem in probe if not problem.message.startswith("is missing")]
    if missing or not kinds:
        problems.extend(missing)
        return old
    name, implied = aliases_of(kinds).get(str(node.value), (str(node.value), {}))
    member = members_of(kinds)[name]
    before = fields_of(type(old))
    shared = {
        name: _allowed(getattr(old, name), field.annotation, before[name].annotation)
        for name, field in fields_of(member).items()
        if name in before and name not in implied and getattr(old, name) != before[name].default
    }
    shared = {name: value for name, value in shared.items() if value is not INVALID}
    try:
        return found.replace(**shared) if found is not INVALID else member(**shared)
    except TypeError:
        problems.extend(probe)
        return old


def _allowed(value: Any, annotation: Any, before: Any) -> Any:
    """What another member's field can hold of a value: of a site the items that may stand there; INVALID if nothing."""
    if annotation == before:
        return value
    parsed = parse_value(annotation, Node.of(canonical(value)), "", [])
    if parsed is not INVALID:
        return value if parsed == value else parsed
    if not isinstance(value, tuple) or len(value) < 2:
        return INVALID
    return tuple(item for item in value if _allowed((item,), annotation, before) is not INVALID) or INVALID


def is_edit(node: Node) -> bool:
    """Whether a node edits a list rather than sets it."""
    return _edit_of(node) is not None


def _edit_of(node: Node) -> str | None:
    if isinstance(node.value, dict) and len(node.value) == 1:
        key = next(iter(node.value))
        return key if key in EDITS else None
    return None


def _no_edit(node: Node) -> str | None:
    """What is wrong with a mapping that is meant as an edit of a list and is none."""
    if not isinstance(node.value, dict) or "type" in node.value:
        return None
    edits = [name for name in node.value if name in EDITS]
    if len(edits) > 1:
        return f"holds {' and '.join(edits)}: one edit at a time, each in a mapping of its own in the list of a variant"
    meant = {name: nearest(name, EDITS, 0.8) for name in node.value if name not in EDITS}
    return next((unknown(name, "edit of a list", EDITS) for name, edit in meant.items() if edit), None)


def _edit(old: tuple[Any, ...], annotation: Any, edit: str, node: Node, path: str, problems: list[Problem]) -> Any:
    """`{append: X}`, `{prepend: X}`, `{remove: TYPE}` (or types), `{replace: {TYPE: X}}`, `{before: {TYPE: X}}`."""
    assert isinstance(node.value, dict)
    given = node.value[edit]

    def parsed(item: Node) -> Any:
        return parse_value(annotation, item, path, problems)

    if edit in ("append", "prepend"):
        new = parsed(given)
        return new if new is INVALID else (*old, *new) if edit == "append" else (*new, *old)
    if edit == "remove":
        items = given.value if isinstance(given.value, list) else [given]
        if strange := [item for item in items if not isinstance(item.value, str | int)]:
            message = f"remove needs the type of what is there, or a list of types, found {strange[0].kind}"
            return refuse(problems, path, message, strange[0].mark)
        targets: Iterable[tuple[str, Node]] = [(str(item.value), item) for item in items]
    elif isinstance(given.value, dict):
        targets = given.value.items()
    else:
        return refuse(problems, path, f"{edit} needs a mapping from what is there to what is new", given.mark)
    for name, item in targets:
        index = index_of(old, name)
        if index is None:
            what = "put it before" if edit == "before" else edit
            message = f"nothing to {what}: {unknown(name, 'primitive here', names_at(old))}"
            return refuse(problems, path, message, item.mark)
        new = () if edit == "remove" else parsed(item)
        if new is INVALID:
            return INVALID
        old = (*old[:index], *new, *old[index + (edit != "before") :])
    return old
