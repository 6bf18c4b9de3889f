"""How many seeds a study asks for: decisions follow from the trials alone, and end where nothing is to be decided."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from archlab.search.comparison.compare import compare
from archlab.search.reporting.report import build_page
from archlab.search.reporting.text import text
from archlab.search.sections.seeds.decide import wanted_seeds
from tests.search.compare_kit import end_as, make_study, make_trial, pick

EFFECTS = {"baseline": 0.0, "same": 0.0, "worse": 0.2, "better": -0.2}
OPTIONS = {"min": 2, "max": 6, "until": "resolved", "margin": None}


def study(margin: float | None = None, effects: dict[str, float] = EFFECTS, rates: tuple[float, ...] = ()) -> Any:
    """A record of sequential seeds, without trials."""
    record, _ = make_study(effects, seeds=6, rates=rates)
    return record | {"sequential": OPTIONS | {"margin": margin}}


def trained(record: dict[str, Any], effects: dict[str, float] = EFFECTS, reverse: bool = False) -> list[dict[str, Any]]:
    """All trials that come of asking for what is wanted until nothing more is, one at a time."""
    trials: dict[tuple[str, int], dict[str, Any]] = {}
    while True:
        wanted = wanted_seeds(record, list(trials.values()))
        missing = [(name, seed) for name, seeds in wanted.items() for seed in seeds if (name, seed) not in trials]
        if not missing:
            return list(trials.values())
        name, seed = missing[-1 if reverse else 0]
        trials[name, seed] = make_trial(name, "repeat", {}, seed, effects[name])


def counts(record: dict[str, Any], trials: list[dict[str, Any]]) -> dict[str, int]:
    return {name: len(seeds) for name, seeds in wanted_seeds(record, trials).items()}


def test_a_number_of_seeds_is_that_number() -> None:
    record, trials = make_study(EFFECTS, rates=())
    assert wanted_seeds(record, trials) == wanted_seeds(record, []) == {name: [0, 1, 2] for name in EFFECTS}


def test_seeds_are_added_where_a_difference_is_not_resolved_and_the_baseline_keeps_up() -> None:
    record = study()
    assert counts(record, []) == dict.fromkeys(EFFECTS, 2)
    found = counts(record, trained(record))
    assert found["baseline"] == found["same"] == 6
    assert found["worse"] < 6 and found["better"] < 6


def test_what_is_equivalent_within_the_margin_gets_no_more() -> None:
    assert counts(study(), trained(study()))["same"] == 6
    record = study(margin=0.05)
    trials = trained(record)
    assert counts(record, trials)["same"] < 6
    comparison = compare(record, trials)
    assert list(comparison.table["verdict"]) == ["baseline", "equivalent", "worse", "better"]
    assert "equivalent within 0.05" in text(build_page(comparison))


def test_the_order_in_which_trials_end_changes_nothing() -> None:
    record = study()
    one, other = (trained(record, reverse=reverse) for reverse in (False, True))
    assert {t["key"] for t in one} == {t["key"] for t in other}


def test_a_decision_waits_for_all_trials_before_it() -> None:
    record, trials = study(), trained(study())
    late = pick(trials, "same", seed=1)[0]
    for state in ("planned", "running", "paused"):
        assert counts(record, [t for t in trials if t is not late] + [late | {"state": state}]) == dict.fromkeys(
            EFFECTS, 2
        )


def test_trials_that_nobody_asked_for_change_no_decision() -> None:
    """More seeds than wanted are there when a study's `max` was larger before; the table shows them all."""
    record, trials = study(), trained(study())
    more = [make_trial("worse", "repeat", {}, 5, 9.0), make_trial("better", "repeat", {}, 5, 9.0)]
    assert counts(record, trials + more) == counts(record, trials)


def test_a_variant_that_has_no_mean_asks_for_nothing_and_holds_nobody_up() -> None:
    record, trials = study(), trained(study())
    end_as(pick(trials, "worse", seed=1), "diverged")
    assert counts(record, trials)["worse"] == 2 and counts(record, trials)["same"] == 6
    pruned = [t for t in trained(record) if t["variant"] != "worse" or t["seed"] == 0]
    end_as(pick(pruned, "worse", seed=0), "pruned")
    assert counts(record, pruned)["worse"] == 2 and counts(record, pruned)["same"] == 6
    failed = trained(record)
    end_as(pick(failed, "same", seed=0), "failed")
    assert counts(record, failed)["same"] == 6
    end_as(pick(trials, "baseline", seed=0), "diverged")
    assert counts(record, trials) == dict.fromkeys(EFFECTS, 2)


