"""Places: every branch of every layer of a stack, for rules across its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.primitives.parallel import Parallel
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
        for path, branch in _branches(block):
            found.append(Place(depth, f"{label}.{path}", path, branch, ctx))
    return found


def _branches(block: Block, prefix: str = "") -> Iterator[tuple[str, Branch]]:
    for name, branch in block.items():
        yield f"{prefix}{name}", branch
        if isinstance(branch, Parallel):
            yield from _branches(branch.branches, f"{prefix}{name}.")


def distinct(found: list[Place]) -> Iterator[Place]:
    """The places of layers that differ; what is wrong in equal layers is said once."""
    seen: set[str] = set()
    for place in found:
        if place.path not in seen:
            seen.add(place.path)
            yield place
