"""What a reader of the table must know besides its numbers, in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from archlab.search.formatting.words import spelled
from archlab.search.results.comparable import apart, is_one_tokenizer, tested_on
from archlab.search.results.selection import Selection, baselines_of, edge, is_over, rate
from archlab.search.sections.design.lines import design_notes
from archlab.search.statistics.contrast import MINIMUM_SEEDS
from archlab.search.statistics.intervals import Analysis
from archlab.search.statistics.sequential import TUNED_AT

_MOST = 8  # variants that a note lists
_SHARED = 0.2  # of the test text, from which on a note says that it is in the training text

FINGERPRINT = ("archlab", "torch", "triton", "numpy", "python", "threads", "cpu", "cpu_capability", "device", "gpu")


def _called(baseline: str) -> str:
    return "the baseline" if baseline == "baseline" else f"the baseline {baseline}"


def method_sentence(noise: dict[str, Any], analysis: Analysis, undocumented: bool, comparable: bool) -> str:
    """How the intervals were made, if any variant's losses are `comparable`; one sentence without a full stop."""
    if not comparable:
        return "no intervals: the losses of no variant compare with its baseline's"
    comparisons = noise["comparisons"]
    if analysis.always_valid:
        return _always_valid_sentence(noise, analysis, undocumented)
    if not comparisons:
        return f"no intervals: they need {MINIMUM_SEEDS} complete seeds of the baseline and of a variant"
    documents = _documents_added(noise, undocumented)
    times = f"{comparisons} comparison{'s' if comparisons > 1 else ''}"
    unpaired = [v for v in analysis.unpaired if (c := analysis.contrasts[v]) is not None and c.half_width is not None]
    if len(unpaired) == comparisons:
        corrected = f"Bonferroni-corrected for {times}" if comparisons > 1 else "one comparison"
        return f"95% intervals of unpaired differences (Welch), {documents}, {corrected}"
    corrected = f"Dunnett-corrected for {times}" if comparisons > 1 else "one comparison"
    if unpaired:
        corrected = f"{len(unpaired)} of unpaired ones (Welch), corrected for {times} (Dunnett and Bonferroni)"
    df = f"{noise['df']} degree{'s' if noise['df'] > 1 else ''} of freedom"
    pooled = f"pooled over {analysis.pooled} variants"
    if analysis.moderated:
        pooled = f"of each variant moderated by that of all {analysis.pooled}"
    return f"95% intervals of paired differences, seed variance {pooled} ({df}), {documents}, {corrected}"


def _always_valid_sentence(noise: dict[str, Any], analysis: Analysis, undocumented: bool) -> str:
    comparisons = noise["comparisons"]
    if all(contrast is None for contrast in analysis.contrasts):
        return "no intervals: they need complete seeds of the baseline and of a variant"
    df = f"{noise['df']} degree{'s' if noise['df'] != 1 else ''} of freedom"
    pooled = f"paired differences, seed variance of this study pooled over {analysis.pooled} variants ({df})"
    if not noise["paired"]:
        pooled = "differences, each with the variance of its own"
    elif analysis.unpaired:
        pooled += f", {len(analysis.unpaired)} of unpaired ones with their own"
    times = f"Bonferroni-corrected for {comparisons} comparisons" if comparisons > 1 else "one comparison"
    margin = "" if noise["margin"] is None else f"; equivalent: within ±{noise['margin']:g} {noise['unit']}"
    return (
        "95% intervals that hold at every number of seeds at once (confidence sequences of t mixtures, narrowest at "
        f"{TUNED_AT} seeds) of {pooled}, {_documents_added(noise, undocumented)}, {times}{margin}"
    )


def _documents_added(noise: dict[str, Any], undocumented: bool) -> str:
    if noise["document_sd"] is None:
        return "document variance not included"
    return "document variance added where known" if undocumented else "document variance added"


