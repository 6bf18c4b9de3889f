"""What a model is asked of a text: a family of objectives that turn windows of the stream into batches.

A row's text is the `context` targets of its window, so that all objectives learn from the same text. What an objective
adds to the vocabulary follows the tokenizer's tokens: first the mask or the mode tokens, then sentinels, which are
counted down from the end.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from archlab.arch_dsl.language.spec import Family, Range
from archlab.search.data.batches import IGNORE, Batch
from archlab.search.data.documents.draws import Draw, Ints

Share = Annotated[float, Range(above=0, below=1)]


def has_encoder(model: Any) -> bool:
    """Whether a model, or the spec of one, reads a source beside its tokens."""
    return getattr(getattr(model, "spec", model), "encoder", None) is not None


class Lengths(NamedTuple):
    """How long all rows are: tokens that the decoder reads (a model without an encoder reads these alone), and those
    that the encoder reads."""

    tokens: int
    source: int = 0


class Alphabet(NamedTuple):
    """The tokenizer's tokens: how many there are, and which one ends a document."""

    vocab: int
    eod: int


class Pair(NamedTuple):
    """What a row is given and what it is asked for; `places` of the targets in the text. `source_target` is what an
    encoder is asked for, token by token."""

    source: Ints
    target: Ints
    places: Ints
    source_target: Ints | None = None


class Objective(Family):
    """What a model learns to predict."""

    noun = "objective"
    word = True  # recipes of old have the word `causal`
    every: ClassVar[bool] = False  # whether every token of a text is predicted, and so its bytes
    encoder_weight: ClassVar[float] = 0.0  # of the encoder's own loss
    of_examples: ClassVar[bool] = False  # whether rows are examples, not windows of the stream

    def extra(self, context: int) -> int:
        """How many tokens the vocabulary needs beyond the tokenizer's."""
        return 0

    def lengths(self, context: int, encoder: bool) -> Lengths:
        """The lengths of what a model reads of a text of `context` tokens, with an encoder or without."""
        raise NotImplementedError

    def batch(self, rows: Ints, seed: int, first: int, vocab: int, encoder: bool, eod: int | None = None) -> Batch:
        """The batch of windows `[batch, context + 1]`, the first of which is row `first` of those that noise is drawn
        for under `seed`. `vocab` is the tokenizer's; `eod` ends a document, by default the last token of it."""
        raise NotImplementedError

    def complaint(self, context: int) -> tuple[str, str] | None:
        """The field that a text of `context` tokens makes wrong, and what is wrong with it, or None."""
        return None


@Objective.register("causal")
class Causal(Objective):
    """The next token, everywhere."""

    every = True

    def lengths(self, context: int, encoder: bool) -> Lengths:
        return Lengths(context)

    def batch(self, rows: Ints, seed: int, first: int, vocab: int, encoder: bool, eod: int | None = None) -> Batch:
        targets = rows[:, 1:]
        tokens = np.where(targets == IGNORE, 0, rows[:, :-1])
        return Batch(tokens, targets, np.broadcast_to(np.arange(targets.shape[1]), targets.shape))


class Paired(Objective):
    """An objective that gives a row one text and asks for another.

    An encoder reads the one, its decoder predicts the other after an end of a document. A model without an encoder
    reads both, one after the other, and is asked for the second; the first is the prefix of its `prefix` masks.
    """

    def pair(self, row: Ints, draw: Draw, tokens: Alphabet, encoder: bool) -> Pair:
        """What one window is given and asked for."""
        raise NotImplementedError

    def batch(self, rows: Ints, seed: int, first: int, vocab: int, encoder: bool, eod: int | None = None) -> Batch:
        lengths = self.lengths(rows.shape[1] - 1, encoder)
        tokens = alphabet(vocab, eod)
        pairs = [self.pair(row, Draw(seed, first + index), tokens, encoder) for index, row in enumerate(rows)]
        if encoder:
            return _encoder_decoder(pairs, lengths, tokens.eod)
        return _decoder(pairs, lengths)


def _encoder_decoder(pairs: list[Pair], lengths: Lengths, start: int) -> Batch:
    """Sources for an encoder; the decoder reads `start` and the target without its last token."""
    tokens, targets, places, padding = _blank(len(pairs), lengths.tokens)
    sources = np.zeros((len(pairs), lengths.source), dtype=np.int64)
    hidden = np.ones(sources.shape, dtype=bool)
    asked = np.full(sources.shape, IGNORE, dtype=np.int64)
    for row, (source, target, place, own) in enumerate(pairs):
        sources[row, : len(source)], hidden[row, : len(source)] = source, False
        asked[row, : len(source)] = IGNORE if own is None else own
        tokens[row, 0], tokens[row, 1 : len(target)] = start, target[:-1]
        targets[row, : len(target)], places[row, : len(target)] = target, place
        padding[row, : len(target)] = False
    return Batch(
        tokens,
        targets,
        places,
        padding=padding if padding.any() else None,
        source_tokens=sources,
        source_padding=hidden if hidden.any() else None,
        source_targets=asked if (asked != IGNORE).any() else None,
    )


def _decoder(pairs: list[Pair], lengths: Lengths) -> Batch:
    """Source and target one after the other, without the last token of all."""
    tokens, targets, places, padding = _blank(len(pairs), lengths.tokens)
    prefix = np.array([len(pair.source) for pair in pairs], dtype=np.int64)
    for row, (source, target, place, _) in enumerate(pairs):
        end = len(source) + len(target) - 1
        tokens[row, :end] = np.concatenate([source, target[:-1]])
        targets[row, len(source) - 1 : end], places[row, len(source) - 1 : end] = target, place
        padding[row, :end] = False
    return Batch(tokens, targets, places, prefix, padding if padding.any() else None)


def _blank(rows: int, length: int) -> tuple[Ints, Ints, Ints, np.ndarray[tuple[int, int], np.dtype[np.bool_]]]:
    """Tokens, targets, places and padding of nothing."""
    shape = rows, length
    zeros = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    return *zeros, np.ones(shape, dtype=bool)


def alphabet(vocab: int, eod: int | None) -> Alphabet:
    """The tokens of a tokenizer, the last of which ends a document where none is said to."""
    return Alphabet(vocab, vocab - 1 if eod is None else eod)


def part(share: float, length: int) -> int:
    """How many tokens a share of a text is, so that neither it nor the rest is empty."""
    return min(max(round(share * length), 1), length - 1)


def drawn_part(share: float | None, draw: Draw, length: int) -> int:
    """Where a text is cut in two: at a share of it, or anywhere."""
    return 1 + draw.below(length - 1) if share is None else part(share, length)


def too_short(context: int) -> tuple[str, str] | None:
    """What is wrong with a context that cannot be cut in two."""
    return None if context > 1 else ("", "divides a text in two, and the context has one token")
