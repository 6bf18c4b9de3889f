"""How the learning rate moves over a trial: a warm-up, then one of five shapes, as a factor of the peak rate.

With N steps, s = 0 … N-1 and W = round(warmup N): factor(s) = (s + 1) / W for s < W (linear warm-up,
arXiv:1706.02677); no step is wasted on a rate of zero, and the first step after the warm-up runs at the peak.

Where W is left to us, it is a tenth of the steps, and at least as many as Adam's second moment takes to settle,
2 / (1 - beta2) (arXiv:1910.04209, section 5): 40 for 0.95, 2000 for 0.999. Of a short trial it is at most a quarter.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from archlab.arch_dsl.language.notation import WordOr
from archlab.arch_dsl.language.spec import Family, Fraction

AUTO = "auto"
AUTO_SHARE, AUTO_MOST = 0.1, 0.25  # of the steps
Warmup = Annotated[float | str, WordOr(AUTO, Fraction, "from 0 to 1", {"minimum": 0, "maximum": 1}, 0.05)]


def _part(fraction: float, steps: int) -> int:
    """The whole number of steps nearest to a fraction of them; a half is rounded up."""
    return math.floor(fraction * steps + 0.5)


class Schedule(Family):
    """A learning rate schedule. `warmup` is a fraction of the steps; `auto` is a tenth of them, or 2 / (1 - beta2)
    steps if that is more, and at most a quarter."""

    noun = "schedule"
    default_type = "cosine"
    warmup: Warmup = AUTO

    def factor(self, step: int, steps: int) -> float:
        """What the peak rate is multiplied by at `step` of `steps`. Raises ValueError outside 0 … steps-1."""
        if not 0 <= step < steps:
            raise ValueError(f"a trial of {steps} steps has steps 0 to {steps - 1}, received {step}")
        warm = self.warm(steps)
        return (step + 1) / warm if step < warm else self.after(step - warm, steps - warm)

    def warm(self, steps: int) -> int:
        """The steps of the warm-up, W."""
        assert self.warmup != AUTO, "a recipe settles its schedules before they are used"
        return _part(float(self.warmup), steps)

    def settled(self, steps: int, memory: float) -> Self:
        """The schedule with its warm-up as a number, for an optimizer whose second moment has so many steps in mind."""
        if self.warmup != AUTO:
            return self
        wanted = max(_part(AUTO_SHARE, steps), math.ceil(2 * memory - 1e-9))
        return self.replace(warmup=round(min(wanted, self.most(steps)) / max(steps, 1), 6))

    def most(self, steps: int) -> int:
        """The steps that a warm-up which is left to us takes at most."""
        return _part(AUTO_MOST, steps)

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
        warm = self.warm(steps)
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
        if step >= steps or since < 0 or step < self.warm(steps):
            return super().factor(step, steps)
        power = 1.0 if self.shape == "linear" else 0.5
        return 1 - (1 - self.final) * math.pow(since / cooling, power)

    def after(self, step: int, steps: int) -> float:
        return 1.0

    def stable(self, steps: int) -> int:
        return steps - _part(self.decay, steps)

    def most(self, steps: int) -> int:
        return min(super().most(steps), self.stable(steps))

    def complaint(self) -> str | None:
        total = self.decay + (0.0 if self.warmup == AUTO else float(self.warmup))
        return f"warmup and decay together take {total:g} of the steps; at most 1 is there" if total > 1 else None
