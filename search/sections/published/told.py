"""What a report says of the published table that a study reproduces: rows side by side, agreement, claims."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from archlab.search.formatting.tables import Block
from archlab.search.results.comparison import Comparison
from archlab.search.results.measured import measures_frame
from archlab.search.results.pairs import Differences
from archlab.search.results.told import Seen, Told
from archlab.search.sections.published.blocks import published_blocks
from archlab.search.sections.published.claims import claims_frame, diverged_everywhere
from archlab.search.sections.published.frames import agreement, published_frame


class ToldOfPublished(Told):
    """The section is `report: {published: …}`."""

    key = "published"
    paged = True

    def frames(self, seen: Seen) -> dict[str, Any]:
        """published: a row per variant that is one of the published table, theirs beside ours; agreement: how far the
        two orders agree; claims: what our data say of what the paper claims; paper: the table's name, caption and
        source. All empty for a study without such a table."""
        record = seen.whole
        if not (asked := record.get("published")):
            return {"published": pd.DataFrame(), "agreement": [], "claims": pd.DataFrame(), "paper": {}}
        frame = published_frame(record, seen.found.table, measures_frame(seen.selections), seen.layout.unit)
        gone = {each.variant for each in seen.selections if diverged_everywhere(each)}
        return {
            "published": frame,
            "agreement": agreement(record, frame, gone),
            "claims": claims_frame(record, Differences(seen.record, seen.selections, seen.layout)),
            "paper": {name: asked[name] for name in ("table", "source", "caption", "without")},
        }

    def blocks(self, found: Comparison) -> Iterable[Block]:
        return published_blocks(found)
