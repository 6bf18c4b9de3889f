"""Pruners end what is behind, never what is early, alone or ahead."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse_value
from archlab.arch_dsl.language.source import Node
from archlab.search.sections.prune.decide import Pruning
from archlab.search.sections.prune.spec import (
    AshaPruner,
    History,
    HyperbandPruner,
    MedianPruner,
    PairedPruner,
    Pruner,
    Seen,
)
from archlab.search.sections.seeds.noise import noise_key
from archlab.search.store.store import Row, Store
from archlab.search.trial.loss_windows import paired_error, read_windows, write_windows
from archlab.search.trial.trial import Trial
from benchmarks.pruners import Noise, paired
from tests.search.study_kit import done

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
        ("hyperband", HyperbandPruner()),
        ({"type": "paired", "catch_up": 0.5}, PairedPruner(catch_up=0.5)),
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


def test_hyperband_holds_trials_to_the_rungs_of_their_bracket() -> None:
    found = HyperbandPruner(warmup=0.1, reduction_factor=3)
    keys = [f"{number:064x}" for number in range(3000)]
    counts = Counter(found.bracket(key) for key in keys)
    assert {bracket: round(count / 3000, 1) for bracket, count in counts.items()} == {0: 0.5, 1: 0.3, 2: 0.2}
    by_bracket = {bracket: [key for key in keys if found.bracket(key) == bracket] for bracket in counts}
    for bracket, first in ((0, 10), (1, 30), (2, 90)):
        mine, *mates = by_bracket[bracket][:4]
        strangers = dict.fromkeys(by_bracket[(bracket + 1) % 3][:9], curve(*[0.1] * 9))
        others = dict.fromkeys(mates, curve(*[1.0] * 9))
        told = [found.decide(Seen(mine, curve(*[9.0] * n), strangers | others, 100)) for n in range(1, 10)]
        assert told.index(True) == first // 10 - 1
        assert not any(found.decide(Seen(mine, curve(*[0.5] * n), strangers | others, 100)) for n in range(1, 10))


BASE = curve(4.0, 3.6, 3.4, 3.3, 3.2, 3.15, 3.1, 3.06, 3.03, 3.0)


def behind(gap: float, points: int = 5) -> History:
    return [(step, loss + gap) for step, loss in BASE[:points]]


PAIRED = {
    "far behind": (Seen("k", behind(0.2), {}, 100, BASE), True),
    "what it could make up": (Seen("k", behind(0.04), {}, 100, BASE), False),
    "ahead": (Seen("k", behind(-0.2), {}, 100, BASE), False),
    "warm-up": (Seen("k", behind(9.0, 2), {}, 100, BASE), False),
    "all steps done": (Seen("k", behind(9.0, 10), {}, 100, BASE), False),
    "no baseline": (Seen("k", behind(9.0), {}, 100), False),
    "a baseline on its way": (Seen("k", behind(9.0), {}, 100, BASE[:9]), False),
    "few windows": (Seen("k", behind(0.2), {}, 100, BASE, {50: 0.1}), False),
    "noisy seeds": (Seen("k", behind(0.2), {}, 100, BASE, {}, 0.1), False),
    "a restless difference": (
        Seen("k", [(step, loss + 0.2 * (step % 20 > 0)) for step, loss in BASE[:5]], {}, 100, BASE),
        False,
    ),
    "not finite": (Seen("k", [*behind(0.2, 4), (50, NAN)], {}, 100, BASE), False),
    "validated at other steps": (Seen("k", [(step + 1, loss) for step, loss in behind(9.0)], {}, 100, BASE), False),
}


@pytest.mark.parametrize(("seen", "expected"), PAIRED.values(), ids=PAIRED.keys())
def test_paired_ends_what_cannot_make_up_its_difference_to_the_baseline(seen: Seen, expected: bool) -> None:
    assert PairedPruner().decide(seen) is expected


@pytest.mark.parametrize(
    ("other", "gap"),
    [(PairedPruner(warmup=0.6), 0.2), (PairedPruner(catch_up=2.0), 0.2), (PairedPruner(level=0.5), 0.07)],
    ids=["warmup", "catch_up", "level"],
)
def test_every_field_of_paired_changes_a_decision(other: PairedPruner, gap: float) -> None:
    seen = Seen("k", behind(gap), {}, 100, BASE, {50: 0.02})
    assert other.decide(seen) != PairedPruner().decide(seen)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("knows", [True, False])
def test_paired_ends_what_is_better_in_at_most_one_of_fifty(scale: float, knows: bool) -> None:
    noise = Noise(0.005 * scale, 0.01 * scale, 0.01 * scale, 0.01 * scale)
    found = paired(PairedPruner(), 300, noise, spread=0.05, margin=0.01, knows=knows)
    assert found.better > 900 and found.wrong <= 0.02 * found.better
    assert found.saved > 0.02


def test_the_error_of_a_difference_is_that_of_its_windows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    theirs = rng.normal(3.0, 1.0, 64) * 100
    ours = theirs + rng.normal(0.1, 0.3, 64) * 100
    for place, step in enumerate((10, 20)):
        write_windows(tmp_path, 0, place, step, ours)
    write_windows(tmp_path, 0, 0, 10, ours)
    found = read_windows(tmp_path, 64)
    assert list(found) == [10, 20] and found[10] == pytest.approx(ours, rel=1e-6)
    assert read_windows(tmp_path, 32) == {} or list(read_windows(tmp_path, 32)) != [10, 20]
    error = paired_error(found[10], theirs, float(theirs.sum() / 6400))
    assert error == pytest.approx(np.std(ours - theirs, ddof=1) / np.sqrt(64) / 100, rel=1e-4)


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
        decide = Pruning(MedianPruner(min_trials=2), "s", store)
        assert decide(trial(0).key, 40, list(curve(9, 9, 9, 9))) is expected


def test_how_long_a_trial_is_says_its_own_recipe(tmp_path: Path) -> None:
    trials = [trial(number, tokens=320) for number in range(4)]
    with stored(tmp_path, [trial(9), *trials]) as store:
        for each in trials[1:]:
            validated(store, each, curve(1, 1, 1, 1))
        decide = Pruning(MedianPruner(min_trials=2), "s", store)
        assert not decide(trials[0].key, 40, [(40, 9.0)]), "all of its 40 steps are done"


@pytest.mark.parametrize("steps", [40, 60])
def test_how_long_a_trial_is_counts_its_stages(tmp_path: Path, steps: int) -> None:
    recipe = {"tokens": 320, "lr": 1e-3, "stages": [{"tokens": 160, "lr": 1e-3}]}
    trials = [trial(number, **recipe) for number in range(4)]
    with stored(tmp_path, trials) as store:
        for each in trials[1:]:
            validated(store, each, [(step, 1.0) for step in range(10, 61, 10)])
        decide = Pruning(MedianPruner(min_trials=2), "s", store)
        assert decide(trials[0].key, steps, [(steps, 9.0)]) is (steps < 60)


def test_a_trial_that_is_also_a_repeat_is_never_pruned(tmp_path: Path) -> None:
    trials = [trial(number) for number in range(4)]
    with stored(tmp_path, trials, repeated=(trials[0],)) as store:
        for each in trials[1:]:
            validated(store, each, curve(1, 1, 1, 1))
        decide = Pruning(MedianPruner(min_trials=2), "s", store)
        assert not decide(trials[0].key, 40, list(curve(9, 9, 9, 9)))


@pytest.mark.parametrize(("role", "expected"), [("search", True), ("screen", False)])
def test_a_probe_of_a_screen_is_never_pruned(tmp_path: Path, role: str, expected: bool) -> None:
    trials = [trial(number) for number in range(4)]
    with Store.open(tmp_path) as store:
        store.save_study("s", {}, "")
        store.add_trials("s", [Row(each, f"v{number}", role, {}, 0) for number, each in enumerate(trials)])
        for each in trials[1:]:
            validated(store, each, curve(1, 1, 1, 1))
        decide = Pruning(MedianPruner(min_trials=2), "s", store)
        assert decide(trials[0].key, 40, list(curve(9, 9, 9, 9))) is expected


@pytest.mark.parametrize(("seed", "expected"), [(0, True), (1, False)])
def test_a_second_seed_of_a_value_is_never_pruned_by_others(tmp_path: Path, seed: int, expected: bool) -> None:
    trials = [replace(trial(number), seed=seed if number == 0 else 0) for number in range(6)]
    rows = [Row(each, "v", "tune", {"lr": number}, each.seed) for number, each in enumerate(trials)]
    with Store.open(tmp_path) as store:
        store.save_study("s", {}, "")
        store.add_trials("s", rows)
        for each in trials[1:]:
            validated(store, each, curve(1, 1, 1, 1))
        decide = Pruning(pruner("median"), "s", store)
        assert decide(trials[0].key, 40, list(curve(9, 9, 9, 9))) is expected


def test_a_rung_is_decided_once_whoever_comes_later(tmp_path: Path) -> None:
    trials = [trial(number) for number in range(4)]
    with stored(tmp_path, trials) as store:
        decide, key = Pruning(AshaPruner(), "s", store), trials[0].key
        assert not decide(key, 10, list(curve(9)))
        for each in trials[1:]:
            validated(store, each, curve(1))
        assert not decide(key, 10, list(curve(9))) and not decide(key, 20, list(curve(9, 9)))
        assert Pruning(AshaPruner(), "s", store)(key, 20, list(curve(9, 9))), "a rung passed between two looks counts"


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
        assert not Pruning(AshaPruner(), "s", store)(trials[0].key, 10, list(curve(9)))


# paired


def paired_store(folder: Path, roles: tuple[str, str], lrs: tuple[float, float] = (1e-3, 1e-3)) -> tuple[Store, str]:
    """A baseline's trial and a variant's, far behind it, both running; returns the store and the latter's key."""
    trials = [trial(0, lr=lrs[0]), trial(1, lr=lrs[1])]
    store = Store.open(folder)
    record = {"baseline": "b", "variants": [{"name": "b"}, {"name": "v"}]}
    store.save_study("s", record, "")
    names = zip(trials, ("b", "v"), roles, lrs, strict=True)
    store.add_trials("s", [Row(each, name, role, {"lr": lr}, 0) for each, name, role, lr in names])
    for each in trials:
        assert store.claim(each.key, "s") == 1
    validated(store, trials[0], BASE)
    validated(store, trials[1], behind(0.3))
    return store, trials[1].key


