"""Objectives of examples, which say themselves what is given and what is asked for."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from archlab.search.data.batches import IGNORE, Batch
from archlab.search.data.documents.draws import Draw, Ints
from archlab.search.data.sources.given_tokens import ANSWER
from archlab.search.objectives.family import Alphabet, Lengths, Objective, Pair, Paired


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


@Objective.register("answers")
class Answers(Objective):
    """The answers of generated sequences, each from what is before it; nothing else is scored. The default where the
    data are a probe.

    A row is a sequence after an end of a document, padded to the context.
    """

    of_examples: ClassVar[bool] = True

    def lengths(self, context: int, encoder: bool) -> Lengths:
        return Lengths(context)

    def batch(self, rows: Ints, seed: int, first: int, vocab: int, encoder: bool, eod: int | None = None) -> Batch:
        text = rows[:, 1:]
        targets = np.where(text >= ANSWER, text - ANSWER, IGNORE)
        tokens = np.maximum(rows[:, :-1], 0) % ANSWER
        return Batch(tokens, targets, np.broadcast_to(np.arange(text.shape[1]), text.shape))
