"""What a comparison of variants found: its table, its frames, its notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.tables import DASH, interval, number, with_error

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Comparison:
    """What a study found. Frames hold plain numbers; NaN or None is "there is none".

    table: a row per variant in the study's order. Losses and differences are of the TEST set; `perplexity_*` and
        `loss_*` over the seeds (std with n - 1); `delta`, `delta_low`, `delta_high` the difference to `baseline`, that
        of the row's own cell of a grid, in `noise["unit"]` with its simultaneous 95% interval; `mismatch` NaN
        without `match`; `diverged`, `failed`, `pruned`, `reused` count trials of the variant, `missing` those that are
        not finished; `cache_bytes_per_token` is what decoding keeps; `varied` has for each path in which any variants
        differ what stands there in this one. Sections add columns: a screen `probe_loss` and `probe_rank`.
    trials: a row per trial, every state.
    noise: seed_sd, seed_spread, df, document_sd, resolvable (`unit`), resolvable_percent (of perplexity), comparisons,
        critical_value (the largest used), always_valid (whether intervals hold at every number of seeds), unit, margin
        (of equivalence, in `unit`, or None), paired (whether any difference is), unpaired (the variants whose
        difference is not), method (the sentence to print).
    notes: sentences: what was not run, diverged, pruned, reused, lies at an edge, or is not as it should be.
    provenance: study, data, tokens, context, seeds, recipe, versions, dates, identities (comparison/provenance.py).
    domains: of a mixture a row per variant and domain with the TEST perplexity and loss, means over the seeds.
    cost: what was trained for it, and would have been without reuse, early ends and the like.
    told: what the sections of the study found, by their keys: frames and plain values by name, which are attributes
        too. archlab/search/sections has them, each in the `frames` of its told.py: `rungs` and `scaling` of a ladder,
        `search` and `searched` of a search, `measures`, `curves` and `grids` of `evaluate` …
    """

    study: str
    question: str
    baseline: str
    table: pd.DataFrame
    trials: pd.DataFrame
    noise: dict[str, Any]
    provenance: dict[str, Any]
    domains: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    cost: dict[str, Any] = field(default_factory=dict)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Comparison({self.study}: {len(self.table)} variants, {len(self.trials)} trials)"

    def _repr_html_(self) -> str:
        """What a notebook shows of it: the table's means and differences, with their intervals."""
        rows = self.table.copy()
        rows["perplexity"] = [*map(with_error, rows["perplexity_mean"], rows["perplexity_std"])]
        reach = zip(rows["delta"], rows["delta_low"], rows["delta_high"], strict=True)
        rows["difference"] = [f"{number(d, '+.4f')} {interval(low, high)}".strip(f" {DASH}") for d, low, high in reach]
        shown = rows[["variant", "n", "perplexity", "difference", "verdict", "parameters"]]
        shown = shown.rename(columns={"difference": f"difference, {self.noise['unit']}"})
        return f"<p>{escape(self.question)}</p>{shown.to_html(index=False, escape=True)}"

    def __getattr__(self, name: str) -> Any:
        for found in self.__dict__.get("told", {}).values():
            if name in found:
                return found[name]
        raise AttributeError(name)
