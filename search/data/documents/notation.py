"""How data is spelt: `{jsonl: "*.jsonl", field: body}` stands for `{type: jsonl, files: "*.jsonl", field: body}`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Family
from archlab.arch_dsl.tree.identity import canonical


def long_form(node: Node, members: Collection[str], main: str) -> Node:
    """A mapping whose first member's name is a key, as one with `type`: what stands there is `main` or the fields.

    Anything else is returned as it is. A mapping of one key says its type, whether or not there is such a member.
    """
    value = node.value
    if not isinstance(value, dict) or not value or "type" in value:
        return node
    name = next((key for key in value if key in members), None)
    if name is None:
        if len(value) > 1:
            return node
        (name,) = value
    child = value[name]
    fields = {key: item for key, item in value.items() if key != name}
    marks = {key: mark for key, mark in node.key_marks.items() if key != name}
    kind = Node(name, node.key_marks.get(name, node.mark))
    if isinstance(child.value, dict):
        return Node({"type": kind, **child.value, **fields}, node.mark, {**child.key_marks, **marks})
    given = {} if child.value is None else {main: child}
    marks |= {main: child.mark} if child.mark else {}
    return Node({"type": kind, **given, **fields}, node.mark, marks)


def plain(spec: Family) -> dict[str, Any]:
    """A source or tokenizer as JSON data, `type` and `version` first; later fields are left out at their defaults."""
    return {"type": spec.type, "version": spec.version, **canonical(spec)}
