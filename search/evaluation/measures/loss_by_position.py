"""The loss of each position of a window: whether a model makes use of what it has read."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from archlab.arch_dsl.language.spec import Count, added
from archlab.search.data.batches import IGNORE
from archlab.search.evaluation.family import About, Curve, Found, Measure, Subject
from archlab.search.objectives import has_encoder
from archlab.search.training.held_out import held_out, losses


@Measure.register("loss_by_position")
class LossByPosition(Measure):
    """L(i), the mean loss in nats of the i-th token of a window of the test set over its n(i) targets, i <= `context`,
    and with it P(l) = exp(sum_{i=1..l} n(i) L(i) / sum_{i=1..l} n(i)), the perplexity at context l. Where all windows
    are whole that is exp of the mean of L(i) (arXiv:2503.02130).

    A model that uses its context has an L(i) that falls with i. Windows of `context` tokens (the recipe's without it)
    follow one another in the test stream and may begin inside of a document; the last one may be shorter, and so its
    tokens count: the mean of L(i), weighted by them, is the loss of the test set.
    """

    main: ClassVar[str] = "context"
    context: Count | None = added(default=None)

    @property
    def ending(self) -> str:
        return "" if self.context is None else f"_{self.context}"

    def refusal(self, about: About) -> str | None:
        return None if self.context is None else about.refusal(self.context)

    def compute(self, subject: Subject) -> Found:
        about, recipe = subject.about, subject.about.recipe
        context = self.context or recipe.context
        model = subject.at(context)
        asked = held_out(about.dataset, "test", context, recipe.objective, has_encoder(model))
        scored = asked.targets != IGNORE
        nll = losses(model, asked, subject.rows(context), recipe.precision, subject.tick)[scored]
        places = asked.places[scored]
        counts = np.bincount(places, minlength=context)
        sums = np.bincount(places, weights=nll, minlength=context)
        curves = {
            "loss_by_position": _curve(sums, counts),
            "perplexity_by_context": _curve(np.cumsum(sums), np.cumsum(counts), exp=True),
        }
        return Found(curves=curves).with_ending(self.ending)


def _curve(sums: npt.NDArray[Any], counts: npt.NDArray[Any], exp: bool = False) -> Curve:
    """sums / counts by position from 1 on, or exp of it."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        means = sums / counts
        means = np.exp(means) if exp else means
    y = [float(mean) if count else None for mean, count in zip(means, counts, strict=True)]
    return Curve(list(range(1, len(counts) + 1)), y, counts.tolist())
