"""Hidden activations that are far larger than all others."""

from __future__ import annotations

from typing import ClassVar

from archlab.arch_dsl.parts.watching import Sight
from archlab.search.evaluation.family import Curve, Found, Measure
from archlab.search.evaluation.sample import Diagnostic, Observer, at_tokens, spot


@Measure.register("massive_activations")
class MassiveActivations(Diagnostic):
    """The mean over layers of max |h_l|, h_l the stream `[tokens, d_model]` after layer l (M-Act, arXiv:2505.06708,
    section 4.3 and table 4), and max |h_l| by layer, the first one being 0."""


class _Largest(Observer, of=MassiveActivations):
    kinds: ClassVar[frozenset[str]] = frozenset({"stream"})

    def __init__(self) -> None:
        self.most: dict[tuple[str, int], float] = {}
        self.tokens: dict[tuple[str, int], int] = {}

    def see(self, sight: Sight) -> None:
        stream, key = at_tokens(sight, "output").flatten(0, -2), spot(sight)
        self.most[key] = max(self.most.get(key, 0.0), float(stream.abs().amax()))
        self.tokens[key] = self.tokens.get(key, 0) + len(stream)

    def found(self, windows: int) -> Found:
        name, curves = "massive_activations", {}
        for stack in dict.fromkeys(stack for stack, _ in self.most):
            layers = sorted(layer for own, layer in self.most if own == stack)
            y: list[float | None] = [self.most[stack, layer] for layer in layers]
            end = f"_{stack}" * bool(stack)
            curves[f"{name}_by_layer{end}"] = Curve(layers, y, [self.tokens[stack, layer] for layer in layers])
        return Found({name: sum(self.most.values()) / len(self.most)}, curves)
