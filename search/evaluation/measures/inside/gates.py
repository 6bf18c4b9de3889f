"""How far gates are open, and how sparse what they let through is."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from archlab.arch_dsl.parts.watching import Sight
from archlab.arch_dsl.primitives.gates import OutputGate
from archlab.search.evaluation.by_layer import by_site
from archlab.search.evaluation.family import Curve, Found, Grid, Measure
from archlab.search.evaluation.sample import Diagnostic, Observer, at_tokens, spot

BINS = 20
CLOSED = {"0.1": 0.1, "0.01": 0.01}  # of scores
SPARSE = {"0.01": 0.01, "0.001": 0.001}  # of what was gated
_SHOWN = ("gate_mean", "gate_below_0.1", "gated_below_0.01")  # by layer and site too


@Measure.register("gates")
class Gates(Diagnostic):
    """Of every gate the mean of its scores, after the activation, over tokens, heads and channels, by layer and site,
    and `gate_mean` over all of them (arXiv:2505.06708, table 4); `gate_below_0.1` and `gate_below_0.01`, the shares of
    scores of less magnitude; and their histogram: shares of |score| in steps of 0.05, from 0 to 1 in percent, the last
    step with all that are larger.

    Of what they gate, y, and of the result, y': `gated_before` and `gated_after`, the means of |y| and |y'|, and
    `gated_below_0.01`, `gated_below_0.001`, the shares of |y'| below (the same, appendix A.3).
    """

    needs = (OutputGate,)
    lacks = "no gates"


class _Gates(Observer, of=Gates):
    kinds: ClassVar[frozenset[str]] = frozenset({"gate"})

    def __init__(self) -> None:
        self.sums: dict[str, dict[tuple[str, int], tuple[float, int]]] = {}
        self.steps: dict[str, Tensor] = {}

    def see(self, sight: Sight) -> None:
        scores, before, after = (at_tokens(sight, name) for name in ("scores", "before", "after"))
        key, size = spot(sight), scores.abs()
        place, _ = key
        self.add("gate_mean", key, scores)
        for name, bound in CLOSED.items():
            self.add(f"gate_below_{name}", key, size < bound)
        self.add("gated_before", key, before.abs())
        self.add("gated_after", key, after.abs())
        for name, bound in SPARSE.items():
            self.add(f"gated_below_{name}", key, after.abs() < bound)
        steps = torch.bincount((size.flatten() * BINS).long().clamp(max=BINS), minlength=BINS + 1).cpu()
        self.steps[place] = self.steps.get(place, 0) + steps

    def add(self, name: str, key: tuple[str, int], x: Tensor) -> None:
        """More numbers of a kind."""
        total, count = self.sums.setdefault(name, {}).get(key, (0.0, 0))
        self.sums[name][key] = total + float(x.sum(dtype=torch.float64)), count + x.numel()

    def found(self, windows: int) -> Found:
        values: dict[str, float] = {}
        curves: dict[str, Curve] = {}
        grids: dict[str, Grid] = {}
        for name, sums in self.sums.items():
            means = {key: total / count for key, (total, count) in sums.items()}
            values[name] = sum(means.values()) / len(means)
            if name in _SHOWN:
                grids |= by_site(means, name, windows)
        for place, steps in self.steps.items():
            end = "" if len(self.steps) == 1 else f"_{place.replace('.', '_')}"
            count = int(steps.sum())
            x = [round(100 * step / BINS) for step in range(BINS + 1)]
            curves[f"gate_histogram{end}"] = Curve(x, (steps / count).tolist(), [count] * len(x))
        return Found(values, curves, grids)
