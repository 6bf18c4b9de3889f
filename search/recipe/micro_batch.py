"""How many sequences of a batch are computed at a time: as the recipe says, or fewer where they would not fit."""

from __future__ import annotations

from archlab.search.recipe.recipe import Recipe


def at_most(recipe: Recipe, rows: int) -> Recipe:
    """The recipe with micro-batches of at most so many sequences, in its stages too. The batches stay as they are."""
    counts = []
    for each in recipe.whole:  # as few micro-batches as can be, of equal size
        divisors = (n for n in range(each.accumulate, each.sequences + 1) if each.sequences % n == 0)
        counts.append(next(n for n in divisors if each.sequences // n <= max(rows, 1)))
    stages = []
    for index, stage in enumerate(recipe.stages):
        inherited = stage.accumulate or counts[index]
        stages.append(stage if counts[index + 1] == inherited else stage.replace(accumulate=counts[index + 1]))
    if counts[0] == recipe.accumulate and tuple(stages) == recipe.stages:
        return recipe
    return recipe.replace(accumulate=counts[0], stages=tuple(stages))
