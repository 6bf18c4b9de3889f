"""How the learning rate moves over a trial: a warm-up, then one of five shapes, as a factor of the peak rate.

With N steps, s = 0 … N-1 and W = round(warmup N): factor(s) = (s + 1) / W for s < W (linear warm-up,
arXiv:1706.02677); no step is wasted on a rate of zero, and the first step after the warm-up runs at the peak.
"""

from __future__ import annotations

import math
from typing import Literal

from archlab.arch_dsl.language.spec import Family, Fraction


def _part(fraction: float, steps: int) -> int:
    """The whole number of steps nearest to a fraction of them; a half is rounded up."""
    return math.floor(fraction * steps + 0.5)


class Schedule(Family):
    """A learning rate schedule. `warmup` is a fraction of the steps."""

    noun = "schedule"
    default_type = "cosine"
    warmup: Fraction = 0.02

    def factor(self, step: int, steps: int) -> float:
        """What the peak rate is multiplied by at `step` of `steps`. Raises ValueError outside 0 … steps-1."""
        if not 0 <= step < steps:
            raise ValueError(f"a trial of {steps} steps has steps 0 to {steps - 1}, received {step}")
        warm = _part(self.warmup, steps)
        return (step + 1) / warm if step < warm else self.after(step - warm, steps - warm)

    def after(self, step: int, steps: int) -> float:
        """The factor at `step` of the `steps` that follow the warm-up."""
        raise NotImplementedError

    def stable(self, steps: int) -> int:
        """The step up to which a longer trial may have the same rates, past the warm-up; 0 for none."""
        return 0

    def complaint(self) -> str | None:
        """What is wrong with the fields taken together, or None."""
        return None


@Schedule.register("constant")
class Constant(Schedule):
    """factor = 1."""

    def after(self, step: int, steps: int) -> float:
        return 1.0

    def stable(self, steps: int) -> int:
        return steps


@Schedule.register("cosine")
class Cosine(Schedule):
    """factor = f + (1 - f) (1 + cos(pi s / n)) / 2, half a period without restarts (arXiv:1608.03983).

    `final` f is where it would arrive after the last step; a tenth as in arXiv:2203.15556.
    """

    final: Fraction = 0.1

    def after(self, step: int, steps: int) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * step / steps)) / 2


@Schedule.register("linear")
class Linear(Schedule):
    """factor = 1 - (1 - f) s / n (arXiv:2310.07831); `final` f is where it would arrive after the last step."""

    final: Fraction = 0.1

    def after(self, step: int, steps: int) -> float:
        return 1 - (1 - self.final) * step / steps


@Schedule.register("inverse_sqrt")
class InverseSqrt(Schedule):
    """factor = sqrt(W / (W + s)) s steps after the warm-up of W (arXiv:1706.03762, eq. 3).

    With `start: constant` the warm-up runs at the peak too (arXiv:1910.10683, section 3.1.2).
    """

    start: Literal["linear", "constant"] = "linear"

    def factor(self, step: int, steps: int) -> float:
        warm = _part(self.warmup, steps)
        rising = super().factor(step, steps)
        if step < warm:
            return 1.0 if self.start == "constant" else rising
        return math.sqrt(max(warm, 1) / max(step, 1))

    def after(self, step: int, steps: int) -> float:
        return 1.0


@Schedule.register("wsd")
class WarmupStableDecay(Schedule):
    """factor = 1, then over the last `decay` of all steps, d of them: 1 - (1 - f) (s / d)^p.

    Warm-up, stable, decay (arXiv:2404.06395) with the cool-downs of arXiv:2405.18392: `shape` linear is p = 1,
    sqrt is p = 1/2. `final` f is where it would arrive after the last step.
    """

    decay: Fraction = 0.2
    final: Fraction = 0.0
    shape: Literal["linear", "sqrt"] = "linear"

    def factor(self, step: int, steps: int) -> float:
        cooling = _part(self.decay, steps)
        since = step - (steps - cooling)
        if step >= steps or since < 0 or step < _part(self.warmup, steps):
            return super().factor(step, steps)
        power = 1.0 if self.shape == "linear" else 0.5
        return 1 - (1 - self.final) * math.pow(since / cooling, power)

    def after(self, step: int, steps: int) -> float:
        return 1.0

    def stable(self, steps: int) -> int:
        return steps - _part(self.decay, steps)

    def complaint(self) -> str | None:
        total = self.warmup + self.decay
        return f"warmup and decay together take {total:g} of the steps; at most 1 is there" if total > 1 else None
