"""Samplers of a search, through the real proposer: killed and resumed, under constraints, and against random ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import optuna
import pytest

from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import read_text
from archlab.search.sections.search.points import Points
from archlab.search.sections.search.proposer import Ending, Known, Proposer
from archlab.search.sections.search.samplers import (
    CmaEsSampler,
    EffectsSampler,
    GpSampler,
    Nsga2Sampler,
    Nsga3Sampler,
    RandomSampler,
    Sampler,
    TpeSampler,
)
from archlab.search.sections.search.space import Space
from archlab.search.statistics.pareto import dominates, front, hypervolume, spanning
from archlab.search.trackers.database import open_optuna

TEXT = "a: {float: [0, 1]}\nb: {float: [0, 1]}\nc: {float: [1e-4, 1], log: true}\n"
SPACE = parse(Space, read_text(TEXT, "s.yaml"), "space")
CMAES, GP, NSGA2, TPE = CmaEsSampler(), GpSampler(startup=5), Nsga2Sampler(population=4), TpeSampler(startup=5)
EFFECTS = EffectsSampler()
ALL = [RandomSampler(), EFFECTS, TPE, GP, NSGA2, Nsga3Sampler(population=4), CMAES]
EACH = [pytest.param(each, marks=[pytest.mark.slow] if each is GP else []) for each in ALL]

Values = dict[str, Any]


def fresh(sampler: Sampler, seed: int = 0, **more: Any) -> Proposer:
    return Proposer(None, "s", SPACE, sampler, seed, **more)


def bowl(values: Values) -> float:
    return float((values["a"] - 0.3) ** 2 + (values["b"] - 0.7) ** 2 + 0.1 * (math.log10(values["c"]) + 2) ** 2)


def two(values: Values) -> tuple[float, float]:
    off = 3 * (values["b"] - 0.5) ** 2 + 0.5 * (math.log10(values["c"]) + 2) ** 2
    return float(values["a"] ** 2 + off), float((values["a"] - 1) ** 2 + off)


def complete(*values: float) -> Ending:
    return Ending("complete", values)


def searched(proposer: Proposer, trials: int, ending: Callable[[Values], Ending]) -> list[tuple[Values, Ending]]:
    found = []
    for _ in range(trials):
        number, values = proposer.ask()
        found.append((values, ending(values)))
        proposer.tell(number, found[-1][1])
    return found


def narrow(values: Values) -> Ending:
    """Feasible in a tenth of the space, away from the best point."""
    excess = {"size": math.log((values["a"] + 1e-9) / 0.1)}
    return Ending("refused", (None,), excess) if excess["size"] > 0 else Ending("complete", (bowl(values),), excess)


# the same proposals however often it is killed


@pytest.mark.parametrize("sampler", EACH, ids=[each.type for each in ALL])
@pytest.mark.parametrize("ending", [lambda values: complete(bowl(values)), narrow], ids=["free", "constrained"])
def test_a_killed_search_proposes_the_same_with_every_sampler(
    sampler: Sampler, ending: Callable[[Values], Ending]
) -> None:
    trials = 9 if sampler is GP else 14  # of those that keep generations, into the second one
    expected = searched(fresh(sampler, 3, worst=5.0), trials, ending)
    for killed in (5, trials - 1):
        known = {number: Known(*each) for number, each in enumerate(expected[:killed])}
        again = searched(fresh(sampler, 3, known=known, worst=5.0), trials - killed, ending)
        assert again == expected[killed:]


@pytest.mark.slow
def test_two_goals_are_searched_and_resumed_too() -> None:
    several = (EFFECTS, 12, 8), (TPE, 12, 8), (GP, 8, 6), (NSGA2, 12, 8), (Nsga3Sampler(population=4), 12, 8)
    for sampler, trials, killed in several:
        expected = searched(fresh(sampler, goals=2), trials, lambda values: complete(*two(values)))
        known = {number: Known(*each) for number, each in enumerate(expected[:killed])}
        again = searched(fresh(sampler, goals=2, known=known), trials - killed, lambda v: complete(*two(v)))
        assert again == expected[killed:]


def test_nothing_of_a_samplers_own_is_kept_in_the_database(tmp_path: Path) -> None:
    proposer = Proposer(tmp_path, "s", SPACE, CMAES)
    searched(proposer, 20, lambda values: complete(bowl(values)))
    trials = optuna.load_study(study_name="s", storage=open_optuna(tmp_path)).trials
    assert len(trials) == 20
    assert {key for trial in trials for key in trial.system_attrs} == set(), "CMA-ES would pickle its state there"


def test_trials_that_run_do_not_keep_proposals_from_differing() -> None:
    for sampler in (EFFECTS, TPE, GP, NSGA2, CMAES):
        proposer = fresh(sampler)
        searched(proposer, 8, lambda values: complete(bowl(values)))
        asked = [proposer.ask() for _ in range(4)]
        assert [number for number, _ in asked] == [8, 9, 10, 11]
        assert len({values["a"] for _, values in asked}) == 4


# fronts


def test_front_and_hypervolume_of_a_few_points() -> None:
    points = [(1.0, 3.0), (2.0, 2.0), (2.0, 2.0), (3.0, 1.0), (3.0, 3.0), (0.5, 3.5)]
    assert front(points) == [0, 1, 3, 5]
    assert dominates(points[1], points[4]) and not dominates(points[1], points[2])
    assert hypervolume([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)], (4.0, 4.0)) == 6.0
    assert hypervolume([(1.0, 3.0), (9.0, 0.0)], (4.0, 4.0)) == 3.0, "what lies beyond the reference counts nothing"
    assert hypervolume([(0.0, 0.0, 0.0), (0.0, 0.0, 0.5)], (2.0, 1.0, 1.0)) == 2.0
    assert hypervolume([(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0)], (2.0, 2.0, 2.0)) == 4.0
    assert spanning(points, (4.0, 4.0), 2) == [5, 1], "the least of the first goal, then what adds most"
    assert spanning(points, (4.0, 4.0), 9) == [5, 1, 3, 0] and spanning([], (), 3) == []


# against random ones, at the same number of trials


@cache
def best(sampler: Sampler, seed: int, trials: int) -> float:
    """The least value of the bowl that a search finds."""
    return min(ending.known[0] for _, ending in searched(fresh(sampler, seed), trials, lambda v: complete(bowl(v))))


@cache
def volume(sampler: Sampler, seed: int) -> float:
    """The hypervolume of the front that a search of 60 trials finds."""
    found = searched(fresh(sampler, seed, goals=2), 60, lambda values: complete(*two(values)))
    return hypervolume([ending.known for _, ending in found], (1.5, 1.5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "trials"),
    [(TpeSampler(), 30), (CMAES, 30), (GP, 15), (EFFECTS, 15)],
    ids=["tpe", "cmaes", "gp", "effects"],
)
def test_samplers_beat_random_ones_on_a_smooth_function(sampler: Sampler, trials: int) -> None:
    seeds = range(3 if sampler in (GP, EFFECTS) else 20)  # their medians are a thirtieth of random's, in a second each
    ours, others = ([best(which, seed, trials) for seed in seeds] for which in (sampler, RandomSampler()))
    assert median(ours) < 0.5 * median(others)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Nsga2Sampler(population=10), Nsga3Sampler(population=10)], ids=lambda s: s.type)
def test_evolution_finds_a_larger_front_than_random_proposals(sampler: Sampler) -> None:
    ours, others = ([volume(which, seed) for seed in range(20)] for which in (sampler, RandomSampler()))
    assert median(ours) > median(others)
    assert sum(a > b for a, b in zip(ours, others, strict=True)) >= 15  # by chance in 2 of 100


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [TPE, GP, Nsga2Sampler(population=8), CMAES], ids=lambda sampler: sampler.type)
def test_samplers_learn_from_what_was_refused(sampler: Sampler) -> None:
    def refused(seed: int) -> list[bool]:
        return [ending.state == "refused" for _, ending in searched(fresh(sampler, seed, worst=5.0), trials, narrow)]

    seeds, trials = (3, 16) if sampler is GP else (8, 32)  # of it 16 of the first 24 are refused, and none of the last
    found = [refused(seed) for seed in range(seeds)]
    early, late = (sum(sum(row[part]) for row in found) for part in (slice(0, 8), slice(trials - 8, trials)))
    assert early > 4 * seeds and late < 0.8 * early


def test_effects_believe_no_lucky_loss() -> None:
    text = "".join(f"{name}: {{choice: [0, 1, 2]}}\n" for name in "abc")
    space = parse(Space, read_text(text, "s.yaml"), "space")
    truth = {(a, b, c): 0.1 * a + 0.05 * b + 0.02 * c for a in range(3) for b in range(3) for c in range(3)}

    def loss(values: Values) -> float:
        point = values["a"], values["b"], values["c"]
        return truth[point] - (0.3 if point == (2, 1, 1) else 0.0)  # the luckiest of all, and far from the best

    proposer = Proposer(None, "s", space, EFFECTS, 0)
    found = searched(proposer, 27, lambda values: complete(loss(values)))  # the whole space, as none comes twice
    losses = {number: ending.known[0] for number, (_, ending) in enumerate(found)}
    assert found[min(losses, key=losses.__getitem__)][0] == {"a": 2, "b": 1, "c": 1}
    assert found[proposer.ranked(losses)[0]][0] == {"a": 0, "b": 0, "c": 0}
    assert RandomSampler().ranked(Points(space, {}), {}, losses)[0] == min(losses, key=losses.__getitem__)


def test_effects_of_axes_keep_to_a_constraint_that_most_of_the_space_breaks() -> None:
    found = [
        ending
        for seed in (0, 1)
        for _, ending in searched(fresh(EffectsSampler(startup=4), seed, worst=5.0), 16, narrow)[4:]
    ]
    assert sum(ending.state == "complete" for ending in found) >= 7, "of 24; of random ones it is a tenth"