def gather_notes(
    record: dict[str, Any],
    selections: list[Selection],
    analysis: Analysis,
    undocumented: list[str],
    noise: dict[str, Any],
    verdicts: Sequence[str],
) -> Iterable[str]:
    """All notes: the table's own first, then each variant's in the study's order. `verdicts` are the table's."""
    yield from _test_notes(record)
    yield from _table_notes(record, selections, noise)
    yield from _seed_notes(record, selections, verdicts)
    yield from _rough_notes(record, selections)
    yield from _twin_notes(selections)
    yield from stage_notes(record)
    for selection in selections:
        yield from (f"{selection.variant}: {text}" for text in _variant_notes(selection))
    if analysis.uneven is not None:
        which, ratio = analysis.uneven
        yield (
            f"{selections[which].variant}: its seed noise is {ratio:.1f} times that of the others; "
            "its interval is too short, theirs are too long"
        )
    if undocumented:
        yield f"{', '.join(undocumented)}: document variance unknown, the intervals hold seed noise only"
    if reused := sum(bool(t["reused"]) for s in selections for t in s.trials):
        yield f"{reused} finished trial{'s were' if reused > 1 else ' was'} reused, from another study or run"
    if longer := sum("continued" in (t["result"] or {}) for s in selections for t in s.trials):
        yield f"{longer} trial{'s' if longer > 1 else ''} went on from shorter ones, which had the same beginning"
    yield from _fingerprint_notes(selections)


_NOT_COMPARED = {
    "other objective": "another objective than the baseline; losses of different predictions say nothing about which "
    "variant is better",
    "other test text": "tested on other text than the baseline; losses on different texts say nothing about which "
    "variant is better",
    "lossy tokenizer": "another tokenizer than the baseline, and one of the two does not keep all of the text: "
    "bits/byte of such a one are a lower bound, and perplexities do not compare",
}


def _test_notes(record: dict[str, Any]) -> Iterable[str]:
    """What was not tested on the text of its baseline, or of the rest of the table, or is in the training text too.
    Needs a record with baselines."""
    variants = {variant["name"]: variant for variant in record["variants"]}
    why = {name: apart(record, variant, variants[variant["baseline"]]) for name, variant in variants.items()}
    for verdict, told in _NOT_COMPARED.items():
        if names := [name for name, found in why.items() if found == verdict]:
            one, many = ("was", "were") if verdict == "other test text" else ("has", "have")
            yield f"NOT COMPARED: {', '.join(names)} {one if len(names) == 1 else many} {told}"
    if len({tested_on(record, variants[name]) for name in baselines_of(record)}) > 1:
        yield "the baselines were tested on different texts: losses compare within a cell only"
    shared = record["data"].get("overlap", {}).get("test", 0)
    if shared > _SHARED:
        yield (
            f"{shared:.0%} of the 13-grams of words of the test text are in the training text too: losses speak of "
            "memory as well (archlab data show)"
        )


def _rough_notes(record: dict[str, Any], selections: list[Selection]) -> Iterable[str]:
    """What a plan foresaw of the recipe, and what the journals say against it, of the baselines first. Needs a record
    with baselines."""
    yield from record.get("foreseen", ())
    bases = baselines_of(record)
    kinds: dict[str, dict[str, list[str]]] = {}
    counts = {selection.variant: len(selection.complete) for selection in selections}
    for selection in sorted(selections, key=lambda each: each.variant not in bases):
        for sign in (sign for trial in selection.complete.values() for sign in trial.get("signs", ())):
            kinds.setdefault(_NUMBER.sub("", sign), {}).setdefault(selection.variant, []).append(sign)
    for found in kinds.values():
        told = {sign for signs in found.values() for sign in signs}
        largest = max(told, key=lambda sign: [float(number) for number in _NUMBER.findall(sign)])
        sign = largest if len(told) == 1 else largest.replace(" by ", " by up to ")
        rows = [f"{name} ({len(signs)} of {counts[name]} trials)" for name, signs in found.items()]
        alone = "its difference" if len(rows) == 1 else "their differences"
        whose = "verdicts" if any(name in found for name in bases) else alone
        yield f"{sign}: {_few(rows)}; {whose} may be the recipe's (docs/concepts/recipes.md)"


_NUMBER = re.compile(r"[0-9.]+")


def _twin_notes(selections: list[Selection]) -> Iterable[str]:
    """Which variants came out as the same trials as an earlier one."""
    owner: dict[str, str] = {}
    for selection in selections:
        keys = [trial["key"] for trial in selection.complete.values()]
        if twin := next((owner[key] for key in keys if key in owner), None):
            yield f"{selection.variant}: the same trials as {twin}; they enter the seed variance once"
        for key in keys:
            owner.setdefault(key, selection.variant)


