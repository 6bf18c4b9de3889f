"""Values that one seed cannot tell apart are tried with a second one, and tuning goes on where that moves the best."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from archlab.search.planning.plan import Plan
from archlab.search.sections.rooms import select
from tests.search.plan_kit import made_plan, simulate


def misled(variant: str, settings: dict[str, Any], seed: int, share: float) -> float:
    """A valley at 5e-3, in which the first seed shows 1e-2 as better by less than the noise, and the second one not."""
    lost = 0.006 if (settings["lr"], seed) == (1e-2, 0) else 0.0
    return 2 + abs(math.log(float(settings["lr"]) / 5e-3)) / 200 - lost + (1 - share) + 0.001 * seed


def chosen(made: Plan, table: list[dict[str, Any]]) -> dict[str, float]:
    return {each.variant: (each.settings or {})["lr"] for each in select(made.record(), table)}


def test_values_within_the_noise_of_a_seed_are_tried_with_a_second_one(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: {grid: 1-2-5, from: 1e-3, to: 2e-2}}", seeds="seeds: 3")
    assert made.tuner is not None
    alone, planned = simulate(made, misled), made.trials
    assert set(chosen(made, alone).values()) == {1e-2}
    made.tuner.noise = lambda variant: 0.01
    assert made.trials == planned + 2
    tables = [simulate(made_again(made), misled, seed=order) for order in range(4)]
    for table in tables:
        assert set(chosen(made, table).values()) == {5e-3}
        assert len({row["key"] for row in table}) == len({row["key"] for row in alone}) + 2, "a trial of each variant"
        again = {(row["variant"], row["settings"]["lr"]) for row in table if row["role"] == "tune" and row["seed"] == 1}
        assert again == {(variant, lr) for variant in ("baseline", "gated") for lr in (5e-3, 1e-2)}
    assert len({tuple(sorted((r["key"], r["role"], r["until"] or 0) for r in table)) for table in tables}) == 1
    made.tuner.noise = lambda variant: 0.001
    assert set(chosen(made, simulate(made_again(made), misled)).values()) == {1e-2}, "these lie further apart"
    made.tuner.noise = lambda variant: math.inf
    assert set(chosen(made, simulate(made_again(made), misled)).values()) == {5e-3}, "no noise is known"


@pytest.mark.parametrize("noise", [0.01, math.inf])
def test_a_second_seed_that_moves_the_best_to_the_edge_is_followed_beyond(tmp_path: Path, noise: float) -> None:
    made = made_plan(tmp_path, "{lr: [1e-3, 2e-3, 4e-3], extend: 2}", seeds="seeds: 3")
    assert made.tuner is not None
    made.tuner.noise = lambda variant: noise

    def rising(variant: str, settings: dict[str, Any], seed: int, share: float) -> float:
        """A valley at 8e-3, in which the first seed shows 2e-3 as the best one."""
        lost = 0.015 if (settings["lr"], seed) == (2e-3, 0) else 0.0
        slope = 0.1 if settings["lr"] > 8e-3 else 0.008
        return 2 + slope * abs(math.log2(float(settings["lr"]) / 8e-3)) - lost

    tables = [simulate(made_again(made), rising, seed=order) for order in range(4)]
    for table in tables:
        assert set(chosen(made, table).values()) == {8e-3}
        assert {row["settings"]["lr"] for row in table} == {1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2}
        again = {row["settings"]["lr"] for row in table if row["role"] == "tune" and row["seed"] == 1}
        told = {1.6e-2} if noise < 1 else set()
        assert again == {2e-3, 4e-3, 8e-3, 1.6e-2} - told, "the first seed tells what is behind by more than the noise"
        assert not any(each.missing_points or each.missing_seeds for each in select(made.record(), table))
    assert len({tuple(sorted((r["key"], r["role"]) for r in table)) for table in tables}) == 1


def test_a_neighbour_that_stopped_at_a_rung_goes_on_beside_the_best_of_two_seeds(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: [1e-3, 2e-3, 4e-3, 8e-3], brackets: {keep: 0.5}}", seeds="seeds: 2")
    assert made.tuner is not None
    made.tuner.noise = lambda variant: 0.01
    first = {1e-3: 2.000, 2e-3: 2.004, 4e-3: 2.030, 8e-3: 2.5}

    def falling(variant: str, settings: dict[str, Any], seed: int, share: float) -> float:
        return first[settings["lr"]] if seed == 0 else 2 + 0.02 * (settings["lr"] == 1e-3)

    table = simulate(made, falling)
    assert set(chosen(made, table).values()) == {2e-3}
    assert {row["settings"]["lr"] for row in table if row["until"] is None} == {1e-3, 2e-3, 4e-3}
    assert {row["settings"]["lr"] for row in table if row["until"] is not None} == {8e-3}


def test_what_diverges_beyond_the_best_of_two_seeds_encloses_it(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: [1e-3, 2e-3, 4e-3], extend: 2}", seeds="seeds: 2")
    assert made.tuner is not None
    made.tuner.noise = lambda variant: math.inf

    def stormy(variant: str, settings: dict[str, Any], seed: int, share: float) -> float:
        lost = 0.015 if (settings["lr"], seed) == (2e-3, 0) else 0.0
        return math.inf if settings["lr"] > 4e-3 else 2 - math.log2(float(settings["lr"])) / 100 - lost

    table = simulate(made, stormy)
    assert set(chosen(made, table).values()) == {4e-3}
    beyond = [row for row in table if row["settings"]["lr"] > 4e-3]
    assert {(row["settings"]["lr"], row["seed"], row["state"]) for row in beyond} == {(8e-3, 0, "diverged")}


def made_again(made: Plan) -> Plan:
    """The plan with nothing remembered."""
    if made.tuner:
        made.tuner.curves.clear()
    return Plan(made.study, made.builder, made.variants, tuner=made.tuner)


def test_a_second_seed_that_is_lost_leaves_its_value_behind(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: {grid: 1-2-5, from: 1e-3, to: 2e-2}}", seeds="seeds: 2")
    assert made.tuner is not None
    made.tuner.noise = lambda variant: 0.01

    def unstable(variant: str, settings: dict[str, Any], seed: int, share: float) -> float:
        lost = settings["lr"] == 1e-2 and seed == 1 and share > 0.5
        return math.inf if lost else misled(variant, settings, seed, share)

    table = simulate(made, unstable)
    assert set(chosen(made, table).values()) == {5e-3}


def test_the_noise_is_decided_when_a_study_first_runs(tmp_path: Path) -> None:
    from archlab.search.sections.seeds.noise import KIND, noise_key
    from archlab.search.store.store import Store

    made = made_plan(tmp_path, "{lr: {grid: 1-2-5, from: 1e-3, to: 2e-2}}", seeds="seeds: 3")
    assert made.tuner is not None
    key, variant = noise_key(made.variants[0].record()), made.variants[0]
    told = {"variance": 1e-4, "df": 8, "documents": None, "trials": 12, "keys": []}
    with Store.open(tmp_path / "store") as store:
        store.remember(KIND, key, {"other": told})
        made.hear(store)
        assert made.tuner.noise(variant) == pytest.approx(0.01)
        store.save_study("gates", made.record(), "")
        made.hear(store, decide=True)
        store.remember(KIND, key, {"other": {**told, "variance": 1.0}})
        store.add_trials("gates", made.rows([]))
        made.hear(store, decide=True)
        assert made.tuner.noise(variant) == pytest.approx(0.01), "what was decided stands"
    with Store.open(tmp_path / "old") as store:
        store.remember(KIND, key, {"other": told})
        store.save_study("gates", made.record(), "")
        store.add_trials("gates", made.rows([]))
        made.hear(store, decide=True)
        assert made.tuner.noise(variant) == 0.0, "a study that had tuned before goes on as it was"
    with Store.open(tmp_path / "new") as store:
        made.hear(store)
        planned = made.trials
        store.save_study("gates", made.record(), "")
        made.hear(store, decide=True)
        assert made.tuner.noise(variant) == math.inf and made.trials == planned, "nothing is known: two seeds choose"
        store.remember(KIND, key, {"other": told})
        store.add_trials("gates", made.rows([]))
        made.hear(store, decide=True)
        assert made.tuner.noise(variant) == math.inf and made.trials == planned, "what was decided stands"


@pytest.mark.parametrize(("budget", "noise"), [("{trials: 14}", 0.0), ("{trials: 16}", 0.01), ("{tokens: 14k}", 0.0)])
def test_a_second_seed_needs_room_in_the_budget(tmp_path: Path, budget: str, noise: float) -> None:
    from archlab.search.sections.seeds.noise import KIND, noise_key
    from archlab.search.store.store import Store

    grid = "{lr: {grid: 1-2-5, from: 1e-3, to: 2e-2}}"
    made = made_plan(tmp_path, grid, seeds="seeds: 3", budget=f"budget: {budget}")
    assert made.tuner is not None and made.trials == 14
    told = {"variance": 1e-4, "df": 8, "documents": None, "trials": 12, "keys": []}
    with Store.open(tmp_path / "store") as store:
        store.remember(KIND, noise_key(made.variants[0].record()), {"other": told})
        made.hear(store)
        made.hear(store)
    assert made.tuner.noise(made.variants[0]) == pytest.approx(noise)
