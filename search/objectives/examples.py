"""Objectives of examples, which say themselves what is given and what is asked for."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from search.data.noise import Draw, Ints
from search.objectives.family import Alphabet, Lengths, Objective, Pair, Paired


@Objective.register("targets")
class Targets(Paired):
    """The target of each example, from its input: fine-tuning, whose loss is on targets alone (arXiv:1910.10683,
    section 3.1.2).

    A row is an example, padded to the context. Its source needs an `input`.
    """

    of_examples: ClassVar[bool] = True

    def lengths(self, context: int, encoder: bool) -> Lengths:
        return Lengths(context, context if encoder else 0)

    def pair(self, row: Ints, draw: Draw, tokens: Alphabet, encoder: bool) -> Pair:
        given, text = int(row[0]), row[1:][row[1:] >= 0]
        source, start = text[:given], np.array([tokens.eod])
        if not encoder:
            source = np.concatenate([start, source])  # as documents begin in training
        elif not given:
            source = start
        return Pair(source, text[given:], np.arange(given, len(text)))
