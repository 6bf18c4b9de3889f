"""One study at several scales: `scales` holds what differs between them, the rest of the file is said once."""

from __future__ import annotations

from collections.abc import Iterator

from archlab.arch_dsl.language.errors import Problem, SpecError, unknown
from archlab.arch_dsl.language.include import INCLUDE, KINDS
from archlab.arch_dsl.language.source import Node


def at_scale(node: Node, scale: Node | None = None) -> Node:
    """The study at one of its `scales`: the one asked for, else its own `scale`, else the first; its name says which.

    A mapping of the scale changes the study's key by key, `null` takes a key out, all else replaces what was there; so
    does a mapping with another `type`. A study without `scales` is returned as it is. Raises SpecError.
    """
    if not isinstance(node.value, dict) or "scales" not in node.value:
        if scale is not None:
            raise SpecError.of("scale", "the study has no `scales`", scale.mark)
        return node
    scales = node.value["scales"]
    if problems := list(_problems(scales)):
        raise SpecError(problems)
    assert isinstance(scales.value, dict)
    asked = scale or node.value.get("scale") or Node(next(iter(scales.value)), scales.mark)
    if isinstance(asked.value, dict | list):
        message = f"must be the name of one scale, found {asked.kind} ({', '.join(scales.value)})"
        raise SpecError.of("scale", message, asked.mark)
    if asked.value not in scales.value:
        raise SpecError.of("scale", unknown(asked.plain(), "scale", scales.value), asked.mark)
    change = scales.value[str(asked.value)]
    found = merged(node, change) if change.value else node
    assert isinstance(found.value, dict)
    fields = {**found.value, "scale": asked}
    if isinstance(name := node.value.get("study", Node(None)).value, str):
        fields["study"] = Node(f"{name}-{asked.value}", node.value["study"].mark)
    return Node(fields, found.mark, found.key_marks)


def merged(node: Node, change: Node) -> Node:
    """A node with a change, as `at_scale` says."""
    none = Node(None)
    if not isinstance(node.value, dict) or not isinstance(change.value, dict):
        return change
    if any(key in change.value and change.value[key].value != node.value.get(key, none).value for key in KINDS):
        return change
    for key, new in change.value.items():
        if new.value is None and key not in node.value:
            message = unknown(key, "key that is there to take out", node.value)
            raise SpecError.of(key, message, change.key_marks.get(key, new.mark))
    changed = {
        key: merged(node.value.get(key, none), item) for key, item in change.value.items() if item.value is not None
    }
    kept = {key: item for key, item in node.value.items() if key in changed or key not in change.value}
    return Node({**kept, **changed}, node.mark, {**node.key_marks, **change.key_marks})


def _problems(scales: Node) -> Iterator[Problem]:
    if not isinstance(scales.value, dict) or not scales.value:
        found = "an empty one" if isinstance(scales.value, dict) else scales.kind
        yield Problem("scales", f"must be a mapping from names to what a scale changes, found {found}", scales.mark)
        return
    for name, change in scales.value.items():
        if not isinstance(change.value, dict | None):
            yield Problem(f"scales.{name}", f"must be a mapping of what it changes, found {change.kind}", change.mark)
            continue
        for key in ("study", "scale", "scales", INCLUDE):
            if change.value and key in change.value:
                mark = change.key_marks.get(key, change.mark)
                yield Problem(f"scales.{name}.{key}", "is the same at every scale; leave it out", mark)
