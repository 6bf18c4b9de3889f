"""Probes of copying: what followed the last time, what was not blank, what stood at a place."""

from __future__ import annotations

import numpy as np

from archlab.arch_dsl.language.spec import Count
from archlab.search.data.documents.draws import Bools, Draw, Ints
from archlab.search.data.sources.family import Source
from archlab.search.data.sources.probes.family import Number, Probe, chance_of, in_turns


@Source.register("induction")
class Induction(Probe):
    """A pattern that comes again: a `segment` of distinct ones of so many `tokens` at two random places among others
    (arXiv:2209.11895). The answers are those of the second time but for its first, from which they follow.

    `gap` others stand between any two of the segment, not the same both times: what comes next is told not by the token
    before it but by the one `gap` before that. What the segment is, where and how far away, is random, so that places
    alone say nothing. Chance is one of the segment's tokens that have not come again yet.
    """

    segment: Count = 8
    gap: Number = 0
    tokens: Count = 64
    length: Count = 64

    @property
    def kinds(self) -> int:
        return self.tokens

    @property
    def chance(self) -> float:
        return chance_of(self.segment - 1, self.segment - 1)

    @property
    def span(self) -> int:
        """Tokens from the first of a segment to its last."""
        return self.segment + (self.segment - 1) * self.gap

    def complaint(self) -> tuple[str, str] | None:
        if self.segment < 2:
            return "segment", "must be at least 2: the first token of a segment follows from nothing"
        if self.tokens <= self.segment:
            return "tokens", f"must be more than the {self.segment} of a segment, found {self.tokens}"
        if self.length < (least := 2 * self.span):
            return "length", f"must be at least {least}, where two segments fit, found {self.length}"
        return None

    def sequence(self, draw: Draw) -> tuple[Ints, Bools]:
        order = draw.order(self.tokens)
        tokens = order[self.segment + draw.integers(self.tokens - self.segment, self.length)]
        room = self.length - 2 * self.span
        first, second = np.flatnonzero(draw.chosen(room + 2, 2)) + np.array([0, self.span - 1])
        steps = np.arange(self.segment) * (self.gap + 1)
        tokens[first + steps] = tokens[second + steps] = order[: self.segment]
        asked = np.zeros(self.length, dtype=bool)
        asked[second + steps[1:]] = True
        return tokens, asked


@Source.register("selective_copy")
class SelectiveCopy(Probe):
    """What is not blank, in order (selective copying, arXiv:2312.00752, where 16 tokens are copied out of 4,096):
    `copies` random ones of so many `tokens` at random places among blanks, a token that ends these, then the same
    without the blanks, the answers.

    Chance is one of those that are not copied yet, which may be equal by luck.
    """

    copies: Count = 8
    tokens: Count = 14
    length: Count = 64

    @property
    def kinds(self) -> int:
        return self.tokens + 2

    @property
    def chance(self) -> float:
        return chance_of(self.copies, self.copies, self.tokens)

    def complaint(self) -> tuple[str, str] | None:
        if self.length < (least := 2 * self.copies + 1):
            return "length", f"must be at least {least}, 2 copies and what ends the first, found {self.length}"
        return None

    def sequence(self, draw: Draw) -> tuple[Ints, Bools]:
        blank, end = self.tokens, self.tokens + 1
        copied = draw.integers(self.tokens, self.copies)
        given = np.full(self.length - self.copies - 1, blank)
        given[draw.chosen(len(given), self.copies)] = copied
        return np.concatenate([given, np.array([end]), copied]), np.arange(self.length) > len(given)


@Source.register("compression")
class Compression(Probe):
    """All of a sequence, from what is kept of it: `places` random ones of so many `tokens`, then the name of every
    place in random order, each followed by the token that stood there, the answer.

    After the compression of mechanistic architecture design (arXiv:2403.17844), whose decoder sees the last token's
    output alone. Here a model answers by itself: a recurrent one from its state, which has to hold places log2(tokens)
    bits; attention may look back. Chance is one of the sequence's tokens that were not answered yet, which may be equal
    by luck.
    """

    places: Count = 16
    tokens: Count = 16

    @property
    def kinds(self) -> int:
        return self.tokens + self.places

    @property
    def chance(self) -> float:
        return chance_of(self.places, self.places, self.tokens)

    def sequence(self, draw: Draw) -> tuple[Ints, Bools]:
        given, order = draw.integers(self.tokens, self.places), draw.order(self.places)
        asked = np.arange(3 * self.places)
        tokens = np.concatenate([given, in_turns(self.tokens + order, given[order])])
        return tokens, (asked >= self.places) & ((asked - self.places) % 2 == 1)
