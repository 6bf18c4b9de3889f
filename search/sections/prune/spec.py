"""Whether a trial may end early, as pure functions of validation histories. Off unless a study asks for it.

Where the answer depends on which trials are how far, it depends on timing. A decision is therefore made once, stored as
an event, and replayed; a pruned trial is a row of the table and says so.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist, median
from typing import Annotated, ClassVar

from archlab.arch_dsl.language.spec import Count, Family, Fraction, NotNegative, Range

# (optimizer steps done, validation loss in nats per token), in order of steps; a loss that is not finite is the worst.
History = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Seen:
    """What a pruner is told of the trial `key`, which was validated just now, and whose full length is `steps`.

    `others` are the histories of comparable trials by key. `baseline` is that of the baseline's trial on the same
    batches, whole, at the same settings where there is one; `errors` is by step the standard error of the difference to
    it that comes from the few windows of the validation curve. `seed_sd` is the noise of one trial's seed, 0 where no
    study has told. Losses are in nats per token.
    """

    key: str
    history: History
    others: Mapping[str, History]
    steps: int
    baseline: History | None = None
    errors: Mapping[int, float] = field(default_factory=dict)
    seed_sd: float = 0.0


class Pruner(Family):
    """Looks at validation losses only."""

    noun = "pruner"
    paired: ClassVar[bool] = False  # whether it compares with the baseline alone

    def decide(self, seen: Seen) -> bool:
        """Whether to end a trial after its last validation. Asked once per validation."""
        return self.should_prune(seen.history, list(seen.others.values()), seen.steps)

    def should_prune(self, history: History, others: Sequence[History], steps: int) -> bool:
        """Whether to end the trial of `history` after its last entry, given the `others`; `steps` is a full trial's."""
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
        if not history:
            return False
        step, loss = history[-1]
        reached, rung = self.warmup * steps, None  # the highest one, below the end of a full trial
        while reached <= step and reached < steps:
            rung, reached = reached, reached * self.reduction_factor
        if rung is None or any(rung <= earlier for earlier, _ in history[:-1]):
            return False
        there = [value for other in others if (value := _first(other, rung)) is not None]
        if len(there) < self.min_trials:
            return False
        kept = max(1, (len(there) + 1) // self.reduction_factor)
        better = sum(value < _worst_if_not_finite(loss) for value in there)
        return better >= kept


@Pruner.register("hyperband")
class HyperbandPruner(Pruner):
    """Several `asha` side by side, with first rungs at warmup, warmup * reduction_factor, ... (arXiv:1603.06560).

    A trial's key decides on its bracket, so that brackets take about the same work: of the k + 1 of them, bracket s
    gets reduction_factor^(k - s) * (k + 1) / (k - s + 1) parts of the trials. It is compared with those of its bracket
    alone.
    """

    warmup: Annotated[float, Range(above=0, below=1)] = 0.1
    reduction_factor: Annotated[int, Range(min=2)] = 3
    min_trials: Count = 2

    def decide(self, seen: Seen) -> bool:
        mine = self.bracket(seen.key)
        mates = [history for key, history in seen.others.items() if self.bracket(key) == mine]
        first = float(f"{self.warmup * self.reduction_factor**mine:.12g}")  # 0.3, not 0.30000000000000004
        asha = AshaPruner(warmup=first, reduction_factor=self.reduction_factor, min_trials=self.min_trials)
        return asha.should_prune(seen.history, mates, seen.steps)

    def bracket(self, key: str) -> int:
        """The bracket of a trial; in bracket s the first rung is at warmup * reduction_factor^s of the steps."""
        last = max(0, math.ceil(-math.log(self.warmup) / math.log(self.reduction_factor) - 1e-9) - 1)
        shares = [self.reduction_factor ** (last - s) * (last + 1) / (last - s + 1) for s in range(last + 1)]
        place = int(hashlib.sha256(key.encode()).hexdigest()[:13], 16) / 16**13 * sum(shares)
        found = 0
        while found < last and place >= shares[found]:
            place -= shares[found]
            found += 1
        return found


@Pruner.register("paired")
class PairedPruner(Pruner):
    """Ends a trial that lies behind the baseline's on the same batches by more than it could make up.

    With g_i the difference of the two validation losses at curve point i, on the same windows, it ends at point m if

        g_m - z sqrt(w^2 + 2 seed_sd^2 + s^2) > catch_up * (b_m - b_end),   s^2 = mean((g_i - g_(i-1))^2) / 2,

    where w is the standard error of g_m over the windows, s that of its moves along the later half of the points so far
    (J. von Neumann, 1941), z the normal quantile of `level`, and b the baseline's losses: it may make up `catch_up`
    times what the baseline still improved. Nothing is pruned in the first `warmup` of the steps, nor before the
    baseline's trial is whole, which starts first. As both curves are functions of their trials, so is what is found at
    a point; a trial that ends before the baseline's stays whole. Repeats are pruned too; then the variant is given up,
    and says so in the table.
    """

    paired = True

    warmup: Fraction = 0.3
    catch_up: NotNegative = 0.25
    level: Annotated[float, Range(min=0.5, below=1)] = 0.99

    def decide(self, seen: Seen) -> bool:
        base = dict(seen.baseline or ())
        step, loss = seen.history[-1] if seen.history else (0, math.nan)
        if seen.steps not in base or not self.warmup * seen.steps <= step < seen.steps:
            return False
        points = [(value, base[at]) for at, value in seen.history if at in base]
        gaps = [ours - theirs for ours, theirs in points if math.isfinite(ours) and math.isfinite(theirs)]
        if step not in base or len(gaps) < 3 or not (math.isfinite(loss) and math.isfinite(base[step])):
            return False
        late = gaps[-max(3, len(gaps) // 2 + 1) :]
        moves = [(after - before) ** 2 / 2 for before, after in pairwise(late)]
        variance = seen.errors.get(step, 0.0) ** 2 + 2 * seen.seed_sd**2 + sum(moves) / len(moves)
        left = max(base[step] - base[seen.steps], 0.0)
        return gaps[-1] - NormalDist().inv_cdf(self.level) * math.sqrt(variance) > self.catch_up * left


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
