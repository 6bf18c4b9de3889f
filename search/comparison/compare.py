"""The aggregated frames of a study: the one place that the printed table, the figures and the dashboard all read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from archlab.search.comparison.frames import domains_frame, trials_frame
from archlab.search.comparison.notes import gather_notes, method_sentence
from archlab.search.comparison.provenance import identified, provenance
from archlab.search.comparison.training_cost import spent_on, training_cost
from archlab.search.formatting.frames import NAN
from archlab.search.results.comparable import apart
from archlab.search.results.comparison import Comparison
from archlab.search.results.losses import Layout, lay_out, read_documents
from archlab.search.results.selection import Selection, baselines_of, edge, varied_in, with_baselines, with_tuned_size
from archlab.search.results.told import Record, Rows, Seen
from archlab.search.sections.rooms import select, told_of
from archlab.search.sections.seeds.decide import analysed, only_wanted, verdict_of
from archlab.search.statistics.contrast import Contrast
from archlab.search.statistics.intervals import Analysis
from archlab.search.store.findings import findings_of
from archlab.search.store.lock import states_of
from archlab.search.trial.rough_start import signs_of
from archlab.search.utils.canonical import canonical_json

if TYPE_CHECKING:
    from archlab.search.store.store import Store


def load_comparison(
    store: Store,
    study: str,
    against: str | None = None,
    contrasts: Sequence[Sequence[str]] | None = None,
    among: int | None = None,
    trials: Rows | None = None,
) -> Comparison:
    """Compares a study of a store. Reads the per-document losses of the trials that stand in the table, no others. In
    its `trials` one whose driver is gone is `interrupted`. `against` names a variant in the place of the baseline,
    `contrasts` pairs of variants in the place of those that it was run with, which were chosen `among` so many.
    `trials` are the rows of the study, where they have been read.

    Raises the store's error for an unknown study, DamagedDocuments for a damaged documents file, SpecError for an
    unknown variant.
    """
    trials = store.study_trials(study) if trials is None else [dict(trial) for trial in trials]
    record = identified(store.study(study), trials, store.spec)
    record = record if contrasts is None else {**record, "contrasts": contrasts, "contrasts_among": among}
    record = record if against is None else with_reference(record, against)
    spent, began = spent_on(store.events(study)), store.began({trial["key"] for trial in trials})
    chosen = {t["key"] for selection in select(record, trials) for t in selection.complete.values()}
    found = findings_of(store, record, chosen)
    once = dict.fromkeys(trial["key"] for trial in trials if trial["key"] in chosen)  # a trial may have two rows
    folders = {key: store.trial_folder(key) for key in once}
    documents = {key: read_documents(folder) for key, folder in folders.items()}
    states = states_of(trials, store.holder)
    for trial in trials:
        trial["state"] = states[trial["key"]]
        trial["measures"] = found.get(trial["key"], [])
        trial["documents"] = documents.get(trial["key"])
        stands = trial["key"] in chosen and trial["result"]
        trial["signs"] = signs_of(folders[trial["key"]], trial["result"]) if stands else ()
        trial["spent"] = spent.get(trial["key"], None if trial["owner"] in (None, study) else 0)
        trial["began"] = began.get(trial["key"])
    comparison = compare(record, trials, [each for told in told_of(record) for each in told.others(store, record)])
    if against is None:
        return comparison
    note = f"compared with {against}, not with the study's baseline: its intervals hold where it was chosen beforehand"
    return replace(comparison, notes=[note, *comparison.notes])


def compare(record: Record, trials: Rows, others: Sequence[tuple[Record, Rows]] = ()) -> Comparison:
    """The frames of one study from its record and its trials (plain data; `documents` of a trial may be None), and from
    those of the `others` that its sections look at.

    A variant is compared with the baseline that it names, else with the study's, which without one is the first
    variant. Raises ValueError when a baseline is no variant, or there is none.
    """
    whole = _checked(record)
    trials = [{"documents": None, **t} for t in trials]
    everyone = only_wanted(whole, trials, select(whole, trials))
    selections = [each for each in everyone if not each.left_out]  # the rest is compared with nothing
    names = {each.variant for each in selections}
    record = {**whole, "variants": [variant for variant in whole["variants"] if variant["name"] in names]}
    layout = lay_out(record, selections)
    analysis = analysed(record, layout)
    contrasts = dict(zip((each.variant for each in selections), analysis.contrasts, strict=True))
    noise, varied = _noise(record, analysis, layout), varied_in(whole)
    rows = zip(whole["variants"], everyone, strict=True)
    table = pd.DataFrame([_row(whole, v, s, contrasts.get(s.variant), varied[s.variant]) for v, s in rows])
    verdicts = [said for name, said in zip(table["variant"], table["verdict"], strict=True) if name in contrasts]
    notes = gather_notes(record, selections, analysis, layout.undocumented, noise, verdicts)
    found = Comparison(
        study=record["study"],
        question=record.get("question") or "",
        baseline=record["baseline"],
        table=table,
        trials=trials_frame(everyone, trials),
        noise=noise,
        provenance=provenance(whole, selections, trials),
        domains=domains_frame(record, selections),
    )
    sections = told_of(whole)
    seen = Seen(found, whole, record, trials, selections, layout, others)
    found = replace(found, told={each.key: each.frames(seen) for each in sections})
    first, then = (
        [note for each in sections if each.leads is leads for note in each.notes(found)] for leads in (True, False)
    )
    return replace(
        found,
        table=table.assign(**{name: values for each in sections for name, values in each.cells(found).items()}),
        notes=[*first, *notes, *then],
        cost=training_cost(whole, trials, everyone, {each.key: each.spared(found) for each in sections}),
    )


def with_reference(record: dict[str, Any], name: str) -> dict[str, Any]:
    """The record with another variant as the baseline: of a study with cells `name` may be the one of each own cell,
    at its own rung of a ladder.

    Raises SpecError for a name of none.
    """
    variants = record["variants"]
    cells = [canonical_json([v.get("axes"), v.get("rung")]) for v in variants]
    of_cell = {at: v["name"] for at, v in zip(cells, variants, strict=True) if v["name"].partition(" [")[0] == name}
    one = any(v["name"] == name for v in variants)
    references = [name if one else of_cell.get(at) for at in cells]
    if None in references:
        from archlab.arch_dsl.language.errors import SpecError, unknown  # which loads torch

        known = dict.fromkeys([*(v["name"].partition(" [")[0] for v in variants), *(v["name"] for v in variants)])
        raise SpecError.of("--against", unknown(name, "variant", known))
    found = [{**v, "baseline": reference} for v, reference in zip(variants, references, strict=True)]
    return {**record, "baseline": references[0], "variants": found}


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the baseline of each variant. Raises ValueError where one is no variant, or there is none."""
    names = [v["name"] for v in record["variants"]]
    if not names:
        raise ValueError(f"the study '{record['study']}' has no variants")
    record = with_baselines(record)
    for name in baselines_of(record):
        if name not in names:
            raise ValueError(f"the baseline '{name}' is not a variant of the study ({', '.join(names)})")
    return record


