"""What a report says of a search: its trials, their front, importances, and searches that asked the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.tables import Block
from archlab.search.results.comparison import Comparison
from archlab.search.results.told import Record, Rows, Seen, Told
from archlab.search.sections.search.blocks import search_blocks
from archlab.search.sections.search.frames import search_frame, search_notes, search_summary
from archlab.search.sections.search.rivals import rivals_frame, rivals_of

if TYPE_CHECKING:
    from archlab.search.store.store import Store


class ToldOfSearch(Told):
    """What was proposed is in the record; what it scored in the rows."""

    key = "search"

    def others(self, store: Store, record: Record) -> Iterable[tuple[Record, Rows]]:
        return ((each, store.study_trials(each["study"])) for each in rivals_of(store, record))

    def frames(self, seen: Seen) -> dict[str, Any]:
        """search: the trials of a search, best validation perplexity first; empty for other studies.
        searched: goals, constraints, what was refused, importances: search_summary in frames.py.
        rivals: a row per search of the store that asks the same, this one first; empty where there is no other.
        """
        searches = [(each, search_frame(each, rows)) for each, rows in ((seen.record, seen.trials), *seen.others)]
        summary = search_summary(*searches[0])
        return {"search": searches[0][1], "searched": summary, "rivals": rivals_frame(searches)}

    def notes(self, found: Comparison) -> Iterable[str]:
        return search_notes(found.searched)

    def blocks(self, found: Comparison) -> Iterable[Block]:
        return search_blocks(found)
