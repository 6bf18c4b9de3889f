"""A group of branches that read the same stream and whose updates are summed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import INVALID, parse_value
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import fields_of, set_marks
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Norm, Scale, build_shared, shared_cost
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule
from archlab.arch_dsl.primitives.joins import Add
from archlab.arch_dsl.tree.block import Block, parse_branches


@Branch.register("parallel")
class Parallel(Sublayer):
    """stream + sum of the members' updates: parallel attention and feed-forward (PaLM, arXiv:2204.02311, section 2).

    `pre` on the group is one norm that all members share; on the members, separate ones.
    """

    examples = ({"branches": [{"name": "attention", "heads": 4, "pre": ["rmsnorm"]}, {"name": "mlp", "width": 24}]},)

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
        set_marks(spec, {"": node.mark} if node.mark else {})
        return spec

    def resolve(self, ctx: BuildContext) -> Self:
        return self.replace(branches=Block((name, member.resolve(ctx)) for name, member in self.branches.items()))

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        members: dict[str, Cost] = {}
        for name, member in self.branches.items():
            held = bool(members) or (ctx.held and not self.pre)
            members[name] = shared_cost(member, ctx.at(name, held=held), tokens)
        return Cost.total(self.outer_cost(ctx, tokens) | members)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        problems = super().check(ctx, path)
        for name, member in self.branches.items():
            where = f"{path}.{name}"
            problems += member.check(ctx, where)
            if not isinstance(member, Sublayer) or isinstance(member, Parallel):
                problems.append(Problem(where, f"{member.type} cannot stand inside parallel", member.mark()))
            elif member.join != Add():
                message = "the group joins, its members do not; set `join` on the group"
                problems.append(Problem(f"{where}.join", message, member.mark("join")))
        return problems

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if len(self.branches) < 2:
            yield "", f"needs at least two branches, found {len(self.branches)}"


class _Parallel(SublayerModule, of=Parallel):
    """Where all members read the group's norm as it is, their maps are planned together: one product for attention and
    feed-forward, where products are merged."""

    def __init__(self, spec: Parallel, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        members = {name: build_shared(member, ctx.at(name)) for name, member in spec.branches.items()}
        self.members = nn.ModuleDict(members)
        self.joined = all(_reads_as_it_is(spec.branches[name], member) for name, member in members.items())

    def update(self, stream: Tensor, call: Call) -> Tensor:
        hidden = self.pre(stream, call, iter(()))
        members: list[Any] = list(self.members.values())
        if self.joined:
            products = iter(self.products(hidden, [item for member in members for item in member.maps()]))
            updates = [member.from_products(products, call) for member in members]
        else:
            updates = [member.update(hidden, call) for member in members]
        if call.watch is not None:
            for member, update in zip(members, updates, strict=True):
                call.watch.tell("update", member.path, call.padding, output=update)
        return self.post(sum(updates[1:], updates[0]), call, iter(()))  # type: ignore[no-any-return]


def _reads_as_it_is(spec: Branch, module: nn.Module) -> bool:
    """Whether a member's maps read what the group reads: it has no site `pre`, and nothing of its own before them."""
    own = type(module).update is not SublayerModule.update  # type: ignore[attr-defined]
    return not own and isinstance(spec, Sublayer) and not spec.pre
