"""Places: the branches of a stack where they stand, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.primitives.attention import Attention
from archlab.arch_dsl.primitives.earlier_keys import without_own
from archlab.arch_dsl.tree.block import Block

if TYPE_CHECKING:
    from archlab.arch_dsl.model.stack import Stack


@dataclass(frozen=True)
class Place:
    """A branch where it stands: the number of its layer, the path that an error names, the path without the layer, and
    the facts of its stack."""

    depth: int
    path: str
    name: str
    branch: Branch
    ctx: BuildContext


def places(stack: Stack, ctx: BuildContext, blocks: list[Block]) -> list[Place]:
    """Every branch of every layer, members of groups after their group. Equal layers have equal paths."""
    labels: dict[Block, str] = {stack.block: "block"}
    found = []
    for depth, block in enumerate(blocks):
        label = labels.setdefault(block, f"block (layer {depth})")
        for steps, branch in block.walk():
            path = ".".join(steps)
            kept = without_own(branch) if isinstance(branch, Attention) else branch
            found.append(Place(depth, f"{label}.{path}", path, kept, ctx))
    return found


def distinct(found: list[Place]) -> Iterator[Place]:
    """The places of layers that differ; what is wrong in equal layers is said once."""
    seen: set[str] = set()
    for place in found:
        if place.path not in seen:
            seen.add(place.path)
            yield place