def stage_notes(record: dict[str, Any]) -> Iterable[str]:
    """The stages that follow on the training, those that variants share once."""
    names: dict[str, list[str]] = {}
    for variant in record["variants"]:
        for stage in variant.get("stages", ()):
            objective, counts = stage["objective"], (stage["trained_parameters"], stage["parameters"])
            kind = objective if isinstance(objective, str) else objective["type"]
            share = "all parameters" if counts[0] == counts[1] else f"{counts[0]:,} of {counts[1]:,} parameters"
            read = f"{stage['tokens']:,} tokens of {stage['data']['source']}, {kind}, {share}"
            text = f"then {stage['name']}: {read if stage['tokens'] else 'nothing is trained'}"
            names.setdefault(text, []).append(variant["name"])
    for text, found in names.items():
        shown = ", ".join(found[:_MOST]) + (" …" if len(found) > _MOST else "")
        yield text if len(found) == len(record["variants"]) else f"{shown}: {text}"


def _table_notes(record: dict[str, Any], selections: list[Selection], noise: dict[str, Any]) -> Iterable[str]:
    few = len(record["seeds"]) < MINIMUM_SEEDS and not record.get("sequential")
    if few and not any(t["role"] == "search" for s in selections for t in s.tuned):
        yield f"fewer than {MINIMUM_SEEDS} seeds: no intervals, and no difference here is more than a hint"
    differ = "(data, tokenizer, objective, context, batch or tokens differ)"
    if noise["unpaired"] and not noise["paired"]:
        yield f"the variants saw different batches {differ}: nothing is paired"
    elif noise["unpaired"]:
        rows = ", ".join(noise["unpaired"])
        yield f"unpaired, each with the interval of its own seeds: {rows} saw other batches than the baseline {differ}"
    if noise["unit"] == "bits/byte":
        yield "the variants have different tokens: differences are in bits/byte, and perplexities do not compare"
    names = baselines_of(record)
    texts = {tested_on(record, v) for v in record["variants"] if v["name"] in names}
    one = is_one_tokenizer([s for s in selections if s.variant in names])
    if noise["unit"] != "bits/byte" and len(texts) == 1 and not one:
        yield "the cells have different tokens: losses per token and perplexities compare within a cell only"
    missing = "there are no differences" if len(names) == 1 else "there are no differences to it"
    for base in (s for s in selections if s.variant in names):
        if base.diverged:
            yield f"{_called(base.variant)} diverged: {missing}"
        elif not base.complete:
            yield f"{_called(base.variant)} has no complete trial: {missing}"
    if len(names) > 1 and record.get("design", {}).get("type") == "both_ends":
        yield "what lacks one component is compared with the variant that has all, the others with the baseline"
    elif len(names) > 1:
        yield f"each variant is compared with the baseline of its own cell, one of {len(names)}"
    if design := record.get("design"):
        yield from design_notes(design)
    yield from start_notes(record)


def _seed_notes(record: dict[str, Any], selections: list[Selection], verdicts: Sequence[str]) -> Iterable[str]:
    """Who got more seeds than the others, and what these did not resolve."""
    options = record.get("sequential")
    if not options:
        return
    counts = {selection.variant: len(selection.complete) for selection in selections}
    more = [f"{name} {count}" for name, count in counts.items() if count > options["min"]]
    if more:
        yield f"more seeds than {options['min']} where a difference was not resolved: {_few(more)}"
    spent = [
        selection.variant
        for selection, verdict in zip(selections, verdicts, strict=True)
        if verdict == "undecided" and counts[selection.variant] >= options["max"]
    ]
    if spent:
        yield f"undecided after {options['max']} seeds, the most that the study asks for: {_few(spent)}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if names[_MOST:] else "")