@pytest.mark.parametrize(
    ("roles", "lrs", "expected"),
    [
        pytest.param(("tune", "tune"), (1e-3, 1e-3), True, id="at the same rate"),
        pytest.param(("tune", "tune"), (1e-3, 2e-3), False, id="not at another rate"),
        pytest.param(("repeat", "repeat"), (1e-3, 2e-3), True, id="repeats, each at its own rate"),
        pytest.param(("search", "search"), (1e-3, 1e-3), False, id="nothing of a search"),
    ],
)
def test_paired_compares_with_the_baselines_trial(
    tmp_path: Path, roles: tuple[str, str], lrs: tuple[float, float], expected: bool
) -> None:
    store, key = paired_store(tmp_path, roles, lrs)
    with store:
        decide, history = Pruning(PairedPruner(), "s", store), list(behind(0.3))
        assert not decide(key, 50, history), "the baseline's trial is on its way"
        store.finish(trial(0, lr=lrs[0]).key, 1, "complete", done(validation={"loss": 3.0}))
        assert decide(key, 50, history) is expected, "judged as soon as it is whole"
        again = Pruning(PairedPruner(), "s", store)
        assert again(key, 50, history) is expected, "whenever it is asked"


def test_paired_compares_nothing_with_another_seed_or_with_itself(tmp_path: Path) -> None:
    store, key = paired_store(tmp_path, ("repeat", "repeat"))
    with store:
        other = Trial({"number": 1}, trial(1, lr=1e-3).recipe, "text", 1)
        store.add_trials("s", [Row(other, "v", "repeat", {"lr": 1e-3}, 1)])
        assert store.claim(other.key, "s") == 1
        validated(store, other, behind(0.3))
        store.finish(trial(0, lr=1e-3).key, 1, "complete", done(validation={"loss": 3.0}))
        decide = Pruning(PairedPruner(), "s", store)
        assert not decide(other.key, 50, list(behind(0.3)))
        assert not decide(trial(0, lr=1e-3).key, 50, list(BASE[:5]))
        assert decide(key, 50, list(behind(0.3)))


