"""Bits per byte of the test text: what compares across tokenizers."""

from __future__ import annotations

from archlab.search.evaluation.family import About, Measure


@Measure.register("bits_per_byte")
class BitsPerByte(Measure):
    """sum nll / (ln 2 * bytes) over the test text (arXiv:2101.00027, section 3.1). Training ends with it."""

    @property
    def in_result(self) -> bool:
        return True

    def refusal(self, about: About) -> str | None:
        if not about.dataset.has_text:
            return "the data were given as tokens, whose bytes are not known"
        if not about.recipe.objective.every:
            return f"{about.recipe.objective.type} does not predict every byte of a text"
        return None
