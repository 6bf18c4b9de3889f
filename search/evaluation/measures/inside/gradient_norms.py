"""How large the gradients of a trained model are, by node."""

from __future__ import annotations

import math
import re

import torch

from archlab.arch_dsl.parts.layers import without_groups
from archlab.search.evaluation.by_layer import by_site
from archlab.search.evaluation.family import Found, Measure, Subject
from archlab.search.evaluation.sample import Sampled, sample
from archlab.search.objectives import has_encoder
from archlab.search.training.held_out import autocast

_NODE = re.compile(r"(encoder\.|decoder\.)?block\.([0-9]+)\.([^.]+)\.")


@Measure.register("gradient_norms")
class GradientNorms(Sampled):
    """The L2 norm of the gradient of the mean loss of the sample with respect to the parameters of a branch, by layer
    and branch (arXiv:2002.04745, section 3, looks at those of each layer); parameters that layers share are the
    first one's. `gradient_norm` is that of all parameters, `gradient_norm_embedding` that of the table of tokens.

    Dropout is off, and auxiliary losses are left out.
    """

    def compute(self, subject: Subject) -> Found:
        asked = sample(subject.about, has_encoder(subject.model), self.windows)
        squares = _squares(subject, self.windows)
        nodes: dict[tuple[str, int], float] = {}
        for name, square in squares.items():
            if place := _NODE.match(name):
                key = (place[1] or "") + place[3], int(place[2])
                nodes[key] = nodes.get(key, 0.0) + square
        roots = {key: math.sqrt(square) for key, square in nodes.items()}
        values = {
            f"gradient_norm{self.ending}": math.sqrt(sum(squares.values())),
            f"gradient_norm_embedding{self.ending}": math.sqrt(squares.get("embedding", 0.0)),
        }
        return Found(values, grids=by_site(roots, f"gradient_norms{self.ending}", len(asked)))


def _squares(subject: Subject, windows: int | None) -> dict[str, float]:
    """The squared norm of each parameter's gradient, by its path without parallel groups."""
    about, model = subject.about, subject.model
    asked = sample(about, has_encoder(model), windows)
    training = model.training
    model.eval()
    try:
        with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
            for part in asked.parts(subject.rows(about.recipe.context)):
                subject.tick()
                tokens, targets, call = part.tensors(subject.device)
                with autocast(subject.device, about.recipe.precision):
                    loss = model.loss(tokens, targets, call)  # type: ignore[operator]
                (loss * (part.scored / asked.scored)).backward()
        found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        short = without_groups(found)
        return {short[name]: float(grad.double().square().sum()) for name, grad in found.items()}
    finally:
        model.train(training)
        model.zero_grad(set_to_none=True)