def test_a_seed_that_nobody_asked_for_ends_no_waiting() -> None:
    """It diverged when a study's `max` was larger; seed 1 is on its way."""
    record, trials = study(), trained(study())
    more = [make_trial("worse", "repeat", {}, 5, 9.0)]
    end_as(more, "diverged")
    pick(trials, "worse", seed=1)[0]["state"] = "running"
    assert counts(record, trials + more) == dict.fromkeys(EFFECTS, 2)


def test_a_variant_whose_values_all_wait_without_a_loss_holds_nobody_up() -> None:
    record = study(rates=(1e-3, 2e-3))
    tuned = [make_trial(n, "tune", {"lr": lr}, 0, e + lr * 10) for n, e in EFFECTS.items() for lr in (1e-3, 2e-3)]
    repeats = [make_trial(n, "repeat", {"lr": 1e-3}, seed, e) for n, e in EFFECTS.items() for seed in (0, 1)]
    rest = [t for t in repeats if t["variant"] != "worse"]
    for loss, expected in ((None, 3), (2.5, 2)):
        for trial in pick(tuned, "worse"):
            trial |= {"state": "paused", "until": 50, "result": {"step": 50, "validation": {"loss": loss}}}
        assert counts(record, tuned + rest)["same"] == expected


def test_each_cell_keeps_its_own_baseline_up() -> None:
    effects = {"a": 0.0, "a2": 0.0, "b": 1.0, "b2": 1.5}
    record = study(effects=effects)
    for variant in record["variants"]:
        variant["baseline"] = variant["name"][0]
    found = counts(record, trained(record, effects))
    assert found["a"] == found["a2"] == 6
    assert found["b"] == found["b2"] < 6


def test_tuning_comes_first() -> None:
    record = study(rates=(1e-3, 2e-3))
    tuned = [make_trial(n, "tune", {"lr": lr}, 0, e + lr * 10) for n, e in EFFECTS.items() for lr in (1e-3, 2e-3)]
    assert counts(record, tuned) == dict.fromkeys(EFFECTS, 2)
    repeats = [make_trial(n, "repeat", {"lr": 1e-3}, seed, e) for n, e in EFFECTS.items() for seed in (0, 1)]
    assert counts(record, tuned + repeats)["same"] == 3
    for missing in ([], [pick(tuned, "worse", lr=2e-3)[0] | {"state": "planned", "result": None}]):
        rest = [t for t in tuned if (t["variant"], t["settings"]["lr"]) != ("worse", 2e-3)]
        assert counts(record, [*rest, *missing, *repeats]) == dict.fromkeys(EFFECTS, 2), "a value that came later"
    end_as(pick(tuned, "same"), "diverged")
    alive = [t for t in repeats if t["variant"] != "same"]
    assert counts(record, tuned + alive)["same"] == 2


def test_the_report_says_how_it_was_decided() -> None:
    record = study(margin=0.001)
    trials = trained(record)
    comparison = compare(record, trials)
    assert list(comparison.table["verdict"]) == ["baseline", "undecided", "worse", "better"]
    assert list(comparison.table["missing"]) == [0, 0, 0, 0]
    assert list(comparison.table["n"]) == list(counts(record, trials).values())
    assert comparison.noise["margin"] == 0.001
    method = comparison.noise["method"]
    assert "hold at every number of seeds at once" in method and "Bonferroni-corrected for 3 comparisons" in method
    assert f"({comparison.noise['df']} degrees of freedom)" in method and "equivalent: within ±0.001" in method
    assert any(note.startswith("undecided after 6 seeds") and "same" in note for note in comparison.notes)
    assert any(note.startswith("more seeds than 2 where") and "same 6" in note for note in comparison.notes)
    assert not any("fewer than" in note or "not run" in note for note in comparison.notes)


def test_the_report_of_a_study_under_way_misses_only_what_is_wanted() -> None:
    record, trials = study(), trained(study())
    begun = [t for t in trials if t["seed"] == 0]
    comparison = compare(record, begun)
    assert list(comparison.table["missing"]) == [1, 1, 1, 1]
    assert set(comparison.table["verdict"]) == {"baseline", "undecided"}
    assert comparison.noise["method"].endswith("Bonferroni-corrected for 3 comparisons")
    nothing = compare(record, [])
    assert nothing.noise["method"].startswith("no intervals") and list(nothing.table["missing"]) == [2, 2, 2, 2]


@pytest.mark.parametrize("margin", [None, 0.02])
def test_the_verdict_of_the_table_is_the_one_that_ended_the_seeds(margin: float | None) -> None:
    record = study(margin=margin)
    trials = trained(record)
    comparison = compare(record, trials)
    wanted = counts(record, trials)
    for row in comparison.table.to_dict("records"):
        if row["verdict"] == "undecided":
            assert wanted[row["variant"]] == 6
    assert len(list(itertools.chain(*wanted_seeds(record, trials).values()))) == len(trials)
