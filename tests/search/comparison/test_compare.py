"""A study's frames: the choice on validation, the table on test, and what goes wrong on the way is visible."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from archlab.search.comparison.compare import compare, load_comparison
from archlab.search.formatting.tables import DASH
from archlab.search.reporting.report import build_page
from archlab.search.results.comparison import Comparison
from archlab.search.statistics.contrast import document_variance
from archlab.search.statistics.dunnett import dunnett_critical
from archlab.search.statistics.intervals import analyse
from archlab.search.store.store import Row, Store
from archlab.search.trial.trial import Trial
from tests.search.compare_kit import end_as, make_study, make_trial, measures, pick
from tests.search.noise_kit import by_hand

MODERATED = "95% intervals of paired differences, seed variance of each variant moderated by that of all {}"
EFFECTS = {"baseline": 0.0, "sdpa": -0.05, "value": 0.0005, "dense": 0.05}


def row(comparison: Comparison, variant: str) -> pd.Series:
    return comparison.table.set_index("variant").loc[variant]


def losses(trials: list[dict], variant: str) -> list[float]:
    return [t["result"]["test"]["loss"] for t in pick(trials, variant, role="repeat")]


def test_table_has_a_row_per_variant_with_the_mean_over_seeds() -> None:
    record, trials = make_study(EFFECTS)
    comparison = compare(record, trials)
    assert list(comparison.table["variant"]) == list(EFFECTS)
    assert list(comparison.table["verdict"]) == ["baseline", "better", "within noise", "worse"]
    assert list(comparison.table["n"]) == [3, 3, 3, 3]
    sdpa = row(comparison, "sdpa")
    perplexities = np.exp(losses(trials, "sdpa"))
    assert sdpa["perplexity_mean"] == pytest.approx(perplexities.mean())
    assert sdpa["perplexity_std"] == pytest.approx(perplexities.std(ddof=1))
    assert sdpa["loss_mean"] == pytest.approx(np.mean(losses(trials, "sdpa")))
    assert sdpa["bits_per_byte_mean"] == pytest.approx(np.mean(losses(trials, "sdpa")) / math.log(2) / 2)
    assert sdpa["tokens_per_s"] == pytest.approx(40_001.0)
    assert (sdpa["parameters"], sdpa["lr"], sdpa["lr_at_edge"]) == (861_313, 1e-3, False)
    assert sdpa["components"] == {"sdpa_gate": True}


def test_intervals_are_those_of_the_statistics() -> None:
    record, trials = make_study(EFFECTS)
    comparison = compare(record, trials)
    repeats = {name: pick(trials, name, role="repeat") for name in EFFECTS}
    nll = {name: np.mean([t["documents"]["nll"] for t in found], axis=0) for name, found in repeats.items()}
    tokens = trials[0]["documents"]["tokens"]
    documents = [document_variance(nll[name], tokens, nll["baseline"], tokens) for name in EFFECTS]
    analysis = analyse(np.array([losses(trials, name) for name in EFFECTS]), 0, documents)
    for name, contrast in zip(EFFECTS, analysis.contrasts, strict=True):
        found = row(comparison, name)
        if contrast is None:
            assert name == "baseline"
            assert found[["delta", "delta_low", "delta_high"]].isna().all()
            continue
        assert found["delta"] == pytest.approx(contrast.difference, rel=1e-12)
        assert found["delta_high"] - found["delta"] == pytest.approx(contrast.half_width, rel=1e-9)
        assert found["delta"] - found["delta_low"] == pytest.approx(contrast.half_width, rel=1e-9)
    assert comparison.noise["resolvable"] == pytest.approx(analysis.resolvable)
    assert comparison.noise["resolvable_percent"] == pytest.approx(100 * (math.exp(analysis.resolvable or 0) - 1))
    assert comparison.noise["df"] == 6
    assert comparison.noise["method"] == (
        "95% intervals of paired differences, seed variance of each variant moderated by that of all 4 (6 degrees of "
        "freedom), "
        "document variance added, Dunnett-corrected for 3 comparisons"
    )


def test_rate_is_chosen_on_validation_and_never_on_test() -> None:
    record, trials = make_study(EFFECTS)
    (low,) = pick(trials, "sdpa", role="tune", lr=5e-4)
    low["result"]["test"] = measures(0.1)
    assert row(compare(record, trials), "sdpa")["lr"] == 1e-3
    low["result"]["validation"] = measures(0.1)
    comparison = compare(record, trials)
    assert row(comparison, "sdpa")["lr"] == 5e-4
    assert row(comparison, "sdpa")["verdict"] == "incomplete", "seeds 1 and 2 are yet to run at the new rate"
    assert row(comparison, "sdpa")["n"] == 1
    assert "sdpa: not run: seeds 1, 2" in comparison.notes


@pytest.mark.parametrize(
    ("best", "ends", "at_edge", "note"),
    [
        (1e-3, {}, False, None),
        (2e-3, {}, True, "the best rate 0.002 is the largest that was tried: a larger one may be better"),
        (5e-4, {}, True, "the best rate 0.0005 is the smallest that was tried: a smaller one may be better"),
        (1e-3, {2e-3: "diverged"}, False, "the best rate 0.001 is the largest stable one: 0.002 diverged"),
        (1e-3, {2e-3: "failed"}, True, "the best rate 0.001 is the largest that was tried: a larger one may be better"),
        (1e-3, {2e-3: "pruned"}, False, None),
        (1e-3, {5e-4: "failed", 2e-3: "failed"}, False, None),
    ],
    ids=["inside", "top", "bottom", "diverged above", "failed above", "pruned above", "one rate left"],
)
def test_best_rate_at_the_edge_is_marked(best: float, ends: dict[float, str], at_edge: bool, note: str | None) -> None:
    record, trials = make_study(EFFECTS, best=best)
    for lr, state in ends.items():
        end_as(pick(trials, "value", role="tune", lr=lr), state)
    comparison = compare(record, trials)
    assert row(comparison, "value")["lr_at_edge"] == at_edge
    about = [n.removeprefix("value: ") for n in comparison.notes if n.startswith("value: the best rate")]
    assert about == ([note] if note else [])


def test_one_fixed_rate_is_no_edge_and_stands_in_the_table() -> None:
    record, trials = make_study(EFFECTS, rates=())
    comparison = compare(record, trials)
    assert set(comparison.table["lr"]) == {1e-3}
    assert not comparison.table["lr_at_edge"].any()
    assert comparison.rates.empty
    assert list(comparison.table["verdict"]) == ["baseline", "better", "within noise", "worse"]


def test_rates_frame_is_the_validation_curve() -> None:
    record, trials = make_study(EFFECTS)
    end_as(pick(trials, "dense", role="tune", lr=2e-3), "diverged", "loss is not finite")
    rates = compare(record, trials).rates
    assert list(rates["lr"]) == [5e-4, 1e-3, 2e-3] * 4
    sdpa = rates[rates["variant"] == "sdpa"].set_index("lr")
    assert list(sdpa["best"]) == [False, True, False]
    (tuned,) = pick(trials, "sdpa", role="tune", lr=2e-3)
    assert sdpa.loc[2e-3, "validation_loss"] == tuned["result"]["validation"]["loss"]
    dense = rates[rates["variant"] == "dense"].set_index("lr").loc[2e-3]
    assert dense["state"] == "diverged"
    assert math.isnan(dense["validation_perplexity"])


def test_trial_in_both_roles_is_one_row() -> None:
    record, trials = make_study(EFFECTS)
    frame = compare(record, trials).trials
    assert len(frame) == 4 * (3 + 2)
    assert frame["key"].is_unique
    mine = frame[(frame["variant"] == "sdpa") & (frame["seed"] == 0)].set_index("lr")
    assert dict(mine["role"]) == {5e-4: "tune", 1e-3: "tune+repeat", 2e-3: "tune"}
    assert dict(mine["reported"]) == {5e-4: False, 1e-3: True, 2e-3: False}


def test_first_seed_is_the_tune_trial_where_no_repeat_names_it() -> None:
    record, trials = make_study(EFFECTS)
    without = [t for t in trials if not (t["role"] == "repeat" and t["seed"] == 0)]
    pd.testing.assert_frame_equal(compare(record, without).table, compare(record, trials).table)


def test_variant_with_a_diverged_seed_has_no_mean_and_counts() -> None:
    record, trials = make_study(EFFECTS)
    end_as(pick(trials, "dense", role="repeat", seed=1), "diverged", "loss is not finite at step 12")
    comparison = compare(record, trials)
    dense = row(comparison, "dense")
    assert (dense["verdict"], dense["n"], dense["diverged"], dense["missing"]) == ("diverged", 2, 1, 0)
    assert dense[["perplexity_mean", "loss_mean", "delta", "delta_low", "tokens_per_s"]].isna().all()
    assert comparison.noise["comparisons"] == 2
    assert (
        "dense: seed 1 diverged at learning rate 0.001 (loss is not finite at step 12): no mean, no interval"
        in comparison.notes
    )


def test_variant_that_diverged_at_every_rate_is_diverged_and_waits_for_nothing() -> None:
    record, trials = make_study(EFFECTS)
    end_as(pick(trials, "dense", role="tune"), "diverged")
    trials = [t for t in trials if t["variant"] != "dense" or t["role"] == "tune"]
    dense = row(compare(record, trials), "dense")
    assert (dense["verdict"], dense["diverged"], dense["missing"]) == ("diverged", 3, 0)
    assert math.isnan(dense["lr"])


def test_failed_seed_leaves_the_others_and_no_interval_below_three() -> None:
    record, trials = make_study(EFFECTS)
    end_as(pick(trials, "sdpa", role="repeat", seed=2), "failed", "OSError: no space left\ntraceback")
    comparison = compare(record, trials)
    sdpa = row(comparison, "sdpa")
    assert (sdpa["verdict"], sdpa["n"], sdpa["failed"]) == ("incomplete", 2, 1)
    ours, base = losses([t for t in trials if t["result"]], "sdpa"), losses(trials, "baseline")[:2]
    assert sdpa["delta"] == pytest.approx(np.mean(np.subtract(ours, base)))
    assert math.isnan(sdpa["delta_low"])
    assert "sdpa: seed 2 failed at learning rate 0.001 (OSError: no space left)" in comparison.notes


def test_failed_seed_of_many_keeps_the_interval_of_the_complete_pairs() -> None:
    record, trials = make_study(EFFECTS, seeds=5)
    end_as(pick(trials, "sdpa", role="repeat", seed=2), "failed")
    comparison = compare(record, trials)
    sdpa, dense = row(comparison, "sdpa"), row(comparison, "dense")
    assert (sdpa["verdict"], sdpa["n"]) == ("better", 4)
    assert sdpa["delta_high"] - sdpa["delta"] > dense["delta_high"] - dense["delta"]


def test_planned_trials_are_missing_and_a_partial_choice_is_provisional() -> None:
    record, trials = make_study(EFFECTS)
    end_as(pick(trials, "sdpa", role="tune", lr=2e-3), "planned")
    end_as(pick(trials, "value", role="repeat", seed=1), "running")
    comparison = compare(record, trials)
    assert list(comparison.table["missing"]) == [0, 1, 1, 0]
    assert "sdpa: not run: 1 of 3 learning rates (0.002); the choice is provisional" in comparison.notes
    assert "value: in training: seed 1" in comparison.notes
    end_as(pick(trials, "value", role="repeat", seed=1), "planned")
    end_as(pick(trials, "value", role="tune", lr=2e-3), "running")
    (note,) = (note for note in compare(record, trials).notes if note.startswith("value: ") and "seed" in note)
    assert note == "value: not run: seed 1", "what is in training is another rate"


@pytest.mark.parametrize("state", ["planned", "diverged"])
def test_without_a_baseline_there_are_means_and_no_differences(state: str) -> None:
    record, trials = make_study(EFFECTS)
    end_as(pick(trials, "baseline"), state)
    comparison = compare(record, trials)
    assert row(comparison, "sdpa")["loss_mean"] == pytest.approx(np.mean(losses(trials, "sdpa")))
    assert comparison.table["delta"].isna().all()
    assert list(comparison.table["verdict"])[1:] == ["incomplete"] * 3
    assert any("there are no differences" in note for note in comparison.notes)
    assert comparison.noise["resolvable"] is None


def test_nothing_run_yet_is_a_table_of_dashes() -> None:
    record, _ = make_study(EFFECTS)
    comparison = compare(record, [])
    assert list(comparison.table["n"]) == [0] * 4
    assert list(comparison.table["missing"]) == [6] * 4
    assert comparison.trials.empty
    assert comparison.rates.empty
    assert comparison.noise["method"].startswith("no intervals")


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_print_no_interval(seeds: int) -> None:
    record, trials = make_study(EFFECTS, seeds=seeds)
    comparison = compare(record, trials)
    assert list(comparison.table["verdict"])[1:] == ["too few seeds"] * 3
    assert comparison.table[["delta_low", "delta_high"]].isna().all(axis=None)
    assert comparison.table["delta"][1:].notna().all()
    assert comparison.noise["resolvable"] is None
    assert "fewer than 3 seeds: no intervals, and no difference here is more than a hint" in comparison.notes


def test_reused_and_pruned_trials_are_told() -> None:
    record, trials = make_study(EFFECTS)
    for trial in pick(trials, "baseline"):
        trial["reused"] = True
    end_as(pick(trials, "value", role="tune", lr=2e-3), "pruned", "median at step 50")
    comparison = compare(record, trials)
    assert row(comparison, "baseline")["reused"] == 5
    assert row(comparison, "value")["pruned"] == 1
    assert "5 finished trials were reused, from another study or run" in comparison.notes
    assert "value: seed 0 was pruned at learning rate 0.002 (median at step 50)" in comparison.notes


def test_other_fingerprints_among_the_compared_trials_are_told() -> None:
    record, trials = make_study(EFFECTS)
    assert not any("ran under" in note for note in compare(record, trials).notes)
    pick(trials, "sdpa", role="repeat", seed=1)[0]["result"]["fingerprint"]["threads"] = "2"
    pick(trials, "sdpa", role="tune", lr=2e-3)[0]["result"]["fingerprint"]["torch"] = "2.11.0"
    told = [note for note in compare(record, trials).notes if "ran under" in note]
    assert told == ["the compared trials ran under different threads: 1, 2"]


def test_uneven_seed_noise_is_in_the_rows_interval_or_told_where_one_variance_is_for_all() -> None:
    record, trials = make_study({f"v{i}": 0.0 for i in range(6)}, seeds=8)
    for seed, trial in enumerate(pick(trials, "v3", role="repeat")):
        trial["result"]["test"] = measures(trial["result"]["test"]["loss"] + 0.2 * (-1) ** seed)
    comparison = compare(record, trials)
    halves = comparison.table["delta_high"] - comparison.table["delta"]
    assert comparison.noise["moderated"] and halves[3] > 3 * halves.drop(3).max()
    assert not any("its seed noise is" in note for note in comparison.notes)
    record["sequential"] = {"min": 2, "max": 8, "until": "resolved", "margin": None}
    pooled = compare(record, trials)
    assert not pooled.noise["moderated"]
    assert any(note.startswith("v3: its seed noise is") for note in pooled.notes)


def test_unknown_documents_leave_the_seed_noise_and_are_told() -> None:
    record, trials = make_study(EFFECTS)
    with_documents = compare(record, trials)
    pick(trials, "sdpa", role="repeat", seed=1)[0]["documents"] = None
    comparison = compare(record, trials)
    assert "sdpa: document variance unknown, the intervals hold seed noise only" in comparison.notes
    assert "document variance added where known" in comparison.noise["method"]
    assert row(comparison, "sdpa")["delta_low"] > row(with_documents, "sdpa")["delta_low"]
    for trial in trials:
        trial["documents"] = None
    comparison = compare(record, trials)
    assert "document variance not included" in comparison.noise["method"]
    assert comparison.noise["document_sd"] is None


def test_other_batches_are_compared_unpaired() -> None:
    record, trials = make_study(EFFECTS, paired=False)
    comparison = compare(record, trials)
    assert comparison.noise["method"].startswith("95% intervals of unpaired differences (Welch)")
    assert comparison.noise["unit"] == "nats/token"
    assert any("nothing is paired" in note for note in comparison.notes)
    paired = compare({**record, "paired": True}, trials)
    assert row(comparison, "sdpa")["delta"] == pytest.approx(row(paired, "sdpa")["delta"])
    assert row(comparison, "sdpa")["delta_low"] < row(paired, "sdpa")["delta_low"], "the seeds' share stays in"


def test_other_tokenizers_are_compared_in_bits_per_byte() -> None:
    record, trials = make_study(EFFECTS, paired=False)
    for trial in pick(trials, "sdpa"):
        for split in ("validation", "test"):
            trial["result"][split] = measures(2 * trial["result"][split]["loss"], bytes_per_token=4.0)
        trial["documents"] = {**trial["documents"], "tokens": trial["documents"]["tokens"] // 2}
    comparison = compare(record, trials)
    assert comparison.noise["unit"] == "bits/byte"
    base, sdpa = row(comparison, "baseline"), row(comparison, "sdpa")
    assert sdpa["delta"] == pytest.approx(sdpa["bits_per_byte_mean"] - base["bits_per_byte_mean"])
    assert comparison.noise["resolvable_percent"] is None
    assert any("bits/byte, and perplexities do not compare" in note for note in comparison.notes)


def test_batches_that_differ_between_cells_keep_the_pairs_within_each() -> None:
    record, trials = make_study(CELLS, paired=False)
    record = in_cells(record)
    for variant in record["variants"]:
        variant["batches"] = variant["name"].split(" ")[1]
    comparison = compare(record, trials)
    assert (comparison.noise["paired"], comparison.noise["unpaired"], comparison.noise["df"]) == (True, [], 2 + 4)
    assert comparison.noise["method"].startswith(MODERATED.format(5))
    assert not any("paired" in note for note in comparison.notes)
    record["variants"][-1]["batches"] = "other"
    mixed = compare(record, trials)
    assert (mixed.noise["paired"], mixed.noise["unpaired"], mixed.noise["df"]) == (True, ["wide [x=2]"], 2 + 2)
    assert "1 of unpaired ones (Welch), corrected for 3 comparisons" in mixed.noise["method"]
    (told,) = [note for note in mixed.notes if "paired" in note]
    assert "wide [x=2] saw other batches than the baseline" in told
    assert "nothing is paired" not in told


def test_other_test_text_is_no_difference() -> None:
    record, trials = make_study(EFFECTS)
    for variant in record["variants"]:
        variant["test"] = "other" if variant["name"] == "sdpa" else "same"
    comparison = compare(record, trials)
    assert list(comparison.table["verdict"]) == ["baseline", "other test text", "within noise", "worse"]
    assert row(comparison, "sdpa")[["delta", "delta_low", "delta_high"]].isna().all()
    assert row(comparison, "sdpa")["n"] == 3
    assert comparison.noise["comparisons"] == 2
    assert comparison.notes[0].startswith("NOT COMPARED: sdpa was tested on other text than the baseline")
    (column,) = [c for c in build_page(comparison).blocks[0].columns if "perplexity" in c.header]
    assert not column.cells[1].strong, "lower on another text is no better"


def test_where_no_text_is_the_baseline_s_the_table_says_that_nothing_compares() -> None:
    record, trials = make_study(EFFECTS)
    for variant in record["variants"]:
        variant["test"] = variant["name"]
    comparison = compare(record, trials)
    assert set(comparison.table["verdict"]) == {"baseline", "other test text"}
    assert comparison.noise["method"] == "no intervals: the losses of no variant compare with its baseline's"


def test_cells_with_their_own_test_texts_compare_within() -> None:
    record, trials = make_study(CELLS)
    record = in_cells(record)
    for variant in record["variants"]:
        variant["test"] = variant["batches"] = variant["name"].split(" ")[1]
    comparison = compare(record, trials)
    assert list(comparison.table["verdict"]) == ["baseline", "better", "baseline", "better", "within noise"]
    assert any("losses compare within a cell only" in note for note in comparison.notes)


def test_cells_with_their_own_tokenizers_compare_per_token_within() -> None:
    record, trials = make_study(CELLS)
    record = in_cells(record)
    for variant in record["variants"]:
        variant["batches"] = variant["name"].split(" ")[1]
        for trial in pick(trials, variant["name"]) if variant["batches"] == "[x=2]" else ():
            trial["result"]["test"] = measures(trial["result"]["test"]["loss"], bytes_per_token=4.0)
    comparison = compare(record, trials)
    assert comparison.noise["unit"] == "nats/token"
    assert any(note.startswith("the cells have different tokens") for note in comparison.notes)


def test_a_variant_that_is_another_one_enters_the_noise_once() -> None:
    record, trials = make_study(EFFECTS)
    without = compare(record, trials).noise
    twin = {**record["variants"][1], "name": "twin"}
    copies = [{**trial, "variant": "twin"} for trial in pick(trials, "sdpa")]
    comparison = compare({**record, "variants": [*record["variants"], twin]}, trials + copies)
    assert (comparison.noise["seed_sd"], comparison.noise["df"]) == (without["seed_sd"], without["df"])
    assert row(comparison, "twin")["delta"] == row(comparison, "sdpa")["delta"]
    assert "twin: the same trials as sdpa; they enter the seed variance once" in comparison.notes


def test_a_variant_with_a_pruned_seed_has_no_means_by_domain() -> None:
    record, trials = make_study(EFFECTS)
    record["data"]["domains"] = [{"name": "prose"}]
    for trial in trials:
        trial["documents"] = {**trial["documents"], "domain": np.zeros(len(trial["documents"]["nll"]), int)}
    assert {*compare(record, trials).domains["variant"]} == {*EFFECTS}
    end_as(pick(trials, "sdpa", role="repeat", seed=1), "pruned", "median at step 50")
    assert {*compare(record, trials).domains["variant"]} == {*EFFECTS} - {"sdpa"}


def test_search_is_ranked_by_validation_and_its_best_stands_in_the_table() -> None:
    record, _ = make_study({"base": 0.0}, seeds=1, rates=())
    effects = [0.02, -0.03, 0.01, 0.0]
    trials = [make_trial("base", "search", {"lr": 1e-3, "heads": i}, 0, e) for i, e in enumerate(effects)]
    end_as(trials[3:], "pruned", "asha")
    comparison = compare(record, trials)
    assert list(comparison.search["number"]) == [1, 2, 0, 3]
    assert comparison.search.loc[0, "settings"] == {"lr": 1e-3, "heads": 1}
    assert comparison.table.loc[0, "loss_mean"] == trials[1]["result"]["test"]["loss"]
    assert comparison.table.loc[0, "missing"] == 0
    assert comparison.rates.empty
    assert not any("fewer than" in note for note in comparison.notes)


def test_trials_of_variants_that_left_the_study_are_listed_and_not_compared() -> None:
    record, trials = make_study(EFFECTS)
    trials.append(make_trial("old", "repeat", {"lr": 1e-3}, 0, 0.0))
    comparison = compare(record, trials)
    assert "old" not in set(comparison.table["variant"])
    old = comparison.trials[comparison.trials["variant"] == "old"]
    assert list(old["reported"]) == [False]


def test_unknown_baseline_is_refused() -> None:
    record, trials = make_study(EFFECTS)
    with pytest.raises(ValueError, match=r"'basline' is not a variant of the study \(baseline, sdpa"):
        compare({**record, "baseline": "basline"}, trials)
    wrong = {**record, "variants": [*record["variants"][:-1], {**record["variants"][-1], "baseline": "other"}]}
    with pytest.raises(ValueError, match="the baseline 'other' is not a variant"):
        compare(wrong, trials)
    with pytest.raises(ValueError, match="has no variants"):
        compare({**record, "variants": []}, [])


CELLS = {"base [x=1]": 0.0, "gate [x=1]": -0.05, "base [x=2]": 0.3, "gate [x=2]": 0.25, "wide [x=2]": 0.3}


def in_cells(record: dict) -> dict:
    """Every variant compared with the first one of its cell."""
    variants = [{**v, "baseline": f"base {v['name'].split(' ')[1]}"} for v in record["variants"]]
    return {**record, "variants": variants}


def test_each_variant_is_compared_with_the_baseline_of_its_own_cell() -> None:
    record, trials = make_study(CELLS)
    comparison = compare(in_cells(record), trials)
    assert list(comparison.table["baseline"]) == ["base [x=1]"] * 2 + ["base [x=2]"] * 3
    assert list(comparison.table["verdict"]) == ["baseline", "better", "baseline", "better", "within noise"]
    for name in ("gate [x=2]", "wide [x=2]"):
        expected = np.subtract(losses(trials, name), losses(trials, "base [x=2]")).mean()
        assert row(comparison, name)["delta"] == pytest.approx(expected, rel=1e-9)
    assert row(comparison, "base [x=2]")[["delta", "delta_low", "delta_high"]].isna().all()
    assert (comparison.noise["comparisons"], comparison.noise["df"]) == (3, 8), "the noise is pooled over all cells"
    one = compare(record, trials)
    assert one.noise["seed_sd"] == comparison.noise["seed_sd"]
    assert one.noise["comparisons"] == 4
    assert row(one, "gate [x=2]")["verdict"] == "worse"
    assert "each variant is compared with the baseline of its own cell, one of 2" in comparison.notes


def test_intervals_of_cells_are_those_of_uncorrelated_differences() -> None:
    record, trials = make_study(CELLS)
    for trial in trials:
        trial["documents"] = None
    comparison = compare(in_cells(record), trials)
    table = np.array([losses(trials, name) for name in CELLS])
    for place, name in ((1, "gate [x=1]"), (3, "gate [x=2]"), (4, "wide [x=2]")):
        total, df = by_hand(table, place, 0 if place == 1 else 2, {0, 2})
        half = dunnett_critical(3, df, 0.0) * math.sqrt(total / 3)
        found = row(comparison, name)
        assert found["delta_high"] - found["delta"] == pytest.approx(half, rel=0.02), "but for steps of critical values"
        assert dunnett_critical(3, df, 0.0) > 1.03 * dunnett_critical(3, df, 0.5), "the wider one"


@pytest.mark.parametrize("paired", [True, False], ids=["paired", "unpaired"])
def test_a_lost_baseline_takes_only_its_own_cell_along(paired: bool) -> None:
    record, trials = make_study(CELLS, paired=paired)
    end_as(pick(trials, "base [x=1]"), "diverged", "loss is not finite")
    comparison = compare(in_cells(record), trials)
    assert list(comparison.table["verdict"]) == ["diverged", "incomplete", "baseline", "better", "within noise"]
    assert math.isnan(row(comparison, "gate [x=1]")["delta"])
    assert "the baseline base [x=1] diverged: there are no differences to it" in comparison.notes


def test_best_of_each_cell_is_strong() -> None:
    record, trials = make_study(CELLS)
    (column,) = [c for c in build_page(compare(in_cells(record), trials)).blocks[0].columns if "perplexity" in c.header]
    assert [cell.strong for cell in column.cells] == [False, True, False, True, False]


def test_order_of_the_trials_changes_nothing() -> None:
    record, trials = make_study(EFFECTS)
    one, other = compare(record, trials), compare(record, trials[::-1])
    pd.testing.assert_frame_equal(one.table, other.table)
    pd.testing.assert_frame_equal(one.rates, other.rates)
    assert one.noise == other.noise


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A real store with a finished study of two variants, without learning rates."""
    record, trials = make_study({"baseline": 0.0, "sdpa": -0.05}, rates=())
    found = Store.open(tmp_path / "store")
    rows = [
        Row(Trial({"name": t["variant"]}, {}, "none", t["seed"]), t["variant"], "repeat", t["settings"], t["seed"])
        for t in trials
    ]
    found.save_study("gate-position", record, "study: gate-position\n")
    found.add_trials("gate-position", rows)
    for planned, trial in zip(rows, trials, strict=True):
        attempt = found.claim(planned.trial.key, "gate-position")
        assert attempt == 1
        np.savez(found.trial_folder(planned.trial.key) / "test_documents.npz", **trial["documents"])
        found.finish(planned.trial.key, attempt, "complete", trial["result"])
    yield found
    found.close()


