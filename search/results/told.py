"""The part of a report that a section of a study fills: from the study's record and its rows alone, without torch.

A section lives twice. Before the store it is a spec that is asked (archlab.search.variants.section); what it leaves is
its record. After the store a `Told` reads that, whatever became of the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from archlab.search.formatting.tables import Block, Column
    from archlab.search.results.comparison import Comparison
    from archlab.search.results.losses import Layout
    from archlab.search.results.selection import Selection
    from archlab.search.store.store import Store

Record = dict[str, Any]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Seen:
    """What a section sees of a comparison that is being made.

    `found` has all that no section tells. `whole` is the study's record, `record` that of the variants that stand in
    the table, `selections` theirs; `trials` are all rows. `others` are records and rows of the store's other studies.
    """

    found: Comparison
    whole: Record
    record: Record
    trials: Rows
    selections: list[Selection]
    layout: Layout
    others: Sequence[tuple[Record, Rows]] = ()


class Told:
    """A section's part of a report. It says what concerns it, and inherits the rest, which says nothing.

    A subclass is entered under its `key` by being defined, and found as a file of archlab/search/sections.
    """

    key: ClassVar[str]  # of the study file, of its record, of `Comparison.told`
    leads: ClassVar[bool] = False  # whether its notes stand before the table's own
    heads: ClassVar[bool] = False  # whether its tables stand before the main one
    paged: ClassVar[bool] = False  # whether the dashboard has a page for its tables
    beside: ClassVar[str] = ""  # the column of the main table after which its own stand; they end it without one
    known: ClassVar[dict[str, Told]] = {}

    def __init_subclass__(cls) -> None:
        Told.known[cls.key] = cls()

    def left_out(self, record: Record, trials: Rows) -> Collection[str]:
        """The variants that stand in no table, as its record and the study's rows say."""
        return ()

    def others(self, store: Store, record: Record) -> Iterable[tuple[Record, Rows]]:
        """The records and rows of those other studies of the store that it looks at."""
        return ()

    def frames(self, seen: Seen) -> dict[str, Any]:
        """What it found: frames, and plain values, by names that no other section has."""
        return {}

    def cells(self, found: Comparison) -> Mapping[str, list[Any]]:
        """Columns that it adds to the frame of the main table."""
        return {}

    def spared(self, found: Comparison) -> int:
        """The tokens that were not trained because of it, those of its own trials not yet counted."""
        return 0

    def notes(self, found: Comparison) -> Iterable[str]:
        """What a reader of the table must know of it."""
        return ()

    def columns(self, found: Comparison, rows: list[dict[str, Any]]) -> Iterable[Column]:
        """Columns of the printed main table, whose frame has these `rows`."""
        return ()

    def blocks(self, found: Comparison) -> Iterable[Block]:
        """Tables below the main one."""
        return ()

    def plain(self, found: Comparison) -> dict[str, Any]:
        """What a report as JSON holds of it, where frames become lists of rows."""
        return found.told[self.key]

    def csv(self, found: Comparison) -> dict[str, dict[str, Any]]:
        """Columns of a report as CSV: by name, the value of each variant that has one."""
        return {}


def sections_of(found: Comparison) -> list[Told]:
    """Those that told a comparison something, in the order of a report."""
    return [Told.known[key] for key in found.told]
