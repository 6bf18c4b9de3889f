"""Exits of a loop: the loss after each turn, and what reading tokens early costs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from archlab.arch_dsl.language.spec import Range
from archlab.arch_dsl.model.model import exit_of
from archlab.arch_dsl.parts.context import Call
from archlab.search.data.batches import IGNORE
from archlab.search.evaluation.family import About, Found, Grid, Measure, Subject
from archlab.search.training.held_out import autocast, evaluating, held_out

Threshold = Annotated[float, Range(above=0, max=1)]


@Measure.register("exits")
class Exits(Measure):
    """The loss in nats of the test set where tokens are read otherwise than the model reads them: all after the same
    turn of its loop, for each turn, or each after the first turn with p_1 + … + p_t >= q, for each q of `thresholds`,
    p_t being the probability of its `exit` after turn t; and the mean turn in each case (arXiv:2510.25741, section 3).

    `exit_turn` is the mean of sum_t t p_t.
    """

    main: ClassVar[str] = "thresholds"
    thresholds: tuple[Threshold, ...] = (0.5, 0.7, 0.9)

    @property
    def ending(self) -> str:
        return "" if self == Exits() else "".join(f"_{each:g}" for each in self.thresholds)

    def refusal(self, about: About) -> str | None:
        return None if exit_of(about.model) is not None else "its model has no loop with an exit"

    def compute(self, subject: Subject) -> Found:
        about, recipe = subject.about, subject.about.recipe
        asked = held_out(about.dataset, "test", recipe.context, recipe.objective, False)
        parts = []
        with evaluating(subject.model):
            for part in asked.parts(subject.rows(recipe.context)):
                subject.tick()
                with autocast(subject.device, recipe.precision):
                    parts.append(_after_turns(subject.model, *part.tensors(subject.device)))
        losses, chances = (torch.cat(each, 1).double().cpu() for each in zip(*parts, strict=True))
        turns, count = losses.shape
        numbers = torch.arange(1, turns + 1, dtype=torch.float64)
        rows = {f"turn {turn + 1}": [float(losses[turn].mean()), turn + 1.0] for turn in range(turns)}
        for threshold in self.thresholds:
            last = (chances[:-1].cumsum(0) < threshold).sum(0)  # the turns that a token goes on after
            rows[f"{threshold:g}"] = [float(losses.gather(0, last[None]).mean()), float(last.double().mean()) + 1]
        grids = {
            name: Grid(list(rows), ["all"], "exit", "tokens", [[row[place]] for row in rows.values()], count)
            for place, name in enumerate(("loss_by_exit", "turn_by_exit"))
        }
        values = {"exit_turn": float((chances.mean(1) * numbers).sum())}
        return Found(values, grids=grids).with_ending(self.ending)


def _after_turns(model: Any, tokens: Tensor, targets: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The losses after each turn, and the probabilities of an exit there, `[turns, targets]` both."""
    hidden = model.turns(model.embedded(tokens), model.with_documents(call.fresh(), model, tokens))
    losses = torch.stack([model.losses(each, targets)[0] for each in hidden])
    scored = targets != IGNORE
    return losses[:, scored], model.loop.exit.log_probabilities(hidden).exp()[:, scored]
