"""What a comparison of variants found: its table, its frames, its notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from archlab.search.results.measured import curves_frame, grids_frame, measures_frame


@dataclass(frozen=True)
class Comparison:
    """What a study found. Frames hold plain numbers; NaN or None is "there is none".

    table: a row per variant in the study's order. Losses and differences are of the TEST set; `perplexity_*` and
        `loss_*` over the seeds (std with n - 1); `delta`, `delta_low`, `delta_high` the difference to `baseline`, that
        of the row's own cell of a grid, in `noise["unit"]` with its simultaneous 95% interval; `mismatch` NaN
        without `match`; `diverged`, `failed`, `pruned`, `reused` count trials of the variant, `missing` those that are
        not finished; `cache_bytes_per_token` is what decoding keeps; `varied` has for each path in which any variants
        differ what stands there in this one; with a screen `probe_loss` and `probe_rank`.
    rates: a row per variant and tuned learning rate with the VALIDATION loss that the choice was made on.
    trials: a row per trial, every state.
    search: the trials of a search, best validation perplexity first; empty for other studies.
    searched: what is told of a search beside its trials: search_table.search_summary.
    rivals: a row per search of the store that asks the same, this one first (search_rivals.rivals_frame); empty where
        there is no other.
    effects: a row per level of what the study varies more than once: its mean difference over all else
        (factor_frames.all_effects); empty where each change stands in one row.
    noise: seed_sd, seed_spread, df, document_sd, resolvable (`unit`), resolvable_percent (of perplexity), comparisons,
        critical_value (the largest used), always_valid (whether intervals hold at every number of seeds), unit, margin
        (of equivalence, in `unit`, or None), paired (whether any difference is), unpaired (the variants whose
        difference is not), method (the sentence to print).
    notes: sentences: what was not run, diverged, pruned, reused, lies at an edge, or is not as it should be.
    provenance: study, data, tokens, context, seeds, recipe, versions, dates, identities (comparison/provenance.py).
    cost: what was trained for it, and would have been without reuse, early ends and the like.
    tuning: a row per variant that tuned its learning rate: fitted optimum, largest stable rate, sensitivity, verdict
        (search/sections/tune/frames.py).
    domains: of a mixture a row per variant and domain with the TEST perplexity and loss, means over the seeds.
    screen: a row per variant with its probe (screen_frame.screen_frame); empty for a study without a screen.
    screened: what is told of the screen beside these: screen_frame.screen_summary.
    measures, curves, grids: what `evaluate` asked of the final weights: a row per variant and number, per variant,
        curve and place, and per variant, grid and cell (search/results/measured.py).
    published: a row per variant that is one of the published table that the study reproduces, theirs beside ours; empty
        without one. agreement: how far the two orders agree (both published/frames.py). claims: what our data say
        of what the paper claims (search/sections/published/claims.py). paper: the table's name, caption and source.
    """

    study: str
    question: str
    baseline: str
    table: pd.DataFrame
    rates: pd.DataFrame
    trials: pd.DataFrame
    search: pd.DataFrame
    noise: dict[str, Any]
    notes: list[str]
    provenance: dict[str, Any]
    effects: pd.DataFrame = field(default_factory=pd.DataFrame)
    domains: pd.DataFrame = field(default_factory=pd.DataFrame)
    tuning: pd.DataFrame = field(default_factory=pd.DataFrame)
    searched: dict[str, Any] = field(default_factory=dict)
    rivals: pd.DataFrame = field(default_factory=pd.DataFrame)
    measures: pd.DataFrame = field(default_factory=lambda: measures_frame([]))
    curves: pd.DataFrame = field(default_factory=lambda: curves_frame([]))
    grids: pd.DataFrame = field(default_factory=lambda: grids_frame([]))
    rungs: pd.DataFrame = field(default_factory=pd.DataFrame)
    scaling: pd.DataFrame = field(default_factory=pd.DataFrame)
    screen: pd.DataFrame = field(default_factory=pd.DataFrame)
    screened: dict[str, Any] = field(default_factory=dict)
    published: pd.DataFrame = field(default_factory=pd.DataFrame)
    agreement: list[dict[str, Any]] = field(default_factory=list)
    claims: pd.DataFrame = field(default_factory=pd.DataFrame)
    paper: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)
