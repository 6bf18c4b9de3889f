"""How many seeds each variant has by now: those of the study, or as many as its comparison takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.results.selection import Selection, is_lost, loss, with_baselines
from archlab.search.sections.rooms import select
from archlab.search.sections.screen.decide import DECIDED, only_of, screened
from archlab.search.store.store import TERMINAL

if TYPE_CHECKING:  # what needs scipy is imported where it is used: most commands only read `seeds`
    from archlab.search.results.losses import Layout
    from archlab.search.statistics.contrast import Contrast
    from archlab.search.statistics.intervals import Analysis

_KEPT = 64
_DECIDED: dict[tuple[object, ...], list[str]] = {}


def wanted_seeds(record: dict[str, Any], trials: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The seeds that each variant of a study should have by now, given its trials; a pure function of both.

    The decisions are replayed from the first on: each is made when all trials that were wanted before it have ended,
    and looks at these alone, so that neither timing nor what another run left changes it. A variant and its baseline
    get the same seeds. While a screen has not decided none has more than the least, and what it leaves out has none.
    """
    seeds, options = list(record["seeds"]), record.get("sequential")
    if not options:
        return {variant["name"]: seeds for variant in record["variants"]}
    record = with_baselines(record)
    if record.get("screen"):
        found = screened(record, trials)
        if found.state not in DECIDED:
            return {variant["name"]: seeds[: options["min"]] for variant in record["variants"]}
        record = only_of(record, found.wanted)
    bases = {variant["name"]: variant["baseline"] for variant in record["variants"]}
    counts = dict.fromkeys(bases, min(options["min"], len(seeds)))
    selections = select(record, trials)
    while True:
        wanted = {name: seeds[:count] for name, count in counts.items()}
        seen = []
        for each in selections:
            mine = {seed: trial for seed, trial in each.reported.items() if seed in wanted[each.variant]}
            seen.append(replace(each, reported=mine))
        if not all(each.pruned or _ended(now, wanted[now.variant]) for each, now in zip(selections, seen, strict=True)):
            return wanted
        growing = [name for name in _undecided(record, seen) if counts[name] < len(seeds)]
        if not growing:
            return wanted
        for name in growing:
            counts[name] += 1
            counts[bases[name]] = max(counts[bases[name]], counts[name])


def _undecided(record: dict[str, Any], selections: list[Selection]) -> list[str]:
    """The variants whose difference to their baseline more seeds may resolve. Needs a record with baselines.

    It is remembered: all earlier decisions are replayed whenever a trial ends.
    """
    from archlab.search.results.losses import lay_out

    variants = tuple((v["name"], v["baseline"], v.get("batches"), v.get("test")) for v in record["variants"])
    seen = tuple(
        (selection.variant, seed, trial["key"], trial["state"], loss(trial, "test"))
        for selection in selections
        for seed, trial in sorted(selection.reported.items())
    )
    margin = record["sequential"]["margin"]
    asked = (variants, seen, margin)
    if asked not in _DECIDED:
        while len(_DECIDED) >= _KEPT:
            del _DECIDED[next(iter(_DECIDED))]
        layout = lay_out(record, [with_documents(selection) for selection in selections])
        pairs = zip(selections, analysed(record, layout).contrasts, strict=True)
        _DECIDED[asked] = [each.variant for each, found in pairs if found is not None and not decision(found, margin)]
    return _DECIDED[asked]


def analysed(record: dict[str, Any], layout: Layout) -> Analysis:
    """The comparisons of a study, with the intervals that its way of choosing seeds needs."""
    from archlab.search.statistics.intervals import analyse

    always = bool(record.get("sequential"))
    return analyse(layout.losses, layout.bases, layout.documents, layout.batches, layout.keys, always)


def decision(contrast: Contrast, margin: float | None) -> str | None:
    """better, worse, or equivalent where the interval lies within ±margin; None while it says none of these."""
    half = contrast.half_width
    if half is None:
        return None
    if abs(contrast.difference) > half:
        return "better" if contrast.difference < 0 else "worse"
    return "equivalent" if margin is not None and abs(contrast.difference) + half < margin else None


def verdict_of(contrast: Contrast | None, record: dict[str, Any]) -> str:
    """What is said of one difference: better, worse, equivalent, else within noise, or undecided with seeds until it is
    resolved; too few seeds in a study that has too few for an interval, incomplete where trials are missing."""
    from archlab.search.statistics.contrast import MINIMUM_SEEDS

    if contrast is None:
        return "incomplete"
    if sequential := record.get("sequential"):
        return decision(contrast, sequential["margin"]) or "undecided"
    if contrast.half_width is None:
        return "too few seeds" if len(record["seeds"]) < MINIMUM_SEEDS else "incomplete"
    return decision(contrast, None) or "within noise"


def only_wanted(record: dict[str, Any], trials: list[dict[str, Any]], selections: list[Selection]) -> list[Selection]:
    """The selections, missing no seed that is not wanted yet."""
    if not record.get("sequential"):
        return selections
    wanted = wanted_seeds(record, trials)
    return [
        replace(each, missing_seeds=tuple(seed for seed in each.missing_seeds if seed in wanted.get(each.variant, ())))
        for each in selections
    ]


def _ended(selection: Selection, seeds: Iterable[int]) -> bool:
    """Whether nothing more is to come of these seeds: all ended, or the variant has no mean whatever they say."""
    if selection.has_no_mean:
        return True
    if selection.tuned and selection.missing_points:
        return False  # what is chosen by now may be chosen otherwise
    if selection.settings is None and selection.tuned:
        return all(trial["state"] in TERMINAL or is_lost(trial) for trial in selection.tuned)
    return all(seed in selection.reported and selection.reported[seed]["state"] in TERMINAL for seed in seeds)


def with_documents(selection: Selection) -> Selection:
    """The selection with the documents of its complete trials, read where the trials don't bring them."""
    reported = dict(selection.reported)
    for seed, trial in reported.items():
        if "documents" not in trial:
            there = trial["state"] == "complete" and trial.get("folder")
            reported[seed] = {**trial, "documents": _documents(str(trial["folder"])) if there else None}
    return replace(selection, reported=reported)


@lru_cache(maxsize=256)
def _documents(folder: str) -> dict[str, Any] | None:
    """A complete trial's documents, which don't change. Damaged ones count as none here: the report names the file."""
    from archlab.search.results.losses import DamagedDocuments, read_documents

    try:
        return read_documents(Path(folder))
    except DamagedDocuments:
        return None
