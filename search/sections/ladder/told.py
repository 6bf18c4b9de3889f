"""What a report says of a ladder: its rungs, and what was fitted to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import Block
from archlab.search.results.comparison import Comparison
from archlab.search.results.told import Seen, Told
from archlab.search.sections.ladder.blocks import scaling_blocks
from archlab.search.sections.ladder.frames import scaling_frames, scaling_notes


class ToldOfLadder(Told):
    """Power laws, IsoFLOP minima and compute-equivalent gains, as far as the rungs hold them."""

    key = "ladder"
    paged = True

    def frames(self, seen: Seen) -> dict[str, Any]:
        """rungs, scaling: see scaling_frames in frames.py; both empty without a ladder."""
        table, nats = seen.found.table, seen.layout.unit == "nats/token"
        rungs, scaling = scaling_frames(seen.record, seen.selections, table, seen.found.domains, nats)
        return {"rungs": rungs, "scaling": scaling}

    def notes(self, found: Comparison) -> Iterable[str]:
        return scaling_notes(found.rungs, found.scaling)

    def blocks(self, found: Comparison) -> Iterable[Block]:
        return scaling_blocks(found)

    def csv(self, found: Comparison) -> dict[str, dict[str, Any]]:
        """What each rung is, and the constants of what was fitted to its series."""
        rungs, fits = records(found.rungs), records(found.scaling)
        sized = [name for name in found.rungs.columns if name not in ("variant", "parameters", "loss")]
        columns = {f"ladder.{name}": {row["variant"]: row[name] for row in rungs} for name in sized if rungs}
        for fit in fits:
            if not isinstance(fit["name"], str) or not pd.isna(fit["at"]):
                continue  # why nothing was fitted; a minimum at one compute
            mine = [row["variant"] for row in rungs if row["series"] == fit["series"]]
            for kind, end in (("value", ""), ("low", "_low"), ("high", "_high")):
                name = f"scaling.{fit['of']}.{fit['law']}.{fit['name']}{end}"
                columns.setdefault(name, {}).update(dict.fromkeys(mine, fit[kind]))
        return columns
