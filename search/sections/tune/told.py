"""What a report says of tuning: the curve over the rate, and what it says of each variant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from archlab.search.formatting.tables import Block
from archlab.search.results.comparable import NO_DIFFERENCE
from archlab.search.results.comparison import Comparison
from archlab.search.results.told import Seen, Told
from archlab.search.sections.tune.blocks import curve_block, tuning_block
from archlab.search.sections.tune.frames import rates_frame, tuning_frame


class ToldOfTune(Told):
    """Values of any field may be tuned; what is fitted is the curve over the learning rate."""

    key = "tune"
    paged = True

    def frames(self, seen: Seen) -> dict[str, Any]:
        """rates: a row per variant and tuned setting with the VALIDATION loss that the choice was made on.
        tuning: a row per variant that tuned its learning rate: fitted optimum, largest stable rate, sensitivity.
        """
        table, noise = seen.found.table, seen.found.noise
        verdicts = zip(table["variant"], table["verdict"], strict=True)
        compared = {name for name, said in verdicts if said not in NO_DIFFERENCE and noise["unit"] == "nats/token"}
        return {
            "rates": rates_frame(seen.record, seen.selections),
            "tuning": tuning_frame(seen.record, seen.selections, noise["seed_sd"], compared),
        }

    def blocks(self, found: Comparison) -> Iterable[Block]:
        if len(found.rates):
            yield curve_block(found)
        if len(found.tuning):
            yield tuning_block(found)
