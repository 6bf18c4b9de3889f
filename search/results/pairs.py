"""The difference of any two variants of a study, in the loss or in what was measured of their trials.

That of losses is made as those of the table are: the noise of each moderated by that of the whole layout, with the
documents of the two. What was measured has no documents, and its paired differences have a t interval of their own.
Variants that do not pair have Welch's, and where seeds are added until a difference is resolved the intervals are those
that hold at every number of seeds.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import scipy  # its special is imported when it is used: an eighth of a second

from archlab.search.results.comparable import apart
from archlab.search.results.losses import Layout, pair_documents
from archlab.search.results.measured import PERPLEXITY, is_number, values_by_seed
from archlab.search.results.selection import Selection
from archlab.search.statistics.contrast import MINIMUM_SEEDS, Contrast, Floats, paired_difference, welch_difference
from archlab.search.statistics.intervals import layouts_of, pooled_variance, row_noise
from archlab.search.statistics.moderated import RowNoise
from archlab.search.statistics.sequential import always_difference, planned_df


class Differences:
    """Of the variants that a layout has rows of. Numbers are the perplexity, whose differences are those of the loss,
    or those that were measured, named as a published table names them."""

    def __init__(
        self,
        record: dict[str, Any],
        selections: list[Selection],
        layout: Layout,
        absent: str = "was left out by the screen",
    ) -> None:
        self.absent = absent  # why a variant that was asked for may have no row
        self.layout, self.selections = layout, {each.variant: each for each in selections}
        self.rows = {name: row for row, name in enumerate(self.selections)}
        self.sequential = bool(record.get("sequential"))
        self.record, self.variants = record, {each["name"]: each for each in record["variants"]}
        self._measured = values_by_seed(selections)
        self._documents: dict[tuple[str, str], tuple[float, int]] = {}

    @cached_property
    def pooled(self) -> tuple[float | None, int, int]:
        """The noise of one trial over all rows, its degrees of freedom, and those of a complete table."""
        every = [*range(len(self.layout.losses))]
        variance, df = pooled_variance(layouts_of(self.layout.losses, self.layout.batches, every, self.layout.keys))
        return variance, df, planned_df(self.layout.batches)

    @cached_property
    def noise(self) -> RowNoise | None:
        """The noise of each row."""
        every, bases = [*range(len(self.layout.losses))], np.asarray(self.layout.bases, np.intp)
        layouts = layouts_of(self.layout.losses, self.layout.batches, every, self.layout.keys)
        return row_noise(layouts, bases, every, self.layout.keys)

    def compare(self, one: str, other: str) -> bool:
        """Whether losses of the two say anything about each other."""
        return apart(self.record, self.variants[one], self.variants[other]) is None

    def values(self, number: str, variant: str) -> Floats:
        """A number per seed of the layout, NaN where there is none."""
        if number == PERPLEXITY:
            found: Floats = self.layout.losses[self.rows[variant]]
            return found
        for (name, measure, label), known in self._measured.items():
            if name == variant and is_number(number, measure, label):
                return np.array([known.get(seed, np.nan) for seed in self.layout.seeds])
        return np.full(len(self.layout.seeds), np.nan)

    def has(self, number: str, variant: str) -> bool:
        """Whether the number is known of any seed."""
        return bool(np.isfinite(self.values(number, variant)).any())

    def mean(self, number: str, variant: str) -> float:
        """The mean over the seeds, NaN where the number is not known."""
        known = self.values(number, variant) if variant in self.rows else np.empty(0)
        known = known[np.isfinite(known)]
        return float(known.mean()) if len(known) else float("nan")

    def of(self, number: str, one: str, other: str, comparisons: int) -> Contrast | None:
        """That number of `one` less that of `other`, with the interval of one of so many comparisons (Bonferroni)."""
        if not self.compare(one, other):
            return None
        ours, base = self.values(number, one), self.values(number, other)
        pairs = self.layout.batches[self.rows[one]] == self.layout.batches[self.rows[other]]
        known = self.documents(one, other) if number == PERPLEXITY else (0.0, 0)
        if self.sequential:
            pooled = self.pooled if pairs and number == PERPLEXITY else None
            return always_difference(ours, base, pooled, known, comparisons)
        if not pairs:
            both = [values[np.isfinite(values)] for values in (ours, base)]
            enough = min(map(len, both)) >= MINIMUM_SEEDS
            return welch_difference(both[0], both[1], known, comparisons if enough else 0)
        variance, df = None, 0.0
        if number != PERPLEXITY:  # whose noise is that of its own paired differences
            differences = (ours - base)[np.isfinite(ours - base)]
            df = len(differences) - 1.0
            variance = float(differences.var(ddof=1)) if df > 0 else None
        elif self.noise is not None:
            variance, df, _ = self.noise.of_difference(self.rows[one], self.rows[other])
        critical = float(scipy.special.stdtrit(df, 1 - 0.05 / (2 * comparisons))) if df > 0 else 0.0
        return paired_difference(ours, base, variance, critical, known, comparisons)

    def documents(self, one: str, other: str) -> tuple[float, int]:
        """The document variance of a difference and its degrees of freedom; zeros where it is unknown."""
        if (one, other) not in self._documents:
            losses, rows = self.layout.losses, self.rows
            both = np.isfinite(losses[rows[one]]) & np.isfinite(losses[rows[other]])
            shared = [seed for seed, known in zip(self.layout.seeds, both, strict=True) if known]
            sides = self.selections[one], self.selections[other]
            found = pair_documents(*sides, shared, self.layout.unit) if shared else None
            self._documents[one, other] = found or (0.0, 0)
        return self._documents[one, other]
