"""What a comparison has of the published table that a study reproduces: rows side by side, agreement, claims."""

from __future__ import annotations

from typing import Any

import pandas as pd

from archlab.search.results.losses import Layout
from archlab.search.results.measured import measures_frame
from archlab.search.results.pairs import Differences
from archlab.search.results.selection import Selection
from archlab.search.sections.published.claims import claims_frame, diverged_everywhere
from archlab.search.sections.published.frames import agreement, published_frame


def beside(
    record: dict[str, Any], selections: list[Selection], layout: Layout, table: pd.DataFrame, known: dict[str, Any]
) -> dict[str, Any]:
    """`published`, `agreement`, `claims` and `paper` of a comparison, given its layout and its table; `record` is that
    of the selections, `known` the whole one, with what a screen left out. Nothing for a study without such a table."""
    if not (asked := known.get("published")):
        return {}
    frame = published_frame(known, table, measures_frame(selections), layout.unit)
    gone = {each.variant for each in selections if diverged_everywhere(each)}
    return {
        "published": frame,
        "agreement": agreement(known, frame, gone),
        "claims": claims_frame(known, Differences(record, selections, layout)),
        "paper": {name: asked[name] for name in ("table", "source", "caption", "without")},
    }
