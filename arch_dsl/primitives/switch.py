"""Switch heads: maps of attention as mixtures of experts, of which a router gives every head a few for each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.notation import ProjectionNotation, Projections, chosen
from archlab.arch_dsl.language.spec import Count
from archlab.arch_dsl.parts.context import BuildContext, Cost
from archlab.arch_dsl.parts.families import Module, Primitive
from archlab.arch_dsl.parts.layers import Itself, Linear
from archlab.arch_dsl.primitives.heads import NAMES, MultiHead
from archlab.arch_dsl.primitives.self_attention import SelfAttentionModule
from archlab.kernels.activations import at_least_float32


class Switch(Primitive):
    """Makes maps of attention mixtures of experts, with one router for all maps that it names."""

    noun: ClassVar[str] = "switch"
    default_type: ClassVar[str] = "switch_head"


@Switch.register("switch_head")
class SwitchHead(Switch):
    """x W = sum of s_e x W_e over the `top_k` best of a head's `experts`, with s = sigmoid(x W_s): experts in the maps
    of attention, of which each token chooses for each head (SwitchHead, arXiv:2312.07987, section 2).

    `of` names the maps that one router chooses for: those of keys and values have `kv_heads` routers of that kind,
    those of queries and the output `heads`. Maps in one item have the same choice, in two items each their own; the
    paper has one item for `value`, whose router reads the token that is read, and one for `output`, whose router reads
    the token that reads. s is a sigmoid of each logit, so that experts do not compete, or with `routing: softmax` a
    softmax over those of the chosen. With one expert of one, the default routing is a headwise gate.
    """

    ops: ClassVar[tuple[str, ...]] = ("experts",)
    examples = (
        {},
        {"of": ["key", "value"], "experts": 3, "top_k": 3},
        {"of": "output", "experts": 3, "top_k": 2, "routing": "softmax"},
        {"of": ["query", "output"], "experts": 2, "top_k": 2},
    )
    of: Annotated[Projections, ProjectionNotation(*NAMES)] = ("value",)
    experts: Count = 4
    top_k: Count = 2
    routing: Literal["sigmoid", "softmax"] = "sigmoid"

    @property
    def names(self) -> tuple[str, ...]:
        """The maps, in their order."""
        return tuple(name for name in NAMES if chosen(self.of, name))

    def without(self, *names: str) -> tuple[SwitchHead, ...]:
        """The same for the other maps alone, if there are some."""
        kept = tuple(name for name in self.names if name not in names)
        return (self.replace(of=len(kept) == len(NAMES) or kept),) if kept else ()

    def build_for(self, branch: MultiHead, ctx: BuildContext) -> nn.Module:
        """The router of a resolved branch."""
        kind = _Router if self.top_k == self.experts else _SparseRouter
        return kind(self, slots(branch)[self.names[0]], ctx)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if not self.names:
            yield "of", f"names no map ({', '.join(NAMES)})"
        if self.top_k > self.experts:
            yield "top_k", f"{self.top_k} of {self.experts} experts cannot be chosen"
        if self.top_k == 1 and self.routing == "softmax":
            yield "routing", "makes the weight of a single expert 1, so that the router learns nothing; take sigmoid"


def slots(branch: MultiHead) -> dict[str, int]:
    """How many heads choose experts, by map; the branch must be resolved."""
    grids = branch.grids()
    return {name: grids["sdpa" if name == "output" else name][0] for name in NAMES}


def copies(items: tuple[Any, ...], name: str) -> int:
    """How many experts a map has, 1 where it is a plain one."""
    return next((item.experts for item in items if name in item.names), 1)


def check_switch(branch: Any, ctx: BuildContext, path: str) -> list[Problem]:
    """What makes no sense in the field `switch` of a resolved branch."""
    found, taken, heads = [], set[str](), slots(branch)
    for index, item in enumerate(branch.switch):
        where = f"{path}.switch.{index}"
        found += item.check(ctx, where)
        for name in item.names:
            message = ""
            if name in taken:
                message = f"{name} has experts of an item before"
            elif chosen(branch.bias, name):
                message = f"experts have no bias, and the map {name} is to have one; name the others in `bias`"
            elif name == "query" and branch.queries == "positions":
                message = "queries from positions are those of a table, whose rows are no tokens that choose"
            elif heads[name] != heads[item.names[0]]:
                first = item.names[0]
                message = f"one router cannot choose for {heads[first]} heads ({first}) and {heads[name]} ({name})"
            taken.add(name)
            if message:
                found.append(Problem(f"{where}.of", message, item.mark("of")))
    return found


def switch_cost(branch: Any, ctx: BuildContext, tokens: int) -> dict[str, Cost]:
    """What the routers of a resolved branch cost, and the maps that have experts in place of plain ones."""
    found: dict[str, Cost] = {}
    routers: dict[str, Cost] = {}
    widths, inputs = branch.widths(), branch.inputs(ctx.d_model)
    for item in branch.switch:
        heads = slots(branch)[item.names[0]]
        picks, sparse = tokens * heads * item.top_k, item.top_k < item.experts
        read = item.names != ("output",)
        both = 1 + (read and "output" in item.names)  # the choice is made at the branch's input, and at its output
        one = Cost.product(tokens * both, ctx.hidden, heads * item.experts)
        # the weights; where some are left out also which they are, the order of rows and the way back, in two each
        kept = both * picks * (1 + 6 * sparse) + picks * ctx.hidden * (sparse and read)
        routers["_".join(item.names)] = one.keeping(kept)
        for name in item.names:
            size = widths[name] // heads
            pair = (size, ctx.d_model) if name == "output" else (inputs[name], size)
            one = Cost.product(picks, *pair)
            idle = heads * (item.experts - item.top_k) * one.parameters
            kept = picks * size + (tokens * widths[name] if name == "output" and branch.sdpa else 0)
            count = heads * item.experts * one.parameters
            found[f"{name}_projection"] = Cost(count, one.flops_matmul, one.flops_model, kept, idle=idle)
    return found | {"switch": Cost.total(routers)}


class SwitchedModule(SelfAttentionModule):
    """The maps of attention, of which some may have experts, and their routers."""

    inputs: tuple[str, ...] = ("query", "key", "value")  # the maps of the branch's input

    def add_routers(self, spec: Any, ctx: BuildContext) -> None:
        """Builds the routers, named by the maps that they choose for."""
        named = {"_".join(item.names): item for item in spec.switch}
        self.switch = nn.ModuleDict(
            {name: item.build_for(spec, ctx.at(f"switch.{name}")) for name, item in named.items()}
        )

    def router(self, name: str) -> Any:
        """The one that chooses for a map; None where that is a plain one."""
        routers: list[Any] = list(self.switch.values())
        found = [item for item in routers if name in item.names]
        return found[0] if found else None

    def wanted(self) -> list[Any]:
        """What is wanted of the branch's input: its maps, and the logits of their routers."""
        maps = []
        for name in self.inputs:
            own, router = self.get_submodule(f"{name}_projection"), self.router(name)
            maps.append(own if router is None else router.read(own))
        return [*maps, *(item.projection for item in self.switch.values() if item.places)]

    def wanted_late(self) -> list[Any]:
        """The logits of the router of the output map."""
        router = self.router("output")
        return [] if router is None else [router.projection]

    def made(self, query: Tensor, products: Iterator[Tensor]) -> list[Tensor]:
        """What the maps of the branch's input make of it, `[B, T, H D]` each: experts, their weighted sum."""
        made = [query, *(next(products) for _ in self.inputs[1:])]
        routers: list[Any] = [item for item in self.switch.values() if item.places]
        for router in routers:
            given = [made[at] for at in router.places]
            weights = [self.get_submodule(f"{self.inputs[at]}_projection").weight for at in router.places]
            mixed = router.mixed(given, weights, next(products))
            for at, each in zip(router.places, mixed, strict=True):
                made = [*made[:at], each, *made[at + 1 :]]
        return made

    def joined(self, o_BTHD: Tensor, products: Iterator[Tensor]) -> Tensor:
        router = self.router("output")
        if router is None:
            return super().joined(o_BTHD, products)
        return router.joined(o_BTHD, self.output_projection.weight, next(products))  # type: ignore[no-any-return]


