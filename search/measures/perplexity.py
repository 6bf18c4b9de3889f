"""Perplexity of the test set, at one or several contexts."""

from __future__ import annotations

from typing import ClassVar

from arch_dsl.spec import Count, added
from search.evaluate import evaluate
from search.measures.family import About, Found, Measure, Subject


@Measure.register("perplexity")
class Perplexity(Measure):
    """exp(L), L the mean loss in nats per token of the test set, with bits per byte beside it.

    Training ends with that of the recipe's context. With `context`, the test set is read anew in windows of l tokens
    for each l, every token of it once: P(l) = exp((1/l) * sum_{i=1..l} L(i)), L(i) being the loss of the i-th token of
    a window (arXiv:2503.02130). More tokens than in training are asked of models whose positions go on.
    Bits per byte are sum nll / (ln 2 * bytes) (arXiv:2101.00027, section 3.1), the perplexity per byte is 2 to these.
    """

    main: ClassVar[str] = "context"
    context: tuple[Count, ...] = added(default=())

    @property
    def in_result(self) -> bool:
        return not self.context

    @property
    def label(self) -> str:
        return "_".join([self.type, *map(str, self.context)])

    def refusal(self, about: About) -> str | None:
        found = [about.refusal(context) for context in self.context]
        return "; ".join(filter(None, found)) or None

    def compute(self, subject: Subject) -> Found:
        about, values = subject.about, {}
        for context in self.context:
            model, rows = subject.at(context), subject.rows(context)
            recipe = about.recipe
            told, _ = evaluate(
                model, about.dataset, "test", context, rows, recipe.precision, subject.tick, recipe.objective
            )
            values[f"perplexity_{context}"] = told["perplexity"]
            if "bits_per_byte" in told:
                values[f"bits_per_byte_{context}"] = told["bits_per_byte"]
        return Found(values)
