"""The normal form of a stack's blocks: one spelling for layers that are equal, however they were written."""

from __future__ import annotations

from arch_dsl.block import Block
from arch_dsl.identity import canonical
from arch_dsl.overrides import Overrides
from arch_dsl.source import Node


def normal_form(blocks: list[Block]) -> tuple[Block, Overrides]:
    """The block of the first layer, and every other distinct block with its layers: one spelling for each stack."""
    places: dict[Block, list[int]] = {}
    for depth, block in enumerate(blocks):
        places.setdefault(block, []).append(depth)
    first, *others = places
    patches = {",".join(map(str, places[block])): Node.of({"block": canonical(block)}) for block in others}
    return first, Overrides(patches)