def test_stored_study_compares_as_its_plain_data(store: Store) -> None:
    loaded = load_comparison(store, "gate-position")
    direct = compare(*make_study({"baseline": 0.0, "sdpa": -0.05}, rates=()))
    pd.testing.assert_frame_equal(loaded.table, direct.table)
    assert loaded.noise == direct.noise
    assert loaded.trials["folder"].str.startswith(str(store.root)).all()


def test_damaged_documents_name_their_file(store: Store) -> None:
    key = load_comparison(store, "gate-position").trials["key"][0]
    path = store.trial_folder(key) / "test_documents.npz"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"test_documents\.npz is damaged"):
        load_comparison(store, "gate-position")
    path.unlink()
    assert any("document variance unknown" in n for n in load_comparison(store, "gate-position").notes)


def test_another_objective_is_no_difference() -> None:
    record, trials = make_study(EFFECTS)
    for variant in record["variants"]:
        if variant["name"] == "sdpa":
            variant |= {"objective": {"type": "masked"}, "test": "masked", "batches": "masked"}
    for trial in trials:
        if trial["variant"] == "sdpa":
            for split in ("validation", "test"):
                del trial["result"][split]["bits_per_byte"]
    comparison = compare(record, trials)
    assert list(comparison.table["verdict"]) == ["baseline", "other objective", "within noise", "worse"]
    assert row(comparison, "sdpa")[["delta", "delta_low", "delta_high", "bits_per_byte_mean"]].isna().all()
    assert row(comparison, "sdpa")["n"] == 3
    assert comparison.noise["unit"] == "nats/token"
    assert comparison.notes[0].startswith("NOT COMPARED: sdpa has another objective than the baseline")
    assert not any("tested on other text" in note for note in comparison.notes)
    perplexity, size = (
        next(c for c in build_page(comparison).blocks[0].columns if name in c.header)
        for name in ("perplexity", "bits/byte")
    )
    assert not perplexity.cells[1].strong, "lower for another question is no better"
    assert size.cells[1].text == DASH != size.cells[0].text


