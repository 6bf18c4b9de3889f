"""A model as a graph: its parts with their costs, what flows between them, and what differs from another model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from archlab.arch_dsl.inspection.text_tree import Line, block_lines, layer_costs, tree
from archlab.arch_dsl.inspection.wiring import Edge, Part, core_of, wires
from archlab.arch_dsl.model.model import Model, cost
from archlab.arch_dsl.model.stack import Stack
from archlab.arch_dsl.parts.context import Cost, NodeChoice
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.overrides import ranges

State = Literal["same", "changed", "added", "removed"]


@dataclass(frozen=True)
class Node:
    """One place of a model: what stands there `now`, and what stood there `before`; None where nothing does.

    Costs are of a forward pass over the tokens of the graph; below a block they are those of one layer. `kernels` are
    the implementations that compute the place.
    """

    path: str
    now: Line | None
    before: Line | None
    nodes: tuple[Node, ...] = ()
    kernels: tuple[NodeChoice, ...] = ()

    @property
    def line(self) -> Line:
        """What stands here, or stood here."""
        found = self.now or self.before
        assert found is not None
        return found

    @property
    def state(self) -> State:
        """How this place differs; a group of parts differs only by what is said of the group itself."""
        if self.before is None or self.now is None:
            return "added" if self.before is None else "removed"
        mine, theirs = (_told(line, not self.nodes) for line in (self.now, self.before))
        return "same" if mine == theirs else "changed"

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """This node and all below it, each with its depth."""
        yield depth, self
        for node in self.nodes:
            yield from node.walk(depth + 1)


def _told(line: Line, alone: bool) -> tuple[object, ...]:
    return (line.what, line.shape, line.cost.parameters) if alone else (line.what,)


@dataclass(frozen=True)
class Graph:
    """A model as a graph. `edges` also hold those to and from what was removed; `total` and `before` are the costs of
    both models over `tokens`, `before` None where there is but one."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    total: Cost
    before: Cost | None
    tokens: int

    def places(self) -> list[tuple[int, Node]]:
        """Every node with its depth, in order."""
        return [found for node in self.nodes for found in node.walk()]


def graph(model: Model, before: Model | None = None, tokens: int = 1024, kernels: Sequence[NodeChoice] = ()) -> Graph:
    """The graph of a resolved model over a sequence of `tokens`; with `before`, also of what differs from that one.

    Layers that are equal in both are drawn once. `kernels` are those of `arch_dsl.kernel_choices`.
    """
    groups = _groups(model, before or model)
    now, old = (_parts(each, groups, tokens) for each in (model, before or model))
    nodes = tuple(_merged(now, old, "", kernels))
    current = wires(now)
    gone = {node.path for top in nodes for _, node in top.walk() if node.state == "removed"}
    lost = [edge for edge in wires(old) if edge not in current and {edge.start, edge.end} & gone]
    return Graph(nodes, (*current, *lost), cost(model, tokens), cost(before, tokens) if before else None, tokens)


@dataclass(frozen=True)
class _Group:
    """Layers that are alike in both models: their name, how many there are, and the first of them in each."""

    name: str
    what: str
    depths: tuple[int, ...]


def _groups(model: Model, before: Model) -> dict[str, list[_Group]]:
    """The groups of layers of each stack, by its name. A layer that only one model has is one of a group of its own."""
    mine, theirs = model.stacks(), before.stacks()
    found = {}
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        first, second = (stacks[name].layers() if name in stacks else [] for stacks in (mine, theirs))
        pairs: dict[tuple[Block | None, Block | None], list[int]] = {}
        for depth, pair in enumerate(zip_longest(first, second)):
            pairs.setdefault(pair, []).append(depth)
        found[name] = [
            _Group(
                "block" if len(pairs) == 1 else f"block[{ranges(depths)}]",
                f"{len(depths)} layer{'s' * (len(depths) > 1)}",
                tuple(depths),
            )
            for depths in pairs.values()
        ]
    return found


def _parts(model: Model, groups: dict[str, list[_Group]], tokens: int) -> list[Part]:
    """The tree of one model, whose layers stand in the groups that both models have."""
    total, stacks = cost(model, tokens), model.stacks()
    found: list[Part] = []
    for part in _nested(tree(model, tokens)[1:], ""):
        if part.name == "block":
            found += _layers(stacks[""], total, groups[""], "")
        elif part.name in stacks:
            own = _layers(stacks[part.name], total.children[part.name], groups[part.name], f"{part.name}.")
            inner = [each for one in part.parts for each in (own if one.name == "block" else [one])]
            found.append(Part(part.name, part.line, inner, part.name))
        else:
            found.append(part)
    return found


def _layers(stack: Stack, total: Cost, groups: list[_Group], at: str) -> list[Part]:
    """The groups of layers that a stack has, each with its first layer's parts."""
    costs, blocks = layer_costs(total.children["stack"]), stack.layers()
    found = []
    for group in groups:
        first = group.depths[0]
        if first < len(blocks):
            each = {str(depth): costs.get(depth, costs[0]) for depth in group.depths if depth < len(blocks)}
            line = Line(0, group.name, group.what, "[B,T,D]", Cost.total(each))
            place = f"{at}block.{first}"
            lines = block_lines(blocks[first], 0, costs.get(first, costs[0]))
            found.append(Part(group.name, line, _nested(lines, f"{place}."), place))
    return found


def _nested(lines: Iterable[Line], at: str) -> list[Part]:
    """Lines with their depths as a forest. The members of a group have no joins: the group joins."""
    roots: list[Part] = []
    above: list[Part] = []
    for line in lines:
        while above and above[-1].line.depth >= line.depth:
            above.pop()
        if line.name == "join" and len(above) > 1 and above[-2].line.what.startswith("parallel"):
            continue
        part = Part(line.name, line, [], f"{above[-1].place}.{line.name}" if above else f"{at}{line.name}")
        (above[-1].parts if above else roots).append(part)
        above.append(part)
    return roots


def _merged(now: list[Part], before: list[Part], path: str, kernels: Sequence[NodeChoice]) -> Iterator[Node]:
    """Both forests as one: the parts of now in their order, each followed by what stood after it and is gone."""
    mine, theirs = ({part.name: part for part in parts} for parts in (now, before))
    order = list(mine)
    for name, previous in zip(theirs, [None, *theirs], strict=False):
        if name not in mine:
            order.insert(0 if previous is None else order.index(previous) + 1, name)
    core, branch = core_of(now), now[0].place.rpartition(".")[0] if now else ""
    for name in order:
        where = f"{path}.{name}" if path else name
        one, other = mine.get(name), theirs.get(name)
        inner = tuple(_merged(one.parts if one else [], other.parts if other else [], where, kernels))
        own = [] if one is None or inner else [c for c in kernels if c.path.startswith(f"{one.place}.")]
        own += [c for c in kernels if c.path == branch and c.op != "projections"] if name == core else []
        yield Node(where, one.line if one else None, other.line if other else None, inner, tuple(own))
