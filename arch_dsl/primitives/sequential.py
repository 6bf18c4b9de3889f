"""A group of branches that are applied one after another, each to what the one before it gave: a block in a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, shared_cost
from archlab.arch_dsl.primitives.groups import Group, GroupModule
from archlab.arch_dsl.primitives.joins import ResidualDual

ALONE = {"type": "weighted", "stream": 0.0}  # a join that leaves out the stream


@Branch.register("sequential")
class Sequential(Group):
    """stream + m_n(… m_2(m_1(stream))), with m_i the members, each with its join to what it reads.

    A member without its stream, `join: {type: weighted, stream: 0}`, hands on what it makes alone. If attention, a
    feed-forward and a linear map are so, the group is their composition. The shared blocks of Zamba2 are (transformers'
    modeling_zamba2.py), and so is what stands around them: `stream + mamba2(norm(stream + block))`, in which `mamba2`
    alone leaves out its stream, and the block is added to what `mamba2` reads but not to the stream (Zamba,
    arXiv:2405.16712, eq. 6).
    """

    examples = (
        {"branches": [{"name": "attention", "heads": 4, "pre": ["rmsnorm"]}, {"name": "mlp", "width": 24}]},
        {"branches": [{"name": "dense", "join": ALONE}, {"name": "mlp", "width": 24, "join": ALONE}]},
    )

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        members: dict[str, Cost] = {}
        for name, member in self.branches.items():
            held = ctx.held and not self.pre and not members
            members[name] = shared_cost(member, ctx.at(name, held=held), tokens)
        return Cost.total(self.outer_cost(ctx, tokens) | members)

    def unfit(self, member: Any) -> Iterator[tuple[str, str]]:
        if isinstance(member.join, ResidualDual):
            yield "join", "residual_dual carries a second stream from layer to layer, and this one ends in the group"


class _Sequential(GroupModule, of=Sequential):
    def update(self, stream: Tensor, call: Call) -> Tensor:
        hidden = self.pre(stream, call, iter(()))
        for member in self.members.values():
            hidden = member(hidden, call)
        return self.post(hidden, call, iter(()))  # type: ignore[no-any-return]
