"""The knob `join: {type, …}` on a block: how the update of every branch comes back to the stream."""

from __future__ import annotations

from functools import partial
from typing import Any

from archlab.arch_dsl.language.parse import INVALID, parse_value
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.parts.families import Join
from archlab.arch_dsl.primitives.branch import Sublayer
from archlab.arch_dsl.primitives.joins import Add, NormJoin
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.identity import canonical
from archlab.arch_dsl.tree.knob import Knob, put_at
from archlab.arch_dsl.tree.paths import Steps, get


def _read_join(root: Any, where: Steps) -> Any:
    """None where branches differ, or where the knob `norm` set their joins."""
    found = {branch.join for branch in get(root, where).values() if isinstance(branch, Sublayer)}
    join = found.pop() if len(found) == 1 else None
    return None if join is None or isinstance(join, NormJoin) else canonical(join, brief=True)


def _put_join(root: Any, where: Steps, join: Join) -> Any:
    block = get(root, where)
    for name, branch in block.items():
        if isinstance(branch, Sublayer):
            block = block.set(name, branch.replace(join=join))
    return put_at(root, where, block)


def _joined(root: Any, where: Steps, value: Any = None) -> str | None:
    """The first branch that has a join of its own."""
    for name, branch in get(root, where).items():
        if isinstance(branch, Sublayer) and branch.join not in (Add(), value):
            return ".".join((*where, name, "join"))
    return None


def joined_alike(before: Any, after: Any, steps: Steps, given: Node) -> Any:
    """The root after a branch at `steps` was set from a node, joined as all branches of its block were before.

    Nothing changes where these are not joined alike, or where the node says a join.
    """
    block = get(before, steps[:-1])
    if not isinstance(block, Block) or after is INVALID or (isinstance(given.value, dict) and "join" in given.value):
        return after
    joins, branch = {getattr(old, "join", None) for old in block.values()}, get(after, steps[:-1]).get(steps[-1])
    join = joins.pop() if len(joins) == 1 else None
    if join is None or isinstance(join, NormJoin) or not isinstance(branch, Sublayer) or branch.join != Add():
        return after
    return put_at(after, steps, branch.replace(join=join))


JOIN = Knob(
    name="join",
    holder=Block,
    doc="how the update of every branch comes back to the stream",
    reader=_read_join,
    parse=partial(parse_value, Join),
    putter=_put_join,
    occupies=_joined,
    displaces=_joined,
    fields=(("type", "a join", "required"), ("…", "the fields of that join", "")),
)
