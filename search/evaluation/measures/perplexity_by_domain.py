"""Perplexity of each domain of a mixture."""

from __future__ import annotations

import math

from archlab.search.evaluation.family import About, Found, Measure, Subject
from archlab.search.training.held_out import evaluate


@Measure.register("perplexity_by_domain")
class PerplexityByDomain(Measure):
    """exp(L_d) for each domain d of a mixture, L_d the mean loss in nats per token of its own test documents
    (arXiv:2505.06708 reports the mean of such over six held-out sets)."""

    def refusal(self, about: About) -> str | None:
        return None if about.dataset.domains else "the data are no mixture, and have no domains"

    def compute(self, subject: Subject) -> Found:
        about, recipe = subject.about, subject.about.recipe
        _, documents = evaluate(
            subject.model,
            about.dataset,
            "test",
            recipe.context,
            subject.rows(recipe.context),
            recipe.precision,
            subject.tick,
            recipe.objective,
        )
        values = {}
        for place, domain in enumerate(about.dataset.domains):
            own = documents["domain"] == place
            if tokens := documents["tokens"][own].sum():
                values[f"perplexity_in_{domain.name}"] = math.exp(documents["nll"][own].sum() / tokens)
        return Found(values)
