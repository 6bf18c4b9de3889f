"""A group of branches that read the same stream and whose updates are summed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from torch import Tensor

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.notation import chosen
from archlab.arch_dsl.language.spec import added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, shared_cost
from archlab.arch_dsl.parts.layers import Itself, Linear, writing
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule
from archlab.arch_dsl.primitives.groups import Group, GroupModule
from archlab.arch_dsl.primitives.joins import Add


@Branch.register("parallel")
class Parallel(Group):
    """stream + sum of the members' updates: parallel attention and feed-forward (PaLM, arXiv:2204.02311, section 2).

    `pre` on the group is one norm that all members share; on the members, separate ones.

    With `output: shared` the members have no output maps. What these would read is summed, and one map of the group
    makes the update of it: the hybrid heads of Hymba (arXiv:2411.13676, eq. 3), attention and Mamba whose outputs are
    normed and halved before (`sdpa: [{type: rmsnorm, over: heads}, {type: scale, by: 0.5}]`).
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"branches": [{"name": "attention", "heads": 4, "pre": ["rmsnorm"]}, {"name": "mlp", "width": 24}]},
        {
            "output": "shared",
            "branches": [{"name": "attention", "heads": 4, "sdpa": ["rmsnorm"]}, {"name": "mlp", "width": 16}],
        },
    )
    output: Literal["each", "shared"] = added(default="each")

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        members: dict[str, Cost] = {}
        for name, member in self.branches.items():
            held = bool(members) or (ctx.held and not self.pre)
            members[name] = shared_cost(member, ctx.at(name, held=held), tokens)
        width = self.shared_width(ctx)
        if width is not None:
            members = {name: _without_output(found) for name, found in members.items()}
            members["output_projection"] = Cost.product(tokens, width, ctx.d_model).keeping(tokens * width)
        return Cost.total(self.outer_cost(ctx, tokens) | members)

    def shared_width(self, ctx: BuildContext) -> int | None:
        """How many channels the group's own output map reads, None where each member has one."""
        if self.output == "each":
            return None
        widths = [member.output_width(ctx.at(name)) for name, member in _sublayers(self)]
        return next(width for width in widths if width is not None)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        found = super().check(ctx, path)
        if self.output == "each" or found:
            return found
        widths: dict[int, str] = {}
        for name, member in _sublayers(self):
            width = member.output_width(ctx.at(name))
            if width is None:
                message = f"{member.type} does not end with one linear map, which `output: shared` takes over"
                found.append(Problem(f"{path}.{name}", message, member.mark()))
            else:
                widths.setdefault(width, name)
        if len(widths) > 1:
            told = " and ".join(f"{width} of {name}" for width, name in widths.items())
            message = f"is one map of a sum, and members have different channels for it ({told}); make them equal"
            found.append(Problem(f"{path}.output", message, self.mark("output")))
        return found

    def unfit(self, member: Any) -> Iterator[tuple[str, str]]:
        if not isinstance(member, Sublayer) or isinstance(member, Parallel):
            yield "", f"{member.type} cannot stand inside parallel"
        elif member.join != Add():
            yield "join", "the group joins, its members do not; set `join` on the group"
        elif self.output == "shared":
            yield from _without_its_own(member)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if len(self.branches) < 2:
            yield "", f"needs at least two branches, found {len(self.branches)}"


class _Parallel(GroupModule, of=Parallel):
    """Where all members read the group's norm as it is, their maps are planned together: one product for attention and
    feed-forward, where products are merged."""

    def __init__(self, spec: Parallel, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        width = spec.shared_width(ctx)
        self.output_projection = None
        if width is not None:
            self.output_projection = writing(Linear(width, ctx.d_model, std=ctx.residual_std))
            for member in self.members.values():
                member.output_projection = Itself()
        self.joined = all(_reads_as_it_is(spec.branches[name], member) for name, member in self.members.items())

    def update(self, stream: Tensor, call: Call) -> Tensor:
        hidden = self.pre(stream, call, iter(()))
        members: list[Any] = list(self.members.values())
        if self.joined:
            products = iter(self.products(hidden, [item for member in members for item in member.maps()]))
            updates = [member.from_products(products, call) for member in members]
        else:
            updates = [member.update(hidden, call) for member in members]
        if call.watch is not None and self.output_projection is None:
            for member, update in zip(members, updates, strict=True):
                call.watch.tell("update", member.path, call.padding, output=update)
        total: Tensor = sum(updates[1:], updates[0])
        if self.output_projection is not None:
            total = self.output_projection(total)
        return self.post(total, call, iter(()))  # type: ignore[no-any-return]


def _sublayers(group: Parallel) -> Iterator[tuple[str, Sublayer]]:
    for name, member in group.branches.items():
        assert isinstance(member, Sublayer)
        yield name, member


def _without_output(found: Cost) -> Cost:
    """What a member costs whose output map another one stands for."""
    return Cost.total({name: part for name, part in found.children.items() if name != "output_projection"})


def _without_its_own(member: Sublayer) -> Iterator[tuple[str, str]]:
    """What makes no sense in a member without its output map: the field, and why."""
    for name in ("bias", "zero"):
        if chosen(getattr(member, name, False), "output"):
            yield name, "is for the output map too, and with `output: shared` the group has the only one; name others"
    if member.post:
        yield "post", "acts on what an output map gives, and with `output: shared` the group has it; set it there"
    if member.share != "none":
        yield "share", "would share a member without its output map; set `share` on the group"


def _reads_as_it_is(spec: Branch, module: Any) -> bool:
    """Whether a member's maps read what the group reads: it has no site `pre`, and nothing of its own before them."""
    own = type(module).update is not SublayerModule.update
    return not own and isinstance(spec, Sublayer) and not list(module.pre.children())