class _Router(Module):
    """Chooses all experts of each head, with a weight of each."""

    # B batch, T time, H heads, E experts, K those that are chosen, D channels of a head
    def __init__(self, spec: SwitchHead, heads: int, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.projection = Linear(ctx.hidden, heads * spec.experts, std=ctx.std)
        self.heads, self.experts, self.top_k = heads, spec.experts, spec.top_k
        self.competing = spec.routing == "softmax"
        self.names = spec.names
        self.places = tuple(NAMES.index(name) for name in spec.names if name != "output")  # among the maps of the input

    def read(self, own: Linear) -> Any:
        """What is wanted of the branch's input for a map."""
        return own

    def weights(self, logits_BTHK: Tensor) -> Tensor:
        """The weights of the chosen."""
        return logits_BTHK.softmax(-1) if self.competing else logits_BTHK.sigmoid()

    def logits(self, projected: Tensor) -> Tensor:
        """Those of all experts `[B, T, H, E]`, in at least float32."""
        return at_least_float32(projected.unflatten(-1, (self.heads, self.experts)))

    def mixed(self, given: list[Tensor], maps: list[Tensor], projected: Tensor) -> list[Tensor]:
        """What maps of the branch's input make `[B, T, H D]`, from what was wanted of it for each."""
        weights = self.weights(self.logits(projected))
        return [_summed(product.unflatten(-1, (*weights.shape[2:], -1)), weights) for product in given]

    def joined(self, o_BTHD: Tensor, weight: Tensor, projected: Tensor) -> Tensor:
        """What the output map makes of each head's output, `[B, T, d_model]`."""
        return F.linear(_weighed(o_BTHD, self.weights(self.logits(projected))).flatten(2), weight)


class _SparseRouter(_Router):
    """Chooses some of them: rows, one for each choice, are sorted by expert and back."""

    def __init__(self, spec: SwitchHead, heads: int, ctx: BuildContext) -> None:
        super().__init__(spec, heads, ctx)
        self.product = ctx.select("experts")
        self.itself = Itself()

    def read(self, own: Linear) -> Any:
        return self.itself

    def order(self, experts_BTHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The choices sorted by their experts, the way back, and the end of each expert's rows."""
        first = torch.arange(self.heads, device=experts_BTHK.device) * self.experts
        owner, order = (experts_BTHK + first[:, None]).flatten().sort(stable=True)
        every = torch.arange(self.heads * self.experts, device=owner.device)
        return order, order.argsort(), torch.searchsorted(owner, every, right=True)

    def mixed(self, given: list[Tensor], maps: list[Tensor], projected: Tensor) -> list[Tensor]:
        logits, experts = self.logits(projected).topk(self.top_k)
        weights = self.weights(logits)
        order, back, ends = self.order(experts)
        hidden = given[0].flatten(0, 1)
        rows = _cast(hidden.index_select(0, order // (self.heads * self.top_k)))
        made = [self.product(rows, weight.unflatten(0, (len(ends), -1)), ends) for weight in maps]
        return [_summed(each.index_select(0, back).view(*weights.shape, -1), weights) for each in made]

    def joined(self, o_BTHD: Tensor, weight: Tensor, projected: Tensor) -> Tensor:
        logits, experts = self.logits(projected).topk(self.top_k)
        order, back, ends = self.order(experts)
        rows = _cast(_weighed(o_BTHD, self.weights(logits)).flatten(0, 3).index_select(0, order))
        made: Tensor = self.product(rows, weight.unflatten(1, (len(ends), -1)).transpose(0, 1), ends)
        return made.index_select(0, back).view(*o_BTHD.shape[:2], self.heads * self.top_k, -1).sum(2)


def _summed(each_BTHKD: Tensor, weights_BTHK: Tensor) -> Tensor:
    """The weighted sum over the chosen experts `[B, T, H D]`."""
    return (each_BTHKD * weights_BTHK.to(each_BTHKD.dtype)[..., None]).sum(-2).flatten(-2)


def _weighed(o_BTHD: Tensor, weights_BTHK: Tensor) -> Tensor:
    """Each head's output once for every chosen expert, with its weight `[B, T, H, K, D]`."""
    return o_BTHD[..., None, :] * weights_BTHK.to(o_BTHD.dtype)[..., None]


def _cast(rows: Tensor) -> Tensor:
    """In the dtype of autocast, which does not see the product of experts."""
    kind = rows.device.type
    return rows.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else rows