def _row(
    record: dict[str, Any],
    variant: dict[str, Any],
    selection: Selection,
    contrast: Contrast | None,
    varied: dict[str, str],
) -> dict[str, Any]:
    """One row of the table; what a screen left out has no contrast."""
    variant = with_tuned_size(variant, selection)
    done = [] if selection.has_no_mean else list(selection.complete.values())
    tests = [t["result"]["test"] for t in done]
    half = None if contrast is None else contrast.half_width
    lr = (selection.settings or {}).get("lr")
    if lr is None and not record.get("tune"):
        lr = record["recipe"].get("lr")
    delta = NAN if contrast is None else contrast.difference
    return {
        "variant": variant["name"],
        "baseline": variant["baseline"],
        "lr": NAN if lr is None else float(lr),
        "lr_at_edge": edge(selection)[0],
        "n": len(selection.complete),
        "perplexity_mean": _mean([t["perplexity"] for t in tests]),
        "perplexity_std": _std([t["perplexity"] for t in tests]),
        "loss_mean": _mean([t["loss"] for t in tests]),
        "loss_std": _std([t["loss"] for t in tests]),
        "bits_per_byte_mean": _mean([t.get("bits_per_byte") for t in tests]),
        "bytes_per_token": variant.get("bytes_per_token") or NAN,
        "delta": delta,
        "delta_low": NAN if half is None else delta - half,
        "delta_high": NAN if half is None else delta + half,
        "verdict": _verdict(record, variant, selection, contrast),
        "parameters": variant["parameters"],
        "active_parameters": variant.get("active_parameters", variant["parameters"]),
        "router_load_max": _mean([t.get("router_load_max") for t in tests]),
        "mismatch": (variant.get("mismatch") or 0.0) if any(v.get("matched") for v in record["variants"]) else NAN,
        "flops_per_token": variant["flops_per_token"],
        "tokens_per_s": _mean([t["result"].get("tokens_per_s") for t in done]),
        "peak_memory_bytes": _mean([t["result"].get("peak_memory_bytes") for t in done]),
        "cache_bytes_per_token": variant.get("cache_bytes_per_token", NAN),
        "diverged": selection.count("diverged"),
        "failed": selection.count("failed"),
        "pruned": selection.count("pruned"),
        "missing": len(selection.missing_seeds) + len(selection.missing_points),
        "reused": sum(bool(t["reused"]) for t in selection.trials),
        "components": dict(variant.get("components") or {}),
        "varied": varied,
    }


