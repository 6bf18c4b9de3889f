"""The noise floor: what a store remembers of it, and what a plan says it can resolve."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archlab.search.planning.known import resolution
from archlab.search.planning.plan import Plan, plan
from archlab.search.running.run import run
from archlab.search.sections.seeds.noise import KIND, known_noise, noise_key, remember_noise
from archlab.search.statistics.dunnett import dunnett_critical
from archlab.search.statistics.moderated import expected_df
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from tests.search.compare_kit import make_study
from tests.search.study_files import SECTIONS, write_study
from tests.search.study_kit import make_store


class Told:
    """A store that holds finished studies as plain data, and remembers what it is told."""

    def __init__(self) -> None:
        self.studies: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
        self.kept: dict[tuple[str, str], Any] = {}

    def study(self, name: str) -> dict[str, Any]:
        return self.studies[name][0]

    def study_trials(self, name: str) -> list[dict[str, Any]]:
        return [dict(trial) for trial in self.studies[name][1]]

    def remember(self, kind: str, key: str, value: Any) -> None:
        self.kept[kind, key] = value

    def amend(self, kind: str, key: str, name: str, value: Any) -> None:
        self.kept[kind, key] = {**self.kept.get((kind, key), {}), name: value}

    def recall(self, kind: str, key: str) -> Any:
        return self.kept.get((kind, key))


def finished(store: Told, name: str, seed: int, sd: float = 0.01, variants: int = 4) -> str:
    """Adds a study whose trials' noise has this deviation; the key of its noise."""
    rng = np.random.default_rng(seed)
    record, trials = make_study({f"v{i}": 0.1 * i for i in range(variants)}, seeds=5, rates=())
    for variant in record["variants"]:
        variant["batches"] = "these"
    for trial in trials:
        trial["key"] = f"{seed}-{trial['key']}"
        trial["documents"] = None
        trial["result"]["test"]["loss"] = 3.0 + 0.05 * trial["seed"] + rng.normal() * sd
        trial["result"]["test"]["bits_per_byte"] = trial["result"]["test"]["loss"] / math.log(2) / 2
    store.studies[name] = {**record, "study": name}, trials
    remember_noise(store, name)  # type: ignore[arg-type]
    return noise_key(record["variants"][0])


def known(store: Any, key: str) -> Any:
    return known_noise(store, key)


def test_studies_are_pooled_by_their_degrees_of_freedom() -> None:
    store = Told()
    keys = {finished(store, f"study{i}", i, variants=4 + i) for i in range(3)}
    assert len(keys) == 1
    found = known(store, keys.pop())
    assert (found.df, found.trials, set(found.studies)) == ((3 + 4 + 5) * 4, (4 + 5 + 6) * 5, set(store.studies))
    assert math.sqrt(found.variance) == pytest.approx(0.01, rel=4 / math.sqrt(2 * found.df))


def test_a_study_that_ran_again_and_one_that_reused_its_trials_count_once() -> None:
    store = Told()
    key = finished(store, "study", 0)
    alone = known(store, key)
    remember_noise(store, "study")  # type: ignore[arg-type]
    assert known(store, key) == alone
    store.studies["copy"] = store.studies["study"]
    remember_noise(store, "copy")  # type: ignore[arg-type]
    assert known(store, key).trials == alone.trials


def test_another_scale_or_data_is_another_key() -> None:
    variant = {"batches": "these", "parameters": 2**20}
    assert noise_key(variant | {"parameters": int(2**20 * 1.3)}) == noise_key(variant)
    others = [variant | {"parameters": 2**21}, variant | {"batches": "those"}]
    assert len({noise_key(each) for each in [variant, *others]}) == 3


def planned(folder: Path, **sections: str | None) -> Plan:
    return plan(load_study(write_study(folder, "study.yaml", **sections)), folder / "data")


def test_a_plan_says_what_its_seeds_resolve_before_and_after_something_is_known(tmp_path: Path) -> None:
    variants = "variants:\n  baseline: {}\n  gated: [gate]\n  wide: {block.ffn.width: 96}"
    train = SECTIONS["train"].replace("{text: corpus.txt}", '{text: {files: corpus.txt, separator: "\\n\\n"}}')
    sections: dict[str, str | None] = {"variants": variants, "seeds": "seeds: 3", "train": train}
    made = planned(tmp_path, **sections)
    before = resolution(made, None)
    assert before is not None and before.factor is not None and before.difference is None
    assert before.factor == pytest.approx(dunnett_critical(2, expected_df(3, 1, 3)) * math.sqrt(2 / 3))
    assert "this study measures" in str(before) and "on 4 degrees of freedom" in str(before)
    run(load_study(tmp_path / "study.yaml"), tmp_path / "store", executor="inline", track=False)
    with Store.open(tmp_path / "store", create=False) as store:
        after = resolution(made, store)
        trials = store.study_trials("gates")
    assert after is not None and after.noise is not None and after.difference is not None
    assert (after.noise.df, after.noise.trials, after.noise.studies) == (4, 9, ("gates",))
    losses = np.array([[t["result"]["test"]["loss"] for t in trials if t["seed"] == s] for s in range(3)])
    residuals = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    assert after.noise.variance == pytest.approx((residuals**2).sum() / 4)
    assert after.noise.documents > 0
    assert after.difference > before.factor * math.sqrt(after.noise.variance)
    assert f"3 seeds resolve {after.difference:.2g} nats/token; from 9 trials of 1 study" in str(after)


