"""Pruners end what is behind, never what is early, alone or ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arch_dsl.errors import SpecError
from arch_dsl.parse import parse_value
from arch_dsl.source import Node
from search.prune import AshaPruner, History, MedianPruner, Pruner
from search.running import _pruning
from search.store import Row, Store
from search.trial import Trial

NAN = float("nan")


def pruner(data: Any) -> Pruner:
    problems: list[Any] = []
    found = parse_value(Pruner, Node.of(data), "prune", problems)
    if problems:
        raise SpecError(problems)
    assert isinstance(found, Pruner)
    return found


def curve(*losses: float) -> History:
    """Validations at steps 10, 20, 30, ..."""
    return [(10 * (index + 1), loss) for index, loss in enumerate(losses)]


OTHERS = [curve(4.0, 3.0, level, level) for level in (1.0, 2.0, 3.0, 4.0)]


@pytest.mark.parametrize(
    ("history", "others", "expected"),
    [
        pytest.param(curve(), OTHERS, False, id="nothing yet"),
        pytest.param(curve(9.0, 9.0), OTHERS, False, id="warm-up"),
        pytest.param(curve(9.0, 9.0, 2.6), OTHERS, True, id="worse than the median"),
        pytest.param(curve(9.0, 9.0, 2.5), OTHERS, False, id="at the median"),
        pytest.param(curve(9.0, 2.4, 2.6), OTHERS, False, id="its best was better"),
        pytest.param(curve(9.0, 9.0, 9.0), OTHERS[:3], False, id="too few others"),
        pytest.param(curve(9.0, 9.0, 9.0), [*OTHERS[:3], curve(1.0)], False, id="too few came as far"),
        pytest.param(curve(NAN, NAN, NAN), OTHERS, True, id="never finite"),
        pytest.param([(100, 9.0)], [[(100, 1.0)]] * 4, False, id="all steps done"),
        pytest.param(
            curve(9.0, 9.0, 3.5), [*OTHERS[2:], curve(9, 9, NAN), curve(9, 9, NAN)], False, id="others diverged"
        ),
        pytest.param(curve(9.0, 9.0, 2.6), [[(25, 1.0), (35, 0.5)]] * 4, True, id="other steps"),
    ],
)
def test_median_prunes_what_is_worse_than_half(history: History, others: list[History], expected: bool) -> None:
    assert MedianPruner(warmup=0.25).should_prune(history, others, steps=100) is expected


@pytest.mark.parametrize(
    ("history", "others", "expected"),
    [
        pytest.param(curve(), OTHERS, False, id="nothing yet"),
        pytest.param(curve(9.0), [curve(1.0)], False, id="too few others"),
        pytest.param(curve(9.0), [curve(1.0), curve(2.0)], True, id="first rung, last of three"),
        pytest.param(curve(1.5), [curve(1.0), curve(2.0)], True, id="first rung, second of three"),
        pytest.param(curve(0.5), [curve(1.0), curve(2.0)], False, id="first rung, best of three"),
        pytest.param(curve(1.0), [curve(1.0), curve(2.0)], False, id="as good as the best"),
        pytest.param(curve(0.5, 9.0), OTHERS, False, id="between rungs"),
        pytest.param(curve(0.5, 0.5, 9.0), OTHERS, True, id="second rung"),
        pytest.param(curve(0.5, 0.5, 1.5), [*OTHERS, *OTHERS], False, id="third of nine is kept"),
        pytest.param(curve(0.5, 0.5, 2.5), [*OTHERS, *OTHERS], True, id="fifth of nine is not"),
        pytest.param(curve(NAN), [curve(1.0), curve(2.0)], True, id="not finite"),
        pytest.param([(50, 9.0)], [[(35, 1.0)], [(40, 1.0)]], True, id="rung reached late"),
        pytest.param([(100, 9.0)], [[(100, 1.0)]] * 3, True, id="validated at the end only"),
    ],
)
def test_asha_keeps_the_best_third_of_each_rung(history: History, others: list[History], expected: bool) -> None:
    assert AshaPruner(warmup=0.1, reduction_factor=3).should_prune(history, others, steps=100) is expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("median", MedianPruner()),
        ({"type": "median", "warmup": 0.5, "min_trials": 2}, MedianPruner(warmup=0.5, min_trials=2)),
        ({"type": "asha", "reduction_factor": 4}, AshaPruner(reduction_factor=4)),
    ],
)
def test_a_study_asks_for_a_pruner_by_name(data: Any, expected: Pruner) -> None:
    assert pruner(data) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("medain", "did you mean 'median'?"),
        ({"type": "asha", "reduction_factor": 1}, "must be at least 2"),
        ({"type": "median", "warmup": 1.5}, "must be at most 1"),
        ({"type": "asha", "warmup": 0}, "must be greater than 0"),
    ],
)
def test_a_wrong_pruner_is_refused_in_words(data: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("?", r"\?")):
        pruner(data)


@pytest.mark.parametrize(
    ("one", "other", "history"),
    [
        pytest.param(MedianPruner(), MedianPruner(warmup=0.9), curve(9, 9, 9), id="median.warmup"),
        pytest.param(MedianPruner(), MedianPruner(min_trials=5), curve(9, 9, 9), id="median.min_trials"),
        pytest.param(AshaPruner(), AshaPruner(warmup=0.2), curve(9), id="asha.warmup"),
        pytest.param(AshaPruner(), AshaPruner(reduction_factor=2), curve(4, 3, 1.5), id="asha.reduction_factor"),
        pytest.param(AshaPruner(), AshaPruner(min_trials=5), curve(9), id="asha.min_trials"),
    ],
)
def test_every_field_changes_a_decision(one: Pruner, other: Pruner, history: History) -> None:
    assert one.should_prune(history, OTHERS, 100) != other.should_prune(history, OTHERS, 100)


# which trials of a study are compared


def trial(number: int, **recipe: Any) -> Trial:
    """One of 100 steps, unless the recipe says otherwise."""
    return Trial({"number": number}, {"tokens": 800, "batch": 2, "context": 4, "lr": number, **recipe}, "text", 0)


def validated(store: Store, which: Trial, history: History, attempt: int = 1) -> None:
    """Lets a trial have written these validations."""
    lines = [{"step": step, "attempt": attempt, "validation_loss": loss} for step, loss in history]
    folder = store.trial_folder(which.key)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def stored(folder: Path, trials: list[Trial], repeated: tuple[Trial, ...] = ()) -> Store:
    store = Store.open(folder)
    store.save_study("s", {}, "")
    rows = [Row(each, f"v{index}", "tune", {}, 0) for index, each in enumerate(trials)]
    store.add_trials("s", [*rows, *(Row(each, "again", "repeat", {}, 0) for each in repeated)])
    return store


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        pytest.param({}, True, id="same recipe"),
        pytest.param({"tokens": 8000}, False, id="longer"),
        pytest.param({"schedule": "linear"}, False, id="other schedule"),
    ],
)
def test_trials_are_compared_with_those_of_their_recipe(tmp_path: Path, recipe: Any, expected: bool) -> None:
    others = [trial(number, **recipe) for number in range(1, 4)]
    with stored(tmp_path, [trial(0), *others]) as store:
        for other in others:
            validated(store, other, curve(1, 1, 1, 1))
        decide = _pruning(MedianPruner(min_trials=2), "s", store)
        assert decide(trial(0).key, 40, list(curve(9, 9, 9, 9))) is expected


def test_how_long_a_trial_is_says_its_own_recipe(tmp_path: Path) -> None:
    trials = [trial(number, tokens=320) for number in range(4)]
    with stored(tmp_path, [trial(9), *trials]) as store:
        for each in trials[1:]:
            validated(store, each, curve(1, 1, 1, 1))
        decide = _pruning(MedianPruner(min_trials=2), "s", store)
        assert not decide(trials[0].key, 40, [(40, 9.0)]), "all of its 40 steps are done"


@pytest.mark.parametrize("steps", [40, 60])
def test_how_long_a_trial_is_counts_its_stages(tmp_path: Path, steps: int) -> None:
    recipe = {"tokens": 320, "lr": 1e-3, "stages": [{"tokens": 160, "lr": 1e-3}]}
    trials = [trial(number, **recipe) for number in range(4)]
    with stored(tmp_path, trials) as store:
        for each in trials[1:]:
            validated(store, each, [(step, 1.0) for step in range(10, 61, 10)])
        decide = _pruning(MedianPruner(min_trials=2), "s", store)
        assert decide(trials[0].key, steps, [(steps, 9.0)]) is (steps < 60)


def test_a_trial_that_is_also_a_repeat_is_never_pruned(tmp_path: Path) -> None:
    trials = [trial(number) for number in range(4)]
    with stored(tmp_path, trials, repeated=(trials[0],)) as store:
        for each in trials[1:]:
            validated(store, each, curve(1, 1, 1, 1))
        decide = _pruning(MedianPruner(min_trials=2), "s", store)
        assert not decide(trials[0].key, 40, list(curve(9, 9, 9, 9)))


def test_a_rung_is_decided_once_whoever_comes_later(tmp_path: Path) -> None:
    trials = [trial(number) for number in range(4)]
    with stored(tmp_path, trials) as store:
        decide, key = _pruning(AshaPruner(), "s", store), trials[0].key
        assert not decide(key, 10, list(curve(9)))
        for each in trials[1:]:
            validated(store, each, curve(1))
        assert not decide(key, 10, list(curve(9))) and not decide(key, 20, list(curve(9, 9)))
        assert _pruning(AshaPruner(), "s", store)(key, 20, list(curve(9, 9))), "a rung passed between two looks counts"


def test_a_rung_of_an_earlier_attempt_is_not_decided_again(tmp_path: Path) -> None:
    trials = [trial(number) for number in range(4)]
    with stored(tmp_path, trials) as store:
        for each in trials[1:]:
            validated(store, each, curve(1))
        validated(store, trials[0], curve(9))
        for attempt in (1, 2):
            assert store.claim(trials[0].key, "s") == attempt
            if attempt == 1:
                store.release(trials[0].key, 1)
        assert not _pruning(AshaPruner(), "s", store)(trials[0].key, 10, list(curve(9)))
