"""The normal form of a stack's blocks: one spelling for layers that are equal, however they were written."""

from __future__ import annotations

from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.identity import canonical
from archlab.arch_dsl.tree.overrides import Overrides


def normal_form(blocks: list[Block]) -> tuple[Block, Overrides]:
    """The block of the first layer, and every other distinct block with its layers: one spelling for each stack."""
    places: dict[Block, list[int]] = {}
    for depth, block in enumerate(blocks):
        places.setdefault(block, []).append(depth)
    first, *others = places
    patches = {",".join(map(str, places[block])): Node.of({"block": canonical(block)}) for block in others}
    return first, Overrides(patches)
