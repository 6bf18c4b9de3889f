"""Objectives that leave the text in its order: the rest of a text from its beginning, masked tokens, or both."""

from __future__ import annotations

import numpy as np

from archlab.arch_dsl.language.spec import Fraction, Positive
from archlab.search.data.batches import IGNORE, Batch
from archlab.search.data.documents.draws import Draw, Ints
from archlab.search.objectives.family import (
    Alphabet,
    Lengths,
    Objective,
    Pair,
    Paired,
    Share,
    alphabet,
    drawn_part,
    part,
    too_short,
)


@Objective.register("prefix")
class Prefix(Paired):
    """The rest of a text from its beginning (arXiv:1910.10683, section 3.2.1), for which a prefix language model reads
    the beginning in both directions.

    The first `share` of the text is given, or a part as long as chance wants it: 1 to context - 1 tokens.
    """

    share: Share | None = None

    def lengths(self, context: int, encoder: bool) -> Lengths:
        if not encoder:
            return Lengths(context)
        if self.share is None:
            return Lengths(context - 1, context - 1)
        cut = part(self.share, context)
        return Lengths(context - cut, cut)

    def pair(self, row: Ints, draw: Draw, tokens: Alphabet, encoder: bool) -> Pair:
        text = row[1:]
        cut = drawn_part(self.share, draw, len(text))
        given = text[:cut] if encoder else row[: cut + 1]
        return Pair(given, text[cut:], np.arange(cut, len(text)))

    def complaint(self, context: int) -> tuple[str, str] | None:
        return too_short(context)


def masked(text: Ints, draw: Draw, density: float, kept: tuple[float, float], tokens: Alphabet) -> tuple[Ints, Ints]:
    """A text with its noise and its targets: round(density length) of the tokens that end no document, one at least.

    Of these a share becomes the mask, the first token after the tokenizer's, and a share a random token.
    """
    vocab, eod = tokens
    free = text != eod
    if not free.any():
        free[:] = True
    places = np.flatnonzero(free)
    chosen = places[draw.chosen(len(places), min(max(round(density * len(text)), 1), len(places)))]
    fate, other = draw.uniforms(len(chosen)), draw.uniforms(len(chosen))
    noisy, targets = text.copy(), np.full(len(text), IGNORE, dtype=np.int64)
    targets[chosen] = text[chosen]
    random = np.floor(other * (vocab - 1)).astype(np.int64)
    random += random >= eod  # any token but the end of a document
    becomes = np.where(fate < kept[0], vocab, random)
    noisy[chosen] = np.where(fate < sum(kept), becomes, text[chosen])
    return noisy, targets


@Objective.register("masked")
class Masked(Objective):
    """Tokens that were masked, from all others (BERT, arXiv:1810.04805, section 3.1).

    Of the text, round(`density` context) tokens are to be predicted: a share `mask` of them reads as the mask token,
    a share `random` as a random one, the rest as they are. Ends of documents are left alone.
    """

    density: Share = 0.15
    mask: Fraction = 0.8
    random: Fraction = 0.1

    def extra(self, context: int) -> int:
        return 1

    def lengths(self, context: int, encoder: bool) -> Lengths:
        return Lengths(context)

    def batch(self, rows: Ints, seed: int, first: int, vocab: int, encoder: bool, eod: int | None = None) -> Batch:
        kept, tokens = (self.mask, self.random), alphabet(vocab, eod)
        pairs = [masked(row[1:], Draw(seed, first + at), self.density, kept, tokens) for at, row in enumerate(rows)]
        noisy, targets = (np.stack(part) for part in zip(*pairs, strict=True))
        return Batch(noisy, targets, np.broadcast_to(np.arange(targets.shape[1]), targets.shape))

    def complaint(self, context: int) -> tuple[str, str] | None:
        return _shares(self.mask, self.random)


def _shares(mask: float, random: float) -> tuple[str, str] | None:
    together = mask + random
    return ("random", f"and mask are {together:g} of the masked tokens; at most 1 is there") if together > 1 else None


@Objective.register("masked_encoder")
class MaskedEncoder(Prefix):
    """The rest of a text from its beginning, in which the encoder predicts masked tokens (AlphaCode, arXiv:2203.07814,
    section 4.2).

    The encoder's loss is added, times `weight`; which tokens are masked is as in `masked`.
    """

    density: Share = 0.15
    mask: Fraction = 0.8
    random: Fraction = 0.1
    weight: Positive = 1.0

    @property
    def encoder_weight(self) -> float:  # type: ignore[override]
        return self.weight

    def extra(self, context: int) -> int:
        return 1

    def pair(self, row: Ints, draw: Draw, tokens: Alphabet, encoder: bool) -> Pair:
        found = super().pair(row, draw, tokens, encoder)
        noisy, asked = masked(found.source, draw, self.density, (self.mask, self.random), tokens)
        return found._replace(source=noisy, source_target=asked)

    def complaint(self, context: int) -> tuple[str, str] | None:
        return super().complaint(context) or _shares(self.mask, self.random)
