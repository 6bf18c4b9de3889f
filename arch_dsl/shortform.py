"""The short form of a model: knobs beside branches, expanded into sites while the file is read."""

from __future__ import annotations

import re
from typing import Any

from arch_dsl.block import Block
from arch_dsl.errors import Mark, Problem
from arch_dsl.families import Branch
from arch_dsl.knobs import KNOBS, Knob
from arch_dsl.parse import INVALID, parse_record
from arch_dsl.paths import Steps
from arch_dsl.source import Node
from arch_dsl.spec import Spec

Found = list[tuple[Knob, Steps, Node, Mark | None]]


def parse_with_knobs(cls: type[Spec], node: Node, path: str, problems: list[Problem]) -> Any:
    """A model from sites, knobs, or both. A knob beside the sites that it stands for is a contradiction."""
    found: Found = []
    if isinstance(node.value, dict) and isinstance(node.value.get("block"), Node):
        block = _strip(node.value["block"], Block, ("block",), found)
        node = Node({**node.value, "block": block}, node.mark, node.key_marks)
    model = parse_record(cls, node, path, problems)
    if model is INVALID:
        return model
    for knob, where, value, mark in found:
        full = ".".join((*([path] if path else []), *where, knob.name))
        if site := knob.occupied(model, where):
            message = f"stands for {site}, which is given too; give one of them"
            problems.append(Problem(full, message, mark))
            continue
        turned = knob.turn(model, where, value, full, problems)
        model = model if turned is INVALID else turned
    return model


def _strip(node: Node, holder: type, where: Steps, found: Found) -> Node:
    """The node without its knobs, which are entered in `found`: a block's first, then those of its branches."""
    if not isinstance(node.value, dict):
        return node
    names = {knob.name: knob for knob in KNOBS if issubclass(holder, knob.holder)}
    kept: dict[str, Node] = {}
    for name, child in node.value.items():
        if name in names:
            found.append((names[name], where, child, node.key_marks.get(name)))
        else:
            kept[name] = child
    for name, child in kept.items():
        if holder is Block or (holder is Branch.members["parallel"] and isinstance(child.value, dict)):
            kept[name] = _strip(child, _branch_type(name, child), (*where, name), found)
    return Node(kept, node.mark, node.key_marks)


def _branch_type(name: str, node: Node) -> type:
    """The class of a branch as its node or its name says; Branch itself where neither does."""
    given = node.value.get("type") if isinstance(node.value, dict) else None
    kind = given.value if given is not None else re.sub(r"_[0-9]+$", "", name)
    found: type = Branch.members.get(str(kind), Branch)
    return found