def start_notes(record: dict[str, Any]) -> Iterable[str]:
    """Which variants start from weights, and how many of their parameter tensors have none there."""
    starts = {v["name"]: v["start"] for v in record["variants"] if v.get("start")}
    for digest in dict.fromkeys(start["sha256"] for start in starts.values()):
        fresh = {name: len(start["fresh"]) for name, start in starts.items() if start["sha256"] == digest}
        which = f"{len(fresh)} of {len(record['variants'])} variants start"
        told = [f"{count} of {name}" for name, count in fresh.items() if count]
        new = ", ".join(told[:_MOST]) + (f" and of {len(told) - _MOST} more variants" if told[_MOST:] else "")
        yield f"{which} from weights {digest[:12]}" + (f"; freshly initialised tensors: {new}" if new else "")


def _variant_notes(selection: Selection) -> Iterable[str]:
    reported = {trial["key"] for trial in selection.reported.values()}
    for seed, trial in sorted(selection.reported.items()):
        if trial["state"] == "diverged":
            yield f"seed {seed} diverged{_how(trial)}: no mean, no interval"
    for trial in selection.trials:
        if trial["state"] == "diverged" and trial["key"] not in reported:
            yield f"diverged while tuning{_how(trial)}"
        elif trial["state"] == "failed":
            yield f"seed {trial['seed']} failed{_how(trial)}"
        elif trial["state"] == "pruned":
            yield f"seed {trial['seed']} was pruned{_how(trial)}"
    yield from tuning_notes(selection)
    if selection.missing_seeds and not selection.diverged:
        repeats = [trial for trial in selection.trials if "repeat" in trial["role"].split("+")]
        going = {trial["seed"] for trial in repeats if trial["state"] == "running"}
        under_way = [seed for seed in selection.missing_seeds if seed in going]
        for said, seeds in (("in training", under_way), ("not run", sorted({*selection.missing_seeds} - going))):
            if seeds:
                yield f"{said}: seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    if sentence := edge(selection)[1]:
        yield sentence


def tuning_notes(selection: Selection) -> Iterable[str]:
    """What of a variant's tuning is missing, and what ended early or waits."""
    tuned = [t for t in selection.tuned if t["role"] == "tune"]
    if missing := selection.missing_points:
        begun = {trial["key"] for trial in tuned if not is_over(trial)}
        total = len(tuned) + len(missing) - len(begun)
        lr_only = all(set(point) <= {"lr"} for point in missing)
        named = ", ".join(f"{point['lr']:g}" if lr_only else f"({spelled(point)})" for point in missing[:_MOST])
        more = f" and {len(missing) - _MOST} more" if len(missing) > _MOST else ""
        what = "learning rates" if lr_only else "settings"
        yield f"not run: {len(missing)} of {total} {what} ({named}{more}); the choice is provisional"
    steps: dict[int, int] = {}
    for trial in tuned:
        if trial["state"] == "paused" and is_over(trial):
            steps[trial["result"]["step"]] = steps.get(trial["result"]["step"], 0) + 1
    if steps:
        told = ", ".join(f"{count} at step {step:,}" for step, count in sorted(steps.items()))
        what = "ended early, being behind" if selection.settled else "wait until the others are as far"
        yield f"{sum(steps.values())} of {len(tuned)} settings {what}: {told}"


def _how(trial: dict[str, Any]) -> str:
    """At which rate, and why: the first line of the reason, at most 120 characters."""
    value, lines = rate(trial), (trial["reason"] or "").strip().splitlines()
    at = "" if value is None else f" at learning rate {value:g}"
    return at + (f" ({lines[0][:120]})" if lines else "")


def _fingerprint_notes(selections: list[Selection]) -> Iterable[str]:
    prints = [t["result"].get("fingerprint") or {} for s in selections for t in s.complete.values()]
    for name in FINGERPRINT:
        found = sorted({str(p[name]) for p in prints if name in p})
        if len(found) > 1:
            yield f"the compared trials ran under different {name}: {', '.join(found)}"
    forced = sorted({str(p.get("kernels", "each node's own")) for p in prints if p})
    if len(forced) > 1:
        yield f"the compared trials ran under different kernels (ARCHLAB_KERNELS): {', '.join(forced)}"
    for slower in sorted({str(p["slower_kernels"]) for p in prints if "slower_kernels" in p}):
        yield f"some nodes had slower kernels than this device allows: {slower}; `archlab show --kernels` says why"
