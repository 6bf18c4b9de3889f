"""Groups of branches: what stands among the branches of a block in the place of one, and has a block of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from torch import nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import INVALID, parse_value
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import fields_of, set_marks
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Norm, Scale, build_shared
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule
from archlab.arch_dsl.tree.block import Block, parse_branches


class Group(Sublayer):
    """Branches that together give one update. `pre`, `post` and `join` of the group act on its ends."""

    post: tuple[Norm | Scale, ...] = ()
    branches: Block

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """`{pre, post, join, NAME: branch, …}`: every other key is a member."""
        assert isinstance(node.value, dict)
        before = len(problems)
        own = {name: item.annotation for name, item in fields_of(cls).items() if name != "branches"}
        inside = {name: child for name, child in node.value.items() if name not in (*own, "version", "branches")}
        listed = node.value.get("branches")
        if listed is None:
            members = parse_branches(Node(inside, node.mark, node.key_marks), path, problems)
        else:
            for name in inside:
                message = "stands beside `branches`, which lists them all"
                problems.append(Problem(f"{path}.{name}", message, node.key_marks.get(name)))
            members = Block.parse_node(listed, f"{path}.branches", problems)
        values = {
            name: parse_value(annotation, node.value[name], f"{path}.{name}", problems)
            for name, annotation in own.items()
            if name in node.value
        }
        if len(problems) > before:
            return INVALID
        spec = cls(branches=members, **values)
        marks = {"": node.mark} | {name: node.value[name].mark for name in values}
        set_marks(spec, {name: mark for name, mark in marks.items() if mark})
        return spec

    def resolve(self, ctx: BuildContext) -> Self:
        return self.replace(branches=Block((name, member.resolve(ctx)) for name, member in self.branches.items()))

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        problems = super().check(ctx, path)
        for name, member in self.branches.items():
            problems += member.check(ctx.at(name), f"{path}.{name}")
            problems += [
                Problem(f"{path}.{name}.{field}".removesuffix("."), told, member.mark(field))
                for field, told in self.unfit(member)
            ]
        return problems

    def unfit(self, member: Any) -> Iterator[tuple[str, str]]:
        """What makes no sense in a member of this group: its field ("" for all of it), and why."""
        return iter(())


class GroupModule(SublayerModule):
    """The modules of the members, by their names."""

    def __init__(self, spec: Group, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.members = nn.ModuleDict(
            {name: build_shared(member, ctx.at(name)) for name, member in spec.branches.items()}
        )
