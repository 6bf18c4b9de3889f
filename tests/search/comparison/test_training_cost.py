"""What a study cost and saved: to the token, by hand, and of two small studies on one store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archlab.search.comparison.compare import compare, load_comparison
from archlab.search.comparison.training_cost import cost_sentence
from archlab.search.reporting.report import FORMATS, report
from archlab.search.running.run import run
from archlab.search.sections.screen.decide import screened
from archlab.search.store.store import Store
from tests.search.compare_kit import end_as, make_study, pick
from tests.search.oracle import lines_of
from tests.search.sections import test_screening, test_seeding
from tests.search.study_files import write_study

Trials = list[dict[str, Any]]
ONE = 500_000  # tokens of a trial; the study has two variants of three rates and three seeds: ten trials


def cost_of(change: Callable[[dict[str, Any], Trials], Any]) -> dict[str, Any]:
    record, trials = make_study({"baseline": 0.0, "sdpa": -0.05})
    change(record, trials)
    return compare(record, trials).cost


def seed(trials: Trials, number: int) -> dict[str, Any]:
    """A repeat of sdpa that is no trial of its tuning."""
    (found,) = pick(trials, "sdpa", role="repeat", seed=number)
    return found


def paused(trials: Trials, until: int = 50, loss: float | None = 3.5, **more: Any) -> None:
    """The largest rate of sdpa waits after a fifth of its steps."""
    result = {"state": "paused", "step": 50, "tokens": ONE // 5, "validation": {"loss": loss}}
    (trial,) = pick(trials, "sdpa", role="tune", lr=2e-3)
    trial.update({"state": "paused", "until": until, "result": result, **more})


def lost(record: dict[str, Any], trials: Trials) -> None:
    """Seed 1 of sdpa was pruned after two fifths, so that seed 2 never began."""
    trials.remove(seed(trials, 2))
    end_as([seed(trials, 1)], "pruned")
    seed(trials, 1)["spent"] = 200_000


CASES: dict[str, tuple[Callable[[dict[str, Any], Trials], Any], int, int, dict[str, int]]] = {
    "nothing is saved": (lambda r, t: None, 10 * ONE, 10, {}),
    "one of another study": (lambda r, t: seed(t, 1).update(reused=True), 9 * ONE, 9, {"reuse": ONE}),
    "one that another study went on with": (
        lambda r, t: seed(t, 1).update(reused=True, spent=100_000),
        9 * ONE + 100_000,
        10,
        {"reuse": 400_000},
    ),
    "one that went on from a shorter one": (
        lambda r, t: seed(t, 1)["result"].update(continued={"key": "0", "step": 100}),
        9 * ONE + 300_000,
        10,
        {"reuse": 200_000},
    ),
    "a stage that others trained": (
        lambda r, t: seed(t, 1).update(spent=150_000),
        9 * ONE + 150_000,
        10,
        {"reuse": 350_000},
    ),
    "steps that were repeated": (lambda r, t: seed(t, 1).update(spent=600_000), 10 * ONE + 100_000, 10, {}),
    "a rate that ended early": (lambda r, t: paused(t), 9 * ONE + 100_000, 10, {"early": 400_000}),
    "a rate that ended early, a line behind": (
        lambda r, t: paused(t, spent=99_000),
        9 * ONE + 100_000,
        10,
        {"early": 400_000},
    ),
    "a rate that ended early in another study": (
        lambda r, t: paused(t, spent=0),
        9 * ONE,
        9,
        {"reuse": 100_000, "early": 400_000},
    ),
    "a rate that goes on": (lambda r, t: paused(t, until=100), 9 * ONE + 100_000, 10, {}),
    "a rate without a loss": (lambda r, t: paused(t, loss=None), 9 * ONE + 100_000, 10, {}),
    "a seed that was pruned": (lost, 8 * ONE + 200_000, 9, {"pruned": 300_000 + ONE}),
    "a seed that diverged": (lambda r, t: end_as([seed(t, 1)], "diverged"), 9 * ONE + 9, 10, {}),
    "a seed that failed": (
        lambda r, t: (end_as([seed(t, 1)], "failed"), seed(t, 1).update(spent=70_000)),
        9 * ONE + 70_000,
        10,
        {},
    ),
    "a seed that is to come": (lambda r, t: end_as([seed(t, 1)], "planned"), 9 * ONE, 9, {}),
    "all of another study": (lambda r, t: [each.update(reused=True) for each in t], 0, 0, {"reuse": 10 * ONE}),
}


@pytest.mark.parametrize("name", CASES)
def test_cost_is_what_was_trained_and_what_saved_the_rest(name: str) -> None:
    change, tokens, trials, saved = CASES[name]
    cost = cost_of(change)
    assert (cost["tokens"], cost["trials"], cost["saved"]) == (tokens, trials, saved)
    assert cost["without"] == tokens + sum(saved.values())


def test_time_is_that_of_training_at_each_trials_pace() -> None:
    paces = 2 * [*[40_000] * 3, 40_001, 40_002]
    whole = cost_of(lambda r, t: None)
    assert whole["seconds"] == pytest.approx(sum(ONE / pace for pace in paces))
    assert (whole["timed_tokens"], whole["on"]) == (10 * ONE, "one core")
    assert cost_sentence(whole) == "Trained 5M tokens in 10 trials (2 min of one core)."
    early = cost_of(lambda r, t: paused(t))
    assert early["seconds"] == pytest.approx(whole["seconds"] - 400_000 / 40_000, rel=1e-3), "at its variant's pace"
    assert early["timed_tokens"] == early["tokens"]


def untimed(record: dict[str, Any], trials: Trials) -> None:
    for trial in pick(trials, "sdpa"):
        trial["result"]["tokens_per_s"] = None


def on(**told: str) -> Callable[[dict[str, Any], Trials], Any]:
    """All trials of the study on another machine."""
    return lambda r, t: [trial["result"]["fingerprint"].update(told) for trial in t]


PLACES = {
    "more than 62 s of one core": untimed,
    "2 min of 4 cores": on(threads="4"),
    "2 min of one GPU": on(device="cuda"),
    "2 min": on(parallel="data 2"),
}


@pytest.mark.parametrize("told", PLACES)
def test_time_says_on_what_and_what_it_does_not_know(told: str) -> None:
    assert cost_sentence(cost_of(PLACES[told])) == f"Trained 5M tokens in 10 trials ({told})."


def test_sentence_names_each_share_that_saved_something() -> None:
    def several(record: dict[str, Any], trials: Trials) -> None:
        paused(trials)
        seed(trials, 1)["reused"] = True

    assert cost_sentence(cost_of(several)) == (
        "Trained 4.1M tokens in 9 trials (2 min of one core); without reuse (500k) and early ends of tuned values "
        "(400k) it would have been 5M."
    )
    change, *_ = CASES["all of another study"]
    assert cost_sentence(cost_of(change)) == "Trained nothing; without reuse (5M) it would have been 5M tokens."
    assert cost_sentence(cost_of(lambda r, t: t.clear())) == ""
    three = {"tokens": 2000, "trials": 1, "seconds": None, "saved": {"reuse": 1, "pruned": 2, "screen": 3}}
    assert cost_sentence(three | {"without": 2006}) == (
        "Trained 2k tokens in 1 trial; without reuse (1), pruning (2) and the screen (3) it would have been 2.01k."
    )


def test_seeds_that_no_comparison_needed_are_saved_once_none_is_wanted() -> None:
    record = test_seeding.study()
    trials = test_seeding.trained(record)
    counts = test_seeding.counts(record, trials)
    assert 2 <= counts["worse"] < 6
    cost = compare(record, trials).cost
    assert (cost["tokens"], cost["saved"]) == (sum(counts.values()) * ONE, {"seeds": (24 - sum(counts.values())) * ONE})
    assert cost["without"] == 24 * ONE
    assert compare(record, trials[:-1]).cost["saved"] == {}
    end_as(pick(trials, "worse", seed=1), "diverged")
    left = sum(6 - counts[name] for name in ("baseline", "same", "better"))
    assert compare(record, trials).cost["saved"] == {"seeds": left * ONE}, "what diverged would have cost less"


def test_a_screen_saves_what_it_left_out_but_for_its_probes() -> None:
    losses = test_screening.in_order()
    record = test_screening.study()
    trials = test_screening.trained(record, losses, losses)[-1]
    for trial in trials:
        trial["result"]["tokens"] = 10_000 if trial["role"] == "screen" else ONE
    out = len(screened(record, trials).left_out)
    cost = compare(record, trials).cost
    assert out > 0 and cost["tokens"] == (12 - out) * 3 * ONE + 12 * 10_000
    assert cost["saved"] == {"screen": out * 3 * ONE - 12 * 10_000} and cost["without"] == 12 * 3 * ONE


def test_two_studies_on_one_store_count_every_token_once(tmp_path: Path) -> None:
    sections = {
        "tune": "tune: {lr: {grid: 1-2-5, from: 5e-4, to: 5e-3}, extend: 0}",
        "train": "train: {data: {text: corpus.txt}, tokens: 2k, context: 32, batch: 4, lr: 1e-3}",
    }
    first = write_study(tmp_path, "first.yaml", **sections)
    more = {"study": "study: again", "seeds": "seeds: 3"}
    second = write_study(tmp_path, "second.yaml", **{**sections, **more})
    for file in (first, second):
        assert run(file, tmp_path / "store", executor="inline", track=False).exit_code == 0
    whole = 16 * 128  # 2,000 tokens in whole batches
    with Store.open(tmp_path / "store") as store:
        rows = {row["key"]: row for row in store.study_trials("gates")}
        found = [load_comparison(store, name) for name in ("gates", "again")]
    trained = sum(max(line.get("tokens", 0) for line in lines_of(row["folder"])) for row in rows.values())
    early = [whole - row["result"]["tokens"] for row in rows.values() if row["state"] == "paused"]
    assert early and sum(early) + trained == len(rows) * whole
    one, other = (each.cost for each in found)
    assert (one["tokens"], one["trials"], one["saved"]) == (trained, len(rows), {"early": sum(early)})
    assert one["without"] == 2 * 6 * whole, "four rates with one seed, the best two with a second, of two variants"
    assert (other["tokens"], other["trials"]) == (2 * whole, 2), "the third seeds"
    reused = trained - 2 * whole  # the first study has told the noise: one seed tells the two best rates apart
    assert other["saved"] == {"reuse": reused, "early": sum(early)} and other["without"] == 2 * 6 * whole
    assert one["seconds"] > 0 and one["timed_tokens"] == trained
    for form in set(FORMATS) - {"csv", "json"}:
        assert "in 2 trials" in " ".join(report(found[1], form).split()) and "without reuse (" in report(found[1], form)
    assert json.loads(report(found[1], "json"))["cost"] == other
