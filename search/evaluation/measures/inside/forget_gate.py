"""How long a forget gate, or the decay of a linear recurrence, remembers."""

from __future__ import annotations

import math
import statistics
from typing import ClassVar

import torch
from torch import Tensor

from archlab.arch_dsl.parts.watching import Sight
from archlab.arch_dsl.primitives.forget import ForgetGate as ForgetGateScore
from archlab.arch_dsl.primitives.linear_attention import LinearAttention
from archlab.search.evaluation.by_layer import ByLayer, grids
from archlab.search.evaluation.family import About, Found, Measure
from archlab.search.evaluation.sample import Diagnostic, Observer, counted, parts_of, spot

LEAST = -1e4  # ln f of a gate that forgets everything


@Measure.register("forget_gate")
class ForgetGate(Diagnostic):
    """Of f_t, what a head keeps from one token to the next (the forget gate of arXiv:2503.02130, eq. 11; the decay of a
    linear recurrence): its mean over tokens, and over channels where each has its own, per layer and head, and over
    these.

    The half-life ln 2 / mean(-ln f) is in how many tokens a head forgets half, per layer and head; its median over
    these stands for the model. The map of decays F_ij = f_(j+1) … f_i (the same, eq. 13) by distance: the mean of F_ij
    over tokens, heads and channels for i - j = 1, 2, 4, 8, …, per layer.
    """

    def refusal(self, about: About) -> str | None:
        found = any(
            isinstance(part, ForgetGateScore) or (isinstance(part, LinearAttention) and part.decay is not None)
            for part in parts_of(about)
        )
        return None if found else "the model has neither a forget gate nor a linear recurrence with a decay per head"


class _Decays(Observer, of=ForgetGate):
    kinds: ClassVar[frozenset[str]] = frozenset({"decay"})

    def __init__(self) -> None:
        self.kept, self.rate, self.far = ByLayer(), ByLayer(), ByLayer()
        self.distances: list[int] = []

    def see(self, sight: Sight) -> None:
        log_f: Tensor = sight.tensors["log_f"].double().cpu().clamp(min=LEAST)
        place, layer = spot(sight)
        rows = counted(sight, log_f.shape)
        rows = torch.ones(log_f.shape[:2], dtype=torch.bool) if rows is None else rows.cpu()
        per_token = log_f if log_f.ndim == 3 else log_f.mean(-1)
        kept = log_f.exp() if log_f.ndim == 3 else log_f.exp().mean(-1)
        self.kept.add(place, layer, kept[rows].sum(0), float(rows.sum()))
        self.rate.add(place, layer, -per_token[rows].sum(0), float(rows.sum()))
        time = log_f.shape[1]
        sums = log_f.cumsum(1)
        self.distances = [2**power for power in range((time - 1).bit_length())]
        between = [(sums[:, far:] - sums[:, :-far]).exp().flatten(2).mean(-1) for far in self.distances]
        total = [part[rows[:, far:]].sum() for part, far in zip(between, self.distances, strict=True)]
        count = [rows[:, far:].sum() for far in self.distances]
        self.far.add(place, layer, torch.stack(total), torch.stack(count))

    def found(self, windows: int) -> Found:
        half = {
            key: [math.log(2) / rate if rate else math.inf for rate in rates] for key, rates in self.rate.means.items()
        }
        values = {
            "forget_gate": self.kept.mean,
            "forget_gate_half_life": statistics.median(each for row in half.values() for each in row),
        }
        found = self.kept.grids("forget_gate", "head", windows) | grids(half, "forget_gate_half_life", "head", windows)
        return Found(
            values, grids=found | grids(self.far.means, "forget_gate_map", "distance", windows, self.distances)
        )
