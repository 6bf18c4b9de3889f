"""A block: named branches in the order in which they are applied."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_value, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.parts.context import BuildContext, Call
from archlab.arch_dsl.parts.families import Branch, build_shared

_NAME = re.compile(r"[a-z][a-z0-9_]*$")


class Block(Mapping[str, Branch]):
    """Branch name to branch. Unlike a dict, two blocks are equal only if their order is."""

    short_forms: ClassVar[tuple[str, ...]] = ("norm", "join")  # knobs that may be written beside the branches
    other_keys: ClassVar[tuple[str, ...]] = ("attention", "ffn")  # names of branches that an error looks for

    def __init__(self, branches: Iterable[tuple[str, Branch]] = ()) -> None:
        self._branches = dict(branches)
        self._hash: int | None = None  # plans compare the blocks of all layers

    def __getitem__(self, name: str) -> Branch:
        return self._branches[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._branches)

    def __len__(self) -> int:
        return len(self._branches)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Block) and list(self.items()) == list(other.items())

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(tuple(self.items()))
        return self._hash

    def __repr__(self) -> str:
        return f"Block({list(self.items())!r})"

    def set(self, name: str, branch: Branch) -> Block:
        """The block with one branch replaced at its place, or a new one at the end."""
        return Block((self._branches | {name: branch}).items())

    def without(self, name: str) -> Block:
        """The block with one branch less."""
        return Block((other, branch) for other, branch in self.items() if other != name)

    def walk(self, *where: str) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Every branch with its path from `where` on, members of groups after their group."""
        for name, branch in self.items():
            yield (*where, name), branch
            members = getattr(branch, "branches", None)
            if isinstance(members, Block):
                yield from members.walk(*where, name)

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping of names, or from a list of branches that say their `name`. The type defaults to the name."""
        if isinstance(node.value, list):
            named = [_named(item) for item in node.value]
            node = Node({name: item for name, item in named if name}, node.mark)
            if len(node.value) < len(named):  # type: ignore[arg-type]
                return refuse(problems, path, "every branch of a list needs a `name` of its own", node.mark)
        if not isinstance(node.value, dict):
            return refuse(problems, path, f"must be a mapping of branches, found {node.kind}", node.mark)
        if not node.value:
            return refuse(problems, path, "needs at least one branch (attention, ffn, parallel)", node.mark)
        return parse_branches(node, path, problems, cls.short_forms)


def parse_branches(node: Node, path: str, problems: list[Problem], knobs: tuple[str, ...] = ()) -> Any:
    """A Block from a mapping node, or INVALID. `knobs` may stand beside the branches where the file is written."""
    branches: list[tuple[str, Any]] = []
    assert isinstance(node.value, dict)
    for name, child in node.value.items():
        where, mark = f"{path}.{name}" if path else name, node.key_marks.get(name)
        typed = with_type(name, child, node)
        if not _NAME.match(name):
            branch = refuse(problems, where, "a branch name is lower-case letters, digits and _", mark)
        elif not isinstance(typed.value, str) and not (isinstance(typed.value, dict) and "type" in typed.value):
            message = f"says no type, and {unknown(name, 'branch', [*Branch.members, *Branch.aliases, *knobs])}"
            branch = refuse(problems, where, message, mark)
        else:
            branch = parse_value(Branch, typed, where, problems)
        branches.append((name, branch))
    return INVALID if any(branch is INVALID for _, branch in branches) else Block(branches)


def _named(item: Node) -> tuple[str | None, Node]:
    """A branch of a list as (its name, the rest)."""
    if not isinstance(item.value, dict) or not isinstance(getattr(item.value.get("name"), "value", None), str):
        return None, item
    rest = {key: value for key, value in item.value.items() if key != "name"}
    return str(item.value["name"].value), Node(rest, item.mark, item.key_marks)


def with_type(name: str, node: Node, parent: Node | None = None) -> Node:
    """Fills in the type that a branch's name implies: `attention` and `attention_2` are attention."""
    implied = re.sub(r"_[0-9]+$", "", name)
    if node.value is None:
        node = Node({}, parent.key_marks.get(name) if parent else None, {})
    if isinstance(node.value, dict) and "type" not in node.value and implied in (*Branch.members, *Branch.aliases):
        return Node({"type": Node(implied, node.mark), **node.value}, node.mark, node.key_marks)
    return node


class Branches(nn.Module):
    """The branches of one layer, applied one after another to the stream `[batch, time, d_model]`."""

    def __init__(self, block: Block, ctx: BuildContext) -> None:
        super().__init__()
        self.path = ctx.path
        for name, branch in block.items():
            self.add_module(name, build_shared(branch, ctx.at(name)))

    def forward(self, stream: Tensor, call: Call) -> Tensor:
        call = call.layer(self.path)
        for branch in self.children():
            stream = branch(stream, call)
        if call.watch is not None:
            call.watch.tell("stream", self.path, call.padding, output=stream)
        return stream
