"""A verdict on one challenger: false ones are as rare as their level says, at any number of seeds; true ones come."""

from __future__ import annotations

import numpy as np
import pytest

from archlab.search.challenge.judge import FUTILE, judge

SEED_SD, SD = 0.05, 0.01


def losses(generator: np.random.Generator, effects: list[float], seeds: int) -> np.ndarray:
    """Validation losses [variant, seed] of so many rows, with what a seed does to all of them."""
    return (
        3.0
        + np.array(effects)[:, None]
        + generator.normal(0, SEED_SD, seeds)
        + generator.normal(0, SD, (len(effects), seeds))
    )


def verdict(table: np.ndarray, level: float, margin: float | None = None) -> str | None:
    """What is said of the last row against the first, looking after every seed as a round does."""
    for seeds in range(1, table.shape[1] + 1):
        seen = judge(table[:, :seeds], len(table) - 1, 0, level, table.shape[1])
        if seen and (found := seen.verdict(margin)):
            return found
    return None


@pytest.mark.parametrize("rows", [2, 6])
def test_an_equal_challenger_is_kept_as_rarely_as_the_level_says(rows: int) -> None:
    generator = np.random.default_rng(1)
    found = [verdict(losses(generator, [0.0] * rows, 8), FUTILE) for _ in range(400)]
    assert found.count("better") / 400 < FUTILE and found.count("worse") / 400 < FUTILE


def test_a_better_one_is_kept_and_a_worse_one_given_up_and_an_equal_one_is_equivalent() -> None:
    generator = np.random.default_rng(2)
    for effect, wanted in ((-0.06, {"better"}), (0.06, {"worse", "hopeless"}), (0.0, {"equivalent", "hopeless"})):
        found = [verdict(losses(generator, [0.0, 0.03, effect], 12), 0.01, margin=0.04) for _ in range(200)]
        assert sum(each in wanted for each in found) > 180, (effect, found)


def test_there_is_no_hope_where_all_its_seeds_would_not_make_it_better() -> None:
    known = losses(np.random.default_rng(7), [0.0, *np.linspace(0.1, 0.5, 8)], 4)
    for difference, said in ((0.0, "hopeless"), (-0.05, None)):
        table = np.vstack([known, np.full(4, np.nan)])
        table[-1, 0] = known[0, 0] + difference
        seen = judge(table, 9, 0, 0.01, 8)
        assert seen is not None and seen.seeds == 1 and seen.verdict(None) == said
        assert seen.shown("hopeless") is None


def test_what_was_tried_earlier_helps_to_know_the_noise() -> None:
    table = losses(np.random.default_rng(3), [0.0, *np.linspace(0.1, 0.5, 8), -0.04], 4)
    alone, together = judge(table[[0, -1]], 1, 0, 0.01, 8), judge(table, 9, 0, 0.01, 8)
    assert alone is not None and together is not None
    assert alone.difference == together.difference and together.to_keep < alone.to_keep


def test_a_pair_that_is_noisier_than_the_others_counts_with_its_own_noise() -> None:
    table = losses(np.random.default_rng(4), [0.0] * 9, 6)
    noisy = table.copy()
    noisy[-1] += np.random.default_rng(5).normal(0, 0.1, 6)
    own, calm = judge(noisy, 8, 0, 0.01, 8), judge(table, 8, 0, 0.01, 8)
    assert own is not None and calm is not None and own.error > 3 * calm.error


def test_two_rows_of_one_seed_say_nothing() -> None:
    assert judge(np.array([[3.0], [2.0]]), 1, 0, FUTILE, 8) is None
