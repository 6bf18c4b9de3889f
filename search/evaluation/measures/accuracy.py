"""The share of answers that are right, of data that have answers: a probe."""

from __future__ import annotations

import numpy as np

from archlab.arch_dsl.language.parse import parse
from archlab.search.data.batches import IGNORE
from archlab.search.data.sources.family import Source
from archlab.search.data.sources.probes import Probe
from archlab.search.evaluation.family import About, Curve, Found, Measure, Subject
from archlab.search.evaluation.replies import replies
from archlab.search.objectives import Answers, has_encoder
from archlab.search.training.held_out import held_out

_TEST = "test"


@Measure.register("accuracy")
class Accuracy(Measure):
    """The share of a probe's test answers that are the model's likeliest token, given all that is before them; beside
    it the probe's chance level and ceiling, and `whole`, the share of sequences without a wrong answer
    (arXiv:2403.17844 compares architectures by it).

    The curve has the accuracy of the j-th answer of a sequence.
    """

    def refusal(self, about: About) -> str | None:
        if about.dataset.answers(_TEST) is None:
            return "the data are no probe, and have no answers"
        if has_encoder(about.model):
            return "answers give an encoder nothing to read"
        longest = int(about.dataset.documents(_TEST).tokens.max()) - 1
        if about.recipe.context < longest:
            return f"sequences of {longest} tokens are longer than the context"
        return None

    def compute(self, subject: Subject) -> Found:
        about = subject.about
        probe = parse(Source, about.dataset.header["source"])
        assert isinstance(probe, Probe)
        asked = held_out(about.dataset, _TEST, about.recipe.context, Answers(), False)
        right, scored = replies(subject, subject.model, asked).right, asked.targets != IGNORE
        number = (np.cumsum(scored, axis=1) - 1)[scored]
        counts = np.bincount(number)
        by_number = np.bincount(number, weights=right[scored]) / counts
        values = {
            "accuracy": float(right[scored].mean()),
            "accuracy_chance": probe.chance,
            "accuracy_ceiling": probe.ceiling,
            "accuracy_whole": float((right | ~scored).all(1).mean()),
        }
        curve = Curve(list(range(1, len(counts) + 1)), by_number.tolist(), counts.tolist())
        return Found(values, {"accuracy_by_answer": curve})
