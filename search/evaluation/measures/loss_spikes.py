"""Sudden jumps of the training loss, and of the gradients' norm."""

from __future__ import annotations

from archlab.arch_dsl.language.spec import Count, Positive, added
from archlab.search.evaluation.family import About, Found, Measure, Subject
from archlab.search.trial.metrics import read_metrics
from archlab.search.trial.spikes import FEWEST, spikes


@Measure.register("loss_spikes")
class LossSpikes(Measure):
    """How many lines of the training journal lie `deviations` standard deviations or more above the mean of the
    `window` lines before them (the spike score of arXiv:2501.00656, section 3.1, as a number of lines).

    A line is the mean loss since the line before, and the last step's norm of the gradients; a journal has about 400
    of them, so that in a long trial a spike of a few steps is flattened. A line with fewer than 16 before it is none.
    """

    window: Count = added(default=100)
    deviations: Positive = added(default=7.0)

    @property
    def ending(self) -> str:
        return self.unusual("window", "deviations")

    def refusal(self, about: About) -> str | None:
        if self.window < FEWEST:
            return f"a window of {self.window} lines is too short for a spread; {FEWEST} are needed"
        return None

    def compute(self, subject: Subject) -> Found:
        assert subject.folder is not None
        lines = [line for line in read_metrics(subject.folder) if line.get("loss") is not None]
        found = {
            "loss_spikes": spikes([line["loss"] for line in lines], self.window, self.deviations),
            "gradient_spikes": spikes([line["grad_norm"] for line in lines], self.window, self.deviations),
            "journal_lines": len(lines),
        }
        return Found({name: float(count) for name, count in found.items()}).with_ending(self.ending)
