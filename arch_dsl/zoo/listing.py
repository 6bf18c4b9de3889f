"""The zoo as a table: every size with our count of its parameters beside the published one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from archlab.arch_dsl.model.model import Model, cost, resolve
from archlab.arch_dsl.parts.context import Cost
from archlab.arch_dsl.primitives.groups import Group
from archlab.arch_dsl.primitives.heads import MultiHead
from archlab.arch_dsl.primitives.moe import MoE
from archlab.arch_dsl.primitives.self_attention import SelfAttention
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.zoo.entries import Entry, entry, load, names

Kind = Literal["decoder", "mixture of experts", "recurrent or hybrid", "encoder-decoder", "encoder"]


@dataclass(frozen=True)
class Row:
    """A size: `parameters` counted here as the publication counts, `published` as printed, and whether they agree.

    `active` are those that a token meets. `introduced` is what the entry had that those before it had not.
    """

    name: str
    size: str
    parameters: int
    published: str | None
    agrees: bool | None
    context: int | None
    release: str
    active: int
    kind: Kind
    introduced: str


def rows() -> Iterator[Row]:
    """Every published size of every entry."""
    for name in names():
        found = entry(name)
        for size, published in found.sizes.items():
            if published.published is None:
                continue
            model = resolve(load(name, size))
            total = cost(model, tokens=1)
            left_out = _not_counted(found, total)
            count = total.parameters - left_out
            yield Row(
                name,
                size,
                count,
                published.published,
                published.agrees(count),
                model.max_positions,
                found.card.release,
                total.active - left_out,
                kind_of(model),
                found.card.introduced,
            )


def kind_of(model: Model) -> Kind:
    """What a resolved model is, by its stacks, its masks and the branches of its layers."""
    if len(model.stacks()) > 1:
        return "encoder-decoder"
    (stack,) = model.stacks().values()
    layers = [[*_branches(block)] for block in stack.layers()]
    heads = [[branch for branch in layer if isinstance(branch, MultiHead)] for layer in layers]
    own = [branch for layer in heads for branch in layer if isinstance(branch, SelfAttention)]
    if any(branch.mask.looks_ahead for branch in own):
        return "encoder"
    if any(isinstance(branch, MoE) for layer in layers for branch in layer):
        return "mixture of experts"
    recurrent = any(getattr(branch, "recurrent", False) for layer in layers for branch in layer)
    mixed = all(read or len(layer) == 1 for read, layer in zip(heads, layers, strict=True))  # or a feed-forward alone
    return "decoder" if mixed and not recurrent else "recurrent or hybrid"


def _branches(block: Block) -> Iterator[object]:
    """The branches of a layer, members of groups among them."""
    for branch in block.values():
        yield from _branches(branch.branches) if isinstance(branch, Group) else (branch,)


def counted(found: Entry, model: Model) -> int:
    """The parameters of a model as its publication counts them."""
    total = cost(resolve(model), tokens=1)
    return total.parameters - _not_counted(found, total)


def _not_counted(found: Entry, total: Cost) -> int:
    """The parameters that a publication leaves out: none, or those of the input table."""
    return 0 if found.card.counted == "all parameters" else total.children["embedding"].parameters
