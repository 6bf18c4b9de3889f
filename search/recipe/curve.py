"""Where along a recipe a trial is validated, on how much, and where it may pause."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from archlab.search.recipe.recipe import Recipe

CURVE_POINTS = 10
CURVE_SHARE = 200  # one window of the validation curve for this many training windows: under 2% of the work
CURVE_WINDOWS = 4, 256  # at least, at most


def curve_points(steps: int) -> frozenset[int]:
    """The steps after which the validation curve gets a point: ten, evenly spaced, the last step among them.

    None of no steps.
    """
    if not steps:
        return frozenset()
    return frozenset(-(-steps * point // CURVE_POINTS) for point in range(1, CURVE_POINTS + 1))


def rungs(recipe: Recipe) -> list[int]:
    """The steps of a trial at which it may pause: the points of the validation curve of all its stages but the last."""
    found, before = [], 0
    for stage in recipe.whole:
        found += [before + point for point in sorted(curve_points(stage.steps))]
        before += stage.steps
    return found[:-1]


def tokens_at(recipe: Recipe, step: int) -> int:
    """Tokens that the first `step` steps of a trial consume, in whichever stages these are."""
    tokens = 0
    for stage in recipe.whole:
        tokens += stage.tokens_at(min(step, stage.steps))
        step = max(step - stage.steps, 0)
    return tokens


def curve_windows(recipe: Recipe) -> int:
    """Windows of the validation curve: the same for all trials of a recipe."""
    fewest, most = CURVE_WINDOWS
    return min(max(recipe.rows_before(recipe.steps) // CURVE_SHARE, fewest), most)
