"""What a reader of the table must know besides its numbers, in sentences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from search.selection import Selection, baselines_of, edge, rate
from search.statistics import MINIMUM_SEEDS, Analysis

FINGERPRINT = ("archlab", "torch", "triton", "numpy", "python", "threads", "cpu", "cpu_capability", "device", "gpu")


def method_sentence(noise: dict[str, Any], variants: int, undocumented: bool) -> str:
    """How the intervals were made; one sentence without a full stop. `variants` is how many the variance pools."""
    comparisons = noise["comparisons"]
    if not comparisons:
        return f"no intervals: they need {MINIMUM_SEEDS} complete seeds of the baseline and of a variant"
    documents = "document variance not included" if noise["document_sd"] is None else "document variance added"
    if undocumented and noise["document_sd"] is not None:
        documents = "document variance added where known"
    times = f"{comparisons} comparison{'s' if comparisons > 1 else ''}"
    if not noise["paired"]:
        corrected = f"Bonferroni-corrected for {times}" if comparisons > 1 else "one comparison"
        return f"95% intervals of unpaired differences (Welch), {documents}, {corrected}"
    corrected = f"Dunnett-corrected for {times}" if comparisons > 1 else "one comparison"
    df = f"{noise['df']} degree{'s' if noise['df'] > 1 else ''} of freedom"
    return (
        f"95% intervals of paired differences, seed variance pooled over {variants} variants ({df}), "
        f"{documents}, {corrected}"
    )


def gather_notes(
    record: dict[str, Any],
    selections: list[Selection],
    analysis: Analysis,
    undocumented: list[str],
    noise: dict[str, Any],
) -> list[str]:
    """All notes: the table's own first, then each variant's in the study's order."""
    notes = [*_table_notes(record, selections, noise)]
    for selection in selections:
        notes += [f"{selection.variant}: {text}" for text in _variant_notes(record, selection)]
    if analysis.uneven is not None:
        which, ratio = analysis.uneven
        notes.append(
            f"{selections[which].variant}: its seed noise is {ratio:.1f} times that of the others; "
            "its interval is too short, theirs are too long"
        )
    if undocumented:
        notes.append(f"{', '.join(undocumented)}: document variance unknown, the intervals hold seed noise only")
    reused = sum(bool(t["reused"]) for s in selections for t in s.trials)
    if reused:
        notes.append(f"{reused} finished trial{'s were' if reused > 1 else ' was'} reused, from another study or run")
    return [*notes, *_fingerprint_notes(selections)]


def _table_notes(record: dict[str, Any], selections: list[Selection], noise: dict[str, Any]) -> Iterable[str]:
    if len(record["seeds"]) < MINIMUM_SEEDS and not any(t["role"] == "search" for s in selections for t in s.tuned):
        yield f"fewer than {MINIMUM_SEEDS} seeds: no intervals, and no difference here is more than a hint"
    if not noise["paired"]:
        yield "the variants saw different batches (tokenizer, context or batch size differ): nothing is paired"
    if noise["unit"] == "bits/byte":
        yield "the variants have different tokens: differences are in bits/byte, and perplexities do not compare"
    names = baselines_of(record)
    missing = "there are no differences" if len(names) == 1 else "there are no differences to it"
    for base in (s for s in selections if s.variant in names):
        if base.diverged:
            yield f"the baseline {base.variant} diverged: {missing}"
        elif not base.complete:
            yield f"the baseline {base.variant} has no complete trial: {missing}"
    if len(names) > 1:
        yield f"each variant is compared with the baseline of its own cell, one of {len(names)}"


def _variant_notes(record: dict[str, Any], selection: Selection) -> Iterable[str]:
    reported = {t["key"]: seed for seed, t in selection.reported.items()}
    for seed, trial in sorted(selection.reported.items()):
        if trial["state"] == "diverged":
            yield f"seed {seed} diverged{_at(trial)}{_because(trial)}: no mean, no interval"
    for trial in selection.trials:
        if trial["state"] == "diverged" and trial["key"] not in reported:
            yield f"diverged while tuning{_at(trial)}{_because(trial)}"
        elif trial["state"] == "failed":
            yield f"seed {trial['seed']} failed{_at(trial)}{_because(trial)}"
        elif trial["state"] == "pruned":
            yield f"seed {trial['seed']} was pruned{_at(trial)}{_because(trial)}"
    if selection.missing_rates:
        total = len(selection.missing_rates) + len(
            {rate(t) for t in selection.tuned if t["role"] == "tune"} - set(selection.missing_rates)
        )
        rates = ", ".join(f"{r:g}" for r in selection.missing_rates)
        yield f"not run: {len(selection.missing_rates)} of {total} learning rates ({rates}); the choice is provisional"
    if selection.missing_seeds and not selection.diverged:
        seeds = ", ".join(str(s) for s in selection.missing_seeds)
        yield f"not run: seed{'s' if len(selection.missing_seeds) > 1 else ''} {seeds}"
    sentence = edge(selection)[1]
    if sentence:
        yield sentence


def _at(trial: dict[str, Any]) -> str:
    value = rate(trial)
    return "" if value is None else f" at learning rate {value:g}"


def _because(trial: dict[str, Any]) -> str:
    """The first line of the reason, at most 120 characters."""
    lines = (trial["reason"] or "").strip().splitlines()
    return f" ({lines[0][:120]})" if lines else ""


def _fingerprint_notes(selections: list[Selection]) -> Iterable[str]:
    prints = [t["result"].get("fingerprint") or {} for s in selections for t in s.complete.values()]
    for name in FINGERPRINT:
        found = sorted({str(p[name]) for p in prints if name in p})
        if len(found) > 1:
            yield f"the compared trials ran under different {name}: {', '.join(found)}"