def test_paired_compares_with_the_baseline_at_the_same_settings_whatever_else_is_tuned(tmp_path: Path) -> None:
    """Two trials of the baseline share the rate; which of them is whole first must not matter."""
    wide, narrow = ({"lr": 1e-3, "block.attention.head_dim": size} for size in (64, 32))
    trials = [trial(number, lr=1e-3) for number in range(3)]
    with Store.open(tmp_path) as store:
        store.save_study("s", {"baseline": "b", "variants": [{"name": "b"}, {"name": "v"}]}, "")
        told = zip(trials, ("b", "b", "v"), (wide, narrow, narrow), strict=True)
        store.add_trials("s", [Row(each, name, "tune", settings, 0) for each, name, settings in told])
        for each, history in zip(trials, (BASE, behind(0.3), behind(0.3)), strict=True):
            assert store.claim(each.key, "s") == 1
            validated(store, each, history)
        store.finish(trials[0].key, 1, "complete", done(validation={"loss": 3.0}))
        assert not Pruning(PairedPruner(), "s", store)(trials[2].key, 50, list(behind(0.3)))


def test_what_a_study_tells_of_its_noise_changes_nothing_for_its_next_run(tmp_path: Path) -> None:
    store, key = paired_store(tmp_path, ("repeat", "repeat"))
    with store:
        variants = [{"name": name, "batches": "text", "parameters": 1000} for name in ("b", "v")]
        store.save_study("s", {"baseline": "b", "variants": variants}, "")
        store.finish(trial(0, lr=1e-3).key, 1, "complete", done(validation={"loss": 3.0}))
        Pruning(PairedPruner(), "s", store)
        told = {"variance": 1.0, "df": 9, "documents": None, "trials": 12, "keys": []}
        store.remember("noise", noise_key(variants[1]), {"s": told})
        assert Pruning(PairedPruner(), "s", store)(key, 50, list(behind(0.3)))
        store.save_study("new", {"baseline": "b", "variants": variants}, "")
        trials = [Row(trial(n, lr=1e-3), name, "repeat", {"lr": 1e-3}, 0) for n, name in enumerate("bv")]
        store.add_trials("new", trials)
        assert not Pruning(PairedPruner(), "new", store)(key, 50, list(behind(0.3)))
