"""The trials of a study as its pages list them, and which of them a filter keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from archlab.dashboards.library import Study
from archlab.search.comparison.frames import trials_frame
from archlab.search.formatting.filters import parse_filter
from archlab.search.formatting.frames import records
from archlab.search.reporting.main_table import OF_TRIAL, row_values, trial_values
from archlab.search.sections.rooms import select


def trials_of(study: Study) -> list[dict[str, Any]]:
    """The study's trials, each with all of its roles."""
    if study.comparison is not None:
        frame = study.comparison.trials
    else:
        frame = trials_frame(select(study.record, study.trials), study.trials)
    found: list[dict[str, Any]] = frame.to_dict("records")
    for trial in found:
        if trial["state"] in ("running", "interrupted"):
            trial["step"] = study.curves[trial["key"]].last_step or trial["step"]
    return found


def kept(study: Study, trials: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The trials that a filter keeps, which may ask what a trial has and what the table says of its variant. Raises
    BadFilter."""
    if not where.strip():
        return [*trials]
    found = study.comparison
    of = {} if found is None else {row["variant"]: row for row in row_values(found, records(found.table))}
    values = [of.get(trial["variant"], {}) | trial_values(trial) for trial in trials]
    asked = parse_filter(where, dict.fromkeys(name for each in [OF_TRIAL, *values] for name in each))
    return [trial for trial, each in zip(trials, values, strict=True) if asked.holds(each)]
