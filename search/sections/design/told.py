"""What a report says of components and axes: what each does over all else that a study varies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from archlab.search.formatting.tables import Block
from archlab.search.results.comparison import Comparison
from archlab.search.results.told import Seen, Told
from archlab.search.sections.design.blocks import effect_blocks
from archlab.search.sections.design.frames import all_effects


class ToldOfDesign(Told):
    """Of any study whose components or axes stand in several variants, with a `design:` or without."""

    key = "design"
    paged = True

    def frames(self, seen: Seen) -> dict[str, Any]:
        """effects: a row per level of what the study varies more than once, its mean difference over all else; empty
        where each change stands in one row."""
        return {"effects": all_effects(seen.record["variants"], seen.found)}

    def blocks(self, found: Comparison) -> Iterable[Block]:
        return effect_blocks(found)
