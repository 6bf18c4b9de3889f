"""Perplexity of the test set, at one or several contexts."""

from __future__ import annotations

from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import INVALID
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, added
from archlab.search.evaluation.family import About, Found, Measure, Subject
from archlab.search.training.held_out import evaluate


@Measure.register("perplexity")
class Perplexity(Measure):
    """exp(L), L the mean loss in nats per token of the test set, with bits per byte beside it.

    Training ends with that of the recipe's context. With `context`, the test set is read anew in windows of l tokens
    for each l, every token of it once: P(l) = exp(sum_{i=1..l} n(i) L(i) / sum_{i=1..l} n(i)), L(i) being the mean loss
    of the i-th token of a window over its n(i) targets (arXiv:2503.02130, where all n(i) are equal; the last window may
    be shorter). More tokens than in training are asked of models whose positions go on.
    Bits per byte are sum nll / (ln 2 * bytes) (arXiv:2101.00027, section 3.1), the perplexity per byte is 2 to these.
    """

    main: ClassVar[str] = "context"
    context: tuple[Count, ...] = added(default=())

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        found = super().parse_node(node, path, problems)
        if found is INVALID or len(set(found.context)) == len(found.context) or not isinstance(node.value, dict):
            return found
        twice = next(each for place, each in enumerate(found.context) if each in found.context[:place])
        problems.append(Problem(f"{path}.context", f"names {twice} twice", node.value["context"].mark))
        return INVALID

    @property
    def in_result(self) -> bool:
        return not self.context

    @property
    def ending(self) -> str:
        return "".join(f"_{each}" for each in self.context)

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
