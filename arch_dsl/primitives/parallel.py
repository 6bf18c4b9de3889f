"""A group of branches that read the same stream and whose updates are summed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, shared_cost
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule
from archlab.arch_dsl.primitives.groups import Group, GroupModule
from archlab.arch_dsl.primitives.joins import Add


@Branch.register("parallel")
class Parallel(Group):
    """stream + sum of the members' updates: parallel attention and feed-forward (PaLM, arXiv:2204.02311, section 2).

    `pre` on the group is one norm that all members share; on the members, separate ones.
    """

    examples = ({"branches": [{"name": "attention", "heads": 4, "pre": ["rmsnorm"]}, {"name": "mlp", "width": 24}]},)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        members: dict[str, Cost] = {}
        for name, member in self.branches.items():
            held = bool(members) or (ctx.held and not self.pre)
            members[name] = shared_cost(member, ctx.at(name, held=held), tokens)
        return Cost.total(self.outer_cost(ctx, tokens) | members)

    def unfit(self, member: Any) -> Iterator[tuple[str, str]]:
        if not isinstance(member, Sublayer) or isinstance(member, Parallel):
            yield "", f"{member.type} cannot stand inside parallel"
        elif member.join != Add():
            yield "join", "the group joins, its members do not; set `join` on the group"

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if len(self.branches) < 2:
            yield "", f"needs at least two branches, found {len(self.branches)}"


class _Parallel(GroupModule, of=Parallel):
    """Where all members read the group's norm as it is, their maps are planned together: one product for attention and
    feed-forward, where products are merged."""

    def __init__(self, spec: Parallel, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.joined = all(_reads_as_it_is(spec.branches[name], member) for name, member in self.members.items())

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


def _reads_as_it_is(spec: Branch, module: Any) -> bool:
    """Whether a member's maps read what the group reads: it has no site `pre`, and nothing of its own before them."""
    own = type(module).update is not SublayerModule.update
    return not own and isinstance(spec, Sublayer) and not list(module.pre.children())
