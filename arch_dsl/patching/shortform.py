"""The short form of a model: knobs beside branches, expanded into sites while the file is read."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from archlab.arch_dsl.language.errors import Mark, Problem
from archlab.arch_dsl.language.parse import INVALID, parse_record
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Spec
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.patching.knobs import KNOBS
from archlab.arch_dsl.primitives.groups import Group
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.knob import Knob
from archlab.arch_dsl.tree.paths import Steps


class Written(NamedTuple):
    """A knob as a file has it: where, its value, and what else is written there; of a block also beside it."""

    knob: Knob
    where: Steps
    node: Node
    mark: Mark | None
    beside: frozenset[str]


Found = list[Written]


def parse_with_knobs(cls: type[Spec], node: Node, path: str, problems: list[Problem]) -> Any:
    """A model from sites, knobs, or both. A knob beside the sites that it stands for is a contradiction."""
    found: Found = []
    if isinstance(node.value, dict) and isinstance(node.value.get("block"), Node):
        names = frozenset(node.value)
        block = _strip(node.value["block"], Block, ("block",), found)
        node = Node({**node.value, "block": block}, node.mark, node.key_marks)
        beside = [each.beside | names if each.where == ("block",) else each.beside for each in found]
        found = [each._replace(beside=written) for each, written in zip(found, beside, strict=True)]
    return turn(parse_record(cls, node, path, problems), found, path, problems)


def strip(node: Node, value: Any, where: Steps, found: Found) -> Node:
    """The node of what will replace `value`, a block or a branch at `where`, without its knobs."""
    implied = value.type if isinstance(value, Branch) else _family(where[-1])
    return _strip(node, Block if isinstance(value, Block) else _branch_type(node, implied), where, found)


def turn(model: Any, found: Found, path: str, problems: list[Problem]) -> Any:
    """The model with these knobs turned, unless it is INVALID: then their values are only checked."""
    turned: list[tuple[Knob, Steps, str, Mark | None, Any]] = []
    occupied = [None if model is INVALID else _occupied(model, each) for each in found]
    for (knob, where, node, mark, _), site in zip(found, occupied, strict=True):
        full = ".".join((*([path] if path else []), *where, knob.name))
        value = knob.parse(node, full, problems)
        if site is None and value is not INVALID and model is not INVALID:
            site = knob.replaces(model, where, value)
        if site is not None:
            problems.append(Problem(full, f"stands for {site}, which is given too; give one of them", mark))
        elif value is not INVALID and model is not INVALID:
            model = knob.put(model, where, value)
            turned.append((knob, where, full, mark, knob.read(model, where)))
    for knob, where, full, mark, value in turned:
        if knob.read(model, where) != value:
            message = f"another '{knob.name}' sets the same site to something else; write the sites instead"
            problems.append(Problem(full, message, mark))
    return model


def _occupied(model: Any, written: Written) -> str | None:
    """The path of a site that was written and holds what a knob stands for. What a type has by itself, or the model
    that a block is put into, the knob replaces."""
    site = written.knob.occupied(model, written.where)
    if site is None:
        return None
    inside = site.removeprefix(".".join(written.where) + ".")
    if inside == site:  # of the model beside the block, where a branch's own knob has no say
        return site if issubclass(written.knob.holder, Branch) or site.rpartition(".")[2] in written.beside else None
    return site if inside.split(".")[0] in written.beside else None


def _strip(node: Node, holder: type, where: Steps, found: Found) -> Node:
    """The node without its knobs, which are entered in `found`: a block's first, then those of its branches."""
    if not isinstance(node.value, dict):
        return node
    names = {knob.name: knob for knob in KNOBS if issubclass(holder, knob.holder)}
    kept = {name: child for name, child in node.value.items() if name not in names}
    for name, child in node.value.items():
        if name in names:
            found.append(Written(names[name], where, child, node.key_marks.get(name), frozenset(kept)))
    for name, child in kept.items():
        if holder is Block or (issubclass(holder, Group) and isinstance(child.value, dict)):
            holder_of_child = _branch_type(child, _family(name))
            kept[name] = _strip(child, holder_of_child, (*where, name), found)
    return Node(kept, node.mark, node.key_marks)


def _family(name: str) -> str:
    """What a branch of this name is, where it does not say: `ffn` of `ffn_2`."""
    return re.sub(r"_[0-9]+$", "", name)


def _branch_type(node: Node, implied: str) -> type:
    """The class of a branch by its own or a published name, which its node says or its place implies; Branch itself by
    another word."""
    given = node.value.get("type") if isinstance(node.value, dict) else None
    name = implied if given is None else str(given.value)
    found: type = Branch.members.get(Branch.aliases[name][0] if name in Branch.aliases else name, Branch)
    return found