def _verdict(record: dict[str, Any], variant: dict[str, Any], selection: Selection, contrast: Contrast | None) -> str:
    """One of: baseline, better, worse, within noise (with a fixed number of seeds), equivalent, undecided (with seeds
    until it is resolved), left out (by a screen), diverged, pruned, other objective, other test text, lossy tokenizer,
    incomplete, too few seeds."""
    if selection.left_out:
        return "left out"
    if selection.has_no_mean:
        return "diverged" if selection.diverged else "pruned"
    if variant["name"] == variant["baseline"]:
        return "baseline"
    base = next(v for v in record["variants"] if v["name"] == variant["baseline"])
    if why := apart(record, variant, base):
        return why
    return verdict_of(contrast, record)


def _mean(values: list[float | None]) -> float:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else NAN


def _std(values: list[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else NAN


def _noise(record: dict[str, Any], analysis: Analysis, layout: Layout) -> dict[str, Any]:
    """What the intervals were made of, in plain values."""
    criticals = [c.critical for c in analysis.contrasts if c is not None and c.critical is not None]
    resolvable = analysis.resolvable
    nats = layout.unit == "nats/token"
    compared = sum(row != base for row, base in enumerate(layout.bases))
    noise = {
        "seed_sd": analysis.seed_sd,
        "seed_spread": analysis.seed_spread,
        "df": analysis.df,
        "document_sd": analysis.document_sd,
        "resolvable": resolvable,
        "resolvable_percent": 100 * math.expm1(resolvable) if resolvable is not None and nats else None,
        "comparisons": analysis.comparisons,
        "critical_value": max(criticals, default=None),
        "unit": layout.unit,
        "paired": len(analysis.unpaired) < compared or not compared,
        "unpaired": [record["variants"][row]["name"] for row in analysis.unpaired],
        "moderated": analysis.moderated,
        "always_valid": analysis.always_valid,
        "margin": (record.get("sequential") or {}).get("margin"),
    }
    comparable = compared > 0 or len(layout.bases) == 1
    return {**noise, "method": method_sentence(noise, analysis, bool(layout.undocumented), comparable)}
