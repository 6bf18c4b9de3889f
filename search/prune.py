"""Whether a trial may end early, as pure functions of validation histories. Off unless a study asks for it.

The answer depends on which trials are how far, and so on timing. A decision is therefore made once, stored as an
event, and replayed; a pruned trial is a row of the table and says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Annotated, ClassVar

from arch_dsl.spec import Count, Family, Fraction, Range

# (optimizer steps done, validation loss in nats per token), in order of steps; a loss that is not finite is the worst.
History = Sequence[tuple[int, float]]


class Pruner(Family):
    """Looks at validation losses only."""

    noun = "pruner"
    paired: ClassVar[bool] = False  # whether it compares with the baseline alone

    def should_prune(self, history: History, others: Sequence[History], steps: int) -> bool:
        """Whether to end the trial of `history` after its last entry, given the `others`; `steps` is a full trial's.

        Asked once per entry.
        """
        raise NotImplementedError


@Pruner.register("median")
class MedianPruner(Pruner):
    """Ends a trial whose best loss so far is above the median of what the others had at the same step.

    Nothing is pruned in the first `warmup` of the steps, nor before `min_trials` others have come this far, nor when
    all steps are done: the result is on the way.
    """

    warmup: Fraction = 0.3
    min_trials: Count = 4

    def should_prune(self, history: History, others: Sequence[History], steps: int) -> bool:
        """See Pruner."""
        if not history or not self.warmup * steps <= history[-1][0] < steps:
            return False
        step = history[-1][0]
        reached = [at for other in others if (at := _at(other, step)) is not None]
        if len(reached) < self.min_trials:
            return False
        return min(_worst_if_not_finite(loss) for _, loss in history) > median(reached)


@Pruner.register("asha")
class AshaPruner(Pruner):
    """Asynchronous successive halving (arXiv:1810.05934): the best 1/reduction_factor of those at a rung go on.

    Rungs are at warmup, warmup * reduction_factor, warmup * reduction_factor^2, ... of the steps. The decision at a
    rung is made at the first validation there, against those that have been there before, and is never revised.
    Fewer than `min_trials` others at a rung: everyone goes on.
    """

    warmup: Annotated[float, Range(above=0, max=1)] = 0.1
    reduction_factor: Annotated[int, Range(min=2)] = 3
    min_trials: Count = 2

    def should_prune(self, history: History, others: Sequence[History], steps: int) -> bool:
        """See Pruner."""
        if not history:
            return False
        step, loss = history[-1]
        rung = self._rung(step, steps)
        if rung is None or any(rung <= earlier for earlier, _ in history[:-1]):
            return False
        there = [value for other in others if (value := _first(other, rung)) is not None]
        if len(there) < self.min_trials:
            return False
        kept = max(1, (len(there) + 1) // self.reduction_factor)
        better = sum(value < _worst_if_not_finite(loss) for value in there)
        return better >= kept

    def _rung(self, step: int, steps: int) -> float | None:
        """The highest rung that `step` has reached, below the end of a full trial."""
        rung, found = self.warmup * steps, None
        while rung <= step and rung < steps:
            found, rung = rung, rung * self.reduction_factor
        return found


def _worst_if_not_finite(loss: float | None) -> float:
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _at(history: History, step: int) -> float | None:
    """The last loss at or before `step` of a trial that has come at least that far."""
    if not history or history[-1][0] < step:
        return None
    before = [loss for at, loss in history if at <= step]
    return _worst_if_not_finite(before[-1]) if before else None


def _first(history: History, rung: float) -> float | None:
    """The first loss at or after a rung."""
    return next((_worst_if_not_finite(loss) for step, loss in history if step >= rung), None)