def test_of_several_scales_the_one_counts_whose_seeds_differ_most(tmp_path: Path) -> None:
    made = planned(tmp_path, seeds="seeds: 3", grid="grid: {train.tokens: [1k, 2k]}")
    keys = list(dict.fromkeys(noise_key(variant.record()) for variant in made.variants))
    assert len(keys) == 2
    with make_store(tmp_path / "store") as store:
        for key, variance in zip(keys, (1e-4, 4e-4), strict=True):
            assert (found := resolution(made, store)) is not None and found.difference is None
            told = {"variance": variance, "df": 4, "documents": None, "trials": 6, "keys": [key]}
            store.amend(KIND, key, "another", told)
        found = resolution(made, store)
    assert found is not None and found.noise is not None and found.noise.variance == 4e-4


def test_a_variant_of_another_size_does_not_hide_what_is_known_of_the_baseline(tmp_path: Path) -> None:
    variants = "variants:\n  baseline: {}\n  gated: [gate]\n  wide: {block.ffn.width: 512}"
    made = planned(tmp_path, seeds="seeds: 3", variants=variants)
    base, _, wide = (noise_key(variant.record()) for variant in made.variants)
    assert base != wide, "alone at its size, it tells nothing of the noise there"
    with make_store(tmp_path / "store") as store:
        store.amend(KIND, base, "another", {"variance": 1e-4, "df": 4, "documents": None, "trials": 6, "keys": ["a"]})
        found = resolution(made, store)
    assert found is not None and found.difference is not None


@pytest.mark.parametrize(
    ("sections", "seeds"),
    [
        ({"seeds": "seeds: 5"}, 5),
        ({"seeds": "seeds: 5", "budget": "budget: {trials: 7}"}, 3),
        ({"seeds": "seeds: 5", "budget": "budget: {tokens: 8k}"}, 4),
        ({"seeds": "seeds: {min: 2, max: 6}"}, 6),
        ({"seeds": "seeds: {min: 2, max: 6}", "budget": "budget: {trials: 8}"}, 4),
    ],
    ids=lambda x: str(x),
)
def test_the_budget_bounds_the_seeds(sections: dict[str, str], seeds: int, tmp_path: Path) -> None:
    found = resolution(planned(tmp_path, **sections), None)
    assert found is not None and found.seeds == seeds and found.factor is not None
    assert str(found).startswith(f"{seeds} seeds resolve")


def test_too_few_seeds_resolve_nothing_and_one_variant_compares_nothing(tmp_path: Path) -> None:
    found = resolution(planned(tmp_path), None)
    assert found is not None and found.factor is None and str(found) == "2 seeds: too few for an interval"
    found = resolution(planned(tmp_path, budget="budget: {tokens: 1k}"), None)
    assert str(found) == "nothing: the budget has no trial of every variant"
    assert resolution(planned(tmp_path, variants="variants: {baseline: {}}"), None) is None
    lonely = "variants:\n  baseline: {}\n  longer: {train.tokens: 2k}"
    assert resolution(planned(tmp_path, variants=lonely), None) is None


def test_sequential_seeds_run_until_they_resolve_and_no_further(tmp_path: Path) -> None:
    """The whole way: a study whose variants differ clearly and not at all, with real trials."""
    train = SECTIONS["train"].replace("lr: 1e-3", "lr: 1e-2").replace("tokens: 1k", "tokens: 4k")
    variants = """\
variants:
  baseline: {}
  same: {train.optimizer: {type: adamw, weight_decay: 0.1000001}}
  slow: {train.lr: 1e-4}"""
    write_study(tmp_path, variants=variants, train=train, seeds="seeds: {min: 2, max: 4}")
    run(tmp_path / "study.yaml", tmp_path / "store", executor="inline", track=False)
    with Store.open(tmp_path / "store", create=False) as store:
        trials = store.study_trials("gates")
    counts = {name: len(list(rows)) for name, rows in itertools.groupby(sorted(t["variant"] for t in trials))}
    assert counts["baseline"] == counts["same"] == 4 and counts["slow"] < 4
    assert {trial["state"] for trial in trials} == {"complete"}
