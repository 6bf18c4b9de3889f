"""Objectives that take a text to pieces: span corruption (T5) and mixtures of denoisers (UL2)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from archlab.arch_dsl.language.spec import Count, Positive, Spec
from archlab.search.data.documents.draws import Draw, Ints, span_counts, span_mask
from archlab.search.objectives.family import (
    Alphabet,
    Lengths,
    Objective,
    Pair,
    Paired,
    Share,
    drawn_part,
    part,
    too_short,
)

MODES = ("R", "S", "X")


def corrupted(text: Ints, draw: Draw, density: float, span: float, eod: int, last: int) -> Pair:
    """T5's span corruption: every span of noise is a sentinel in the source, every span of text one in the target.

    Both end with the end of a document. Sentinels are counted down from `last`.
    """
    noise = span_mask(draw, len(text), span_counts(len(text), density, span))
    starts = np.diff(noise, prepend=~noise[0])  # of spans of text and of noise in turns, text first
    number, end = np.cumsum(starts), np.array([eod])
    shown, asked = ~noise | starts, noise | starts
    source = np.where(noise, last + 1 - number // 2, text)[shown]
    target = np.where(noise, text, last - (number - 1) // 2)[asked]
    places = np.append(np.flatnonzero(asked), len(text) - 1)
    return Pair(np.concatenate([source, end]), np.concatenate([target, end]), places)


def corrupted_lengths(context: int, density: float, span: float) -> tuple[int, int]:
    """The lengths of the source and of the target that `corrupted` makes of a text."""
    noise, spans = span_counts(context, density, span)
    return context - noise + spans + 1, noise + spans + 1


class Denoiser(Spec):
    """One of several kinds of noise: `density` of the text in spans of mean length `span`, or for mode S its last part,
    a share `density` or as much as chance wants. It falls to a row with a chance in proportion to `weight`.
    """

    title: ClassVar[str] = "denoiser"
    mode: Literal["R", "S", "X"]
    density: Share | None = None
    span: Positive | None = None
    weight: Positive = 1.0

    def complaint(self) -> str | None:
        """What is wrong with the fields taken together, or None."""
        if self.mode == "S":
            return "S takes the last part of a text, which has no span" if self.span is not None else None
        return f"{self.mode} needs a density and a span" if self.density is None or self.span is None else None

    def spans(self, context: int) -> int:
        """How many sentinels it needs."""
        return 0 if self.span is None or self.density is None else span_counts(context, self.density, self.span).spans

    def lengths(self, context: int) -> tuple[int, int]:
        """The longest source, without a mode token, and the longest target."""
        if self.span is not None and self.density is not None:
            return corrupted_lengths(context, self.density, self.span)
        if self.density is None:
            return context - 1, context - 1
        cut = part(1 - self.density, context)
        return cut, context - cut

    def pair(self, text: Ints, draw: Draw, eod: int, last: int) -> Pair:
        """What a text is given and asked for."""
        if self.span is not None and self.density is not None:
            return corrupted(text, draw, self.density, self.span, eod, last)
        cut = drawn_part(None if self.density is None else 1 - self.density, draw, len(text))
        return Pair(text[:cut], text[cut:], np.arange(cut, len(text)))


class Denoising(Paired):
    """What span corruption and mixtures of it have in common: denoisers, and `sentinels` that stand for their spans."""

    sentinels: Count | None = None

    @property
    def denoisers(self) -> tuple[Denoiser, ...]:
        """The kinds of noise."""
        raise NotImplementedError

    @property
    def modes(self) -> int:
        """How many mode tokens there are."""
        return 0

    def _spans(self, context: int) -> int:
        return max(denoiser.spans(context) for denoiser in self.denoisers)

    def extra(self, context: int) -> int:
        return self.modes + (self._spans(context) if self.sentinels is None else self.sentinels)

    def lengths(self, context: int, encoder: bool) -> Lengths:
        marked = min(self.modes, 1)
        found = [denoiser.lengths(context) for denoiser in self.denoisers]
        if encoder:
            return Lengths(max(target for _, target in found), max(source for source, _ in found) + marked)
        whole = [context if item.span is None else sum(each) for item, each in zip(self.denoisers, found, strict=True)]
        return Lengths(max(whole) + marked - 1)

    def pair(self, row: Ints, draw: Draw, tokens: Alphabet, encoder: bool) -> Pair:
        text = row[1:]
        weights = np.cumsum([denoiser.weight for denoiser in self.denoisers])
        chosen = self.denoisers[int(np.searchsorted(weights, draw.uniforms(1)[0] * weights[-1], side="right"))]
        found = chosen.pair(text, draw, tokens.eod, tokens.vocab + self.extra(len(text)) - 1)
        if not self.modes:
            return found
        return found._replace(source=np.append(tokens.vocab + MODES.index(chosen.mode), found.source))

    def complaint(self, context: int) -> tuple[str, str] | None:
        needed = self._spans(context)
        if self.sentinels is not None and self.sentinels < needed:
            return "sentinels", f"must be at least {needed} for a context of {context}, found {self.sentinels}"
        return too_short(context)


@Objective.register("span_corruption")
class SpanCorruption(Denoising):
    """Spans that were cut out of a text, from the rest (T5, arXiv:1910.10683, section 3.1.4).

    round(`density` context) tokens in spans of mean length `span` are noise. Of 568 tokens, 512 are read and 114 asked
    for, the end of both included. `null` makes as many sentinels as the context needs; T5 has 100.
    """

    density: Share = 0.15
    span: Positive = 3.0

    @property
    def denoisers(self) -> tuple[Denoiser, ...]:
        return (Denoiser(mode="R", density=self.density, span=self.span),)


_UL2 = (
    Denoiser(mode="R", density=0.15, span=3.0),
    Denoiser(mode="R", density=0.15, span=8.0),
    Denoiser(mode="S", density=0.25),
    Denoiser(mode="X", density=0.5, span=3.0),
    Denoiser(mode="X", density=0.5, span=8.0),
    Denoiser(mode="X", density=0.15, span=64.0),
    Denoiser(mode="X", density=0.5, span=64.0),
)


@Objective.register("denoisers")
class Denoisers(Denoising):
    """A mixture of denoisers, by default the seven of UL2 (arXiv:2205.05131, table 1) in equal shares: regular R,
    sequential S, extreme X.

    A mode token before the source says which it was, unless `mode_tokens` is false. The name `ul2r` stands for the
    mixture that U-PaLM went on with (arXiv:2210.11399, section 3.1): half S, a quarter R, a quarter X, whose two kinds
    share theirs equally for want of a published number.
    """

    mixture: tuple[Denoiser, ...] = _UL2
    mode_tokens: bool = True

    @property
    def denoisers(self) -> tuple[Denoiser, ...]:
        return self.mixture

    @property
    def modes(self) -> int:
        return len(MODES) if self.mode_tokens else 0

    def complaint(self, context: int) -> tuple[str, str] | None:
        if not self.mixture:
            return "mixture", "needs at least one denoiser"
        for index, denoiser in enumerate(self.mixture):
            if said := denoiser.complaint():
                return "mixture", f"denoiser {index}: {said}"
        return super().complaint(context)


Objective.alias(
    "ul2r",
    type="denoisers",
    mixture=[
        {"mode": "S", "weight": 0.5},
        {"mode": "R", "density": 0.15, "span": 3, "weight": 0.25},
        {"mode": "X", "density": 0.15, "span": 32, "weight": 0.125},
        {"mode": "X", "density": 0.5, "span": 3, "weight": 0.125},
    ],
)

Objective.alias("ul2", type="denoisers")
