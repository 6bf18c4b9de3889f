"""Low-rank updates: a product of two narrow maps beside a map of a branch's input, which each layer has for itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.notation import ProjectionNotation, Projections, chosen
from archlab.arch_dsl.language.spec import Count
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Primitive
from archlab.arch_dsl.parts.layers import Linear
from archlab.arch_dsl.primitives.branch import SublayerModule

NAMES = ("query", "key", "value", "gate", "input")


class LowRank(Primitive):
    """Adds a product of two narrow maps to maps of a branch's input.

    It belongs to its layer: where layers share the branch (`share: stack`), each has its own.
    """

    noun: ClassVar[str] = "low-rank update"
    default_type: ClassVar[str] = "lora"


@LowRank.register("lora")
class Lora(LowRank):
    """x W + x A B with A `[inputs, rank]` and B `[rank, outputs]`: low-rank adaptation (LoRA, arXiv:2106.09685, eq. 3),
    there with the factor alpha / rank, which is 1 here.

    `of` names the maps. Those in one item read one A, each by a B of its own; for several A write several items. B
    starts at zero, so that a model starts as it was. In a branch with `share: stack` each layer adapts the shared maps
    in its own way (arXiv:2410.20672; Zamba2, arXiv:2411.15242).
    """

    examples = ({}, {"of": ["gate", "input"], "rank": 3}, {"of": ["query", "value"], "rank": 3})
    of: Annotated[Projections, ProjectionNotation(*NAMES)] = True
    rank: Count = 8

    def names(self, maps: Iterable[str]) -> tuple[str, ...]:
        """Those of a branch's maps that it updates."""
        return tuple(name for name in maps if chosen(self.of, name))

    def build_for(self, maps: Mapping[str, Linear], ctx: BuildContext) -> nn.Module:
        """The updates of a branch's maps."""
        return _Lora(self, {name: maps[name] for name in self.names(maps)}, ctx)


class _Lora(Module):
    """What is added to each of the maps, by their names."""

    def __init__(self, spec: Lora, maps: Mapping[str, Linear], ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        inputs = next(iter(maps.values())).weight.shape[1]
        self.down = Linear(inputs, spec.rank, std=ctx.std)
        rows = {name: own.weight.shape[0] for name, own in maps.items()}
        self.up = nn.ModuleDict({name: Linear(spec.rank, count, std=0.0) for name, count in rows.items()})
        self.at: dict[int, str] = {}  # its maps, by their places among what the branch reads


class AdaptedModule(SublayerModule):
    """A branch whose maps of its input may have low-rank updates, by the names of the maps in `lora`."""

    lora: nn.ModuleDict
    own: int  # how many maps read its input beside those of updates; 0 where there are none

    def add_low_rank(self, spec: Any, maps: Mapping[str, Linear], ctx: BuildContext) -> None:
        """Builds the updates of the maps that the branch reads."""
        names = {"_".join(item.names(maps)): item for item in spec.lora}
        self.lora = nn.ModuleDict({name: item.build_for(maps, ctx) for name, item in names.items()})
        self.own = len(super().maps()) if names else 0
        reads = self.reads() if names else []
        items: list[Any] = list(self.lora.values())
        for item in items:
            item.at = {reads.index(own): name for name, own in maps.items() if own in reads and name in item.up}

    def maps(self) -> list[Linear]:
        items: list[Any] = list(self.lora.values())
        return [*super().maps(), *(item.down for item in items)]

    def from_products(self, products: Iterator[Tensor], call: Call) -> Tensor:
        if not self.own:
            return super().from_products(products, call)
        made = [next(products) for _ in range(self.own)]
        items: list[Any] = list(self.lora.values())
        for item in items:
            narrow = next(products)
            made = [
                product + item.up[item.at[place]](narrow) if place in item.at else product
                for place, product in enumerate(made)
            ]
        return super().from_products(iter(made), call)


def normal(items: tuple[Any, ...], maps: Sequence[str]) -> tuple[Any, ...]:
    """Updates of a branch's maps, with one spelling for all of them."""
    return tuple(item.replace(of=True) if item.names(maps) == tuple(maps) else item for item in items)


def low_rank_cost(items: tuple[Any, ...], maps: Mapping[str, tuple[int, int]], tokens: int) -> Cost:
    """What the updates of maps cost, of which the widths of input and output are given."""
    found: dict[str, Cost] = {}
    for item in items:
        names = item.names(maps)
        down = Cost.product(tokens, maps[names[0]][0], item.rank)
        ups = {name: Cost.product(tokens, item.rank, maps[name][1]) for name in names}
        kept = Cost().keeping(tokens * item.rank)
        found["_".join(names)] = Cost.total({"down": down, **ups, "narrow": kept})
    return Cost.total(found)


def check_low_rank(branch: Any, maps: Sequence[str], path: str) -> list[Problem]:
    """What makes no sense in the field `lora` of a branch that reads its input by these maps."""
    found, taken = [], set[str]()
    for index, item in enumerate(branch.lora):
        names, message = item.names(maps), ""
        if not names or (item.of is not True and len(names) < len(item.of)):
            message = f"names maps of which this branch has {', '.join(maps)}; found {item.of}"
        elif again := sorted(taken & {*names}):
            message = f"{again[0]} has the update of an item before"
        taken |= {*names}
        if message:
            found.append(Problem(f"{path}.lora.{index}.of", message, item.mark("of")))
    return found