@pytest.mark.parametrize("lossy", [{"sdpa": "b" * 16}, {"baseline": "a" * 16, "value": "a" * 16, "dense": "a" * 16}])
def test_a_lossy_tokenizer_is_no_difference(lossy: dict[str, str]) -> None:
    record, trials = make_study(EFFECTS)
    for variant in record["variants"]:
        variant |= {"lossy": lossy[variant["name"]]} if variant["name"] in lossy else {}
    for trial in pick(trials, "sdpa"):
        trial["result"]["test"]["bits_per_byte"] *= 0.8
    comparison = compare(record, trials)
    assert list(comparison.table["verdict"]) == ["baseline", "lossy tokenizer", "within noise", "worse"]
    assert row(comparison, "sdpa")[["delta", "delta_low", "delta_high"]].isna().all()
    assert row(comparison, "sdpa")["bits_per_byte_mean"] > 0
    assert comparison.notes[0].startswith(
        "NOT COMPARED: sdpa has another tokenizer than the baseline, and one of the two"
    )
    assert sum("NOT COMPARED" in note for note in comparison.notes) == 1
    (perplexity,) = [c for c in build_page(comparison).blocks[0].columns if "perplexity" in c.header]
    assert not perplexity.cells[1].strong, "lower for less text is no better"


def test_events_are_read_once_however_many_trials_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no index by trial: a question for some of the trials at a time would read all of them each time."""
    with Store.open(tmp_path / "store") as store:
        asked, query = list[str](), store.database.query
        monkeypatch.setattr(store.database, "query", lambda sql, values=(): asked.append(sql) or query(sql, values))
        assert store.began(f"{number:064x}" for number in range(2000)) == {}
    assert len(asked) == 1
