"""What a model is asked of a text: a family of objectives that turn windows of the stream into batches.

A row's text is the `context` targets of its window, so that all objectives learn from the same text. What an objective
adds to the vocabulary follows the tokenizer's tokens, of which the end of a document is the last: first the mask or the
mode tokens, then sentinels, which are counted down from the end.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from arch_dsl.spec import Count, Family, Fraction, Positive, Range, Spec
from search.data.batches import IGNORE, Batch
from search.data.noise import Draw, Ints, span_counts, span_mask

Share = Annotated[float, Range(above=0, below=1)]
MODES = ("R", "S", "X")


def has_encoder(model: Any) -> bool:
    """Whether a model, or the spec of one, reads a source beside its tokens."""
    return getattr(getattr(model, "spec", model), "encoder", None) is not None


class Lengths(NamedTuple):
    """How long all rows are: tokens that the decoder reads (a model without an encoder reads these alone), and those
    that the encoder reads."""

    tokens: int
    source: int = 0


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

    def extra(self, context: int) -> int:
        """How many tokens the vocabulary needs beyond the tokenizer's."""
        return 0

    def lengths(self, context: int, encoder: bool) -> Lengths:
        """The lengths of what a model reads of a text of `context` tokens, with an encoder or without."""
        raise NotImplementedError

    def batch(self, rows: Ints, seed: int, first: int, vocab: int, encoder: bool) -> Batch:
        """The batch of windows `[batch, context + 1]`, the first of which is row `first` of those that noise is drawn
        for under `seed`. `vocab` is the tokenizer's."""
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

    def batch(self, rows: Ints, seed: int, first: int, vocab: int, encoder: bool) -> Batch:
        targets = rows[:, 1:]
        tokens = np.where(targets == IGNORE, 0, rows[:, :-1])
        return Batch(tokens, targets, np.broadcast_to(np.arange(targets.shape[1]), targets.shape))


class Paired(Objective):
    """An objective that gives a row one text and asks for another.

    An encoder reads the one, its decoder predicts the other after an end of a document. A model without an encoder
    reads both, one after the other, and is asked for the second; the first is the prefix of its `prefix` masks.
    """

    def pair(self, row: Ints, draw: Draw, vocab: int, encoder: bool) -> Pair:
        """What one window is given and asked for."""
        raise NotImplementedError

    def batch(self, rows: Ints, seed: int, first: int, vocab: int, encoder: bool) -> Batch:
        lengths = self.lengths(rows.shape[1] - 1, encoder)
        pairs = [self.pair(row, Draw(seed, first + index), vocab, encoder) for index, row in enumerate(rows)]
        if encoder:
            return _encoder_decoder(pairs, lengths, vocab - 1)
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


def _cut(share: float, length: int) -> int:
    """How many tokens a share of a text is, so that neither it nor the rest is empty."""
    return min(max(round(share * length), 1), length - 1)


def _split(share: float | None, draw: Draw, length: int) -> int:
    """Where a text is cut in two: at a share of it, or anywhere."""
    return 1 + draw.below(length - 1) if share is None else _cut(share, length)


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
        cut = _cut(self.share, context)
        return Lengths(context - cut, cut)

    def pair(self, row: Ints, draw: Draw, vocab: int, encoder: bool) -> Pair:
        text = row[1:]
        cut = _split(self.share, draw, len(text))
        given = text[:cut] if encoder else row[: cut + 1]
        return Pair(given, text[cut:], np.arange(cut, len(text)))

    def complaint(self, context: int) -> tuple[str, str] | None:
        return _too_short(context)


def _too_short(context: int) -> tuple[str, str] | None:
    return None if context > 1 else ("", "divides a text in two, and the context has one token")


def masked(text: Ints, draw: Draw, density: float, kept: tuple[float, float], vocab: int) -> tuple[Ints, Ints]:
    """A text with its noise and its targets: round(density length) of the tokens that end no document, one at least.

    Of these a share becomes the mask, the first token after the tokenizer's, and a share a random token.
    """
    free = text != vocab - 1
    if not free.any():
        free[:] = True
    places = np.flatnonzero(free)
    chosen = places[draw.chosen(len(places), min(max(round(density * len(text)), 1), len(places)))]
    fate, other = draw.uniforms(len(chosen)), draw.uniforms(len(chosen))
    noisy, targets = text.copy(), np.full(len(text), IGNORE, dtype=np.int64)
    targets[chosen] = text[chosen]
    becomes = np.where(fate < kept[0], vocab, np.floor(other * (vocab - 1)).astype(np.int64))
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

    def batch(self, rows: Ints, seed: int, first: int, vocab: int, encoder: bool) -> Batch:
        kept = self.mask, self.random
        pairs = [masked(row[1:], Draw(seed, first + at), self.density, kept, vocab) for at, row in enumerate(rows)]
        tokens, targets = (np.stack(part) for part in zip(*pairs, strict=True))
        return Batch(tokens, targets, np.broadcast_to(np.arange(targets.shape[1]), targets.shape))

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

    def pair(self, row: Ints, draw: Draw, vocab: int, encoder: bool) -> Pair:
        found = super().pair(row, draw, vocab, encoder)
        noisy, asked = masked(found.source, draw, self.density, (self.mask, self.random), vocab)
        return found._replace(source=noisy, source_target=asked)

    def complaint(self, context: int) -> tuple[str, str] | None:
        return super().complaint(context) or _shares(self.mask, self.random)


def corrupted(text: Ints, draw: Draw, density: float, span: float, vocab: int, last: int) -> Pair:
    """T5's span corruption: every span of noise is a sentinel in the source, every span of text one in the target.

    Both end with the end of a document. Sentinels are counted down from `last`.
    """
    noise = span_mask(draw, len(text), span_counts(len(text), density, span))
    starts = np.diff(noise, prepend=~noise[0])  # of spans of text and of noise in turns, text first
    number, end = np.cumsum(starts), np.array([vocab - 1])
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
        cut = _cut(1 - self.density, context)
        return cut, context - cut

    def pair(self, text: Ints, draw: Draw, vocab: int, last: int) -> Pair:
        """What a text is given and asked for."""
        if self.span is not None and self.density is not None:
            return corrupted(text, draw, self.density, self.span, vocab, last)
        cut = _split(None if self.density is None else 1 - self.density, draw, len(text))
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

    def pair(self, row: Ints, draw: Draw, vocab: int, encoder: bool) -> Pair:
        text = row[1:]
        weights = np.cumsum([denoiser.weight for denoiser in self.denoisers])
        chosen = self.denoisers[int(np.searchsorted(weights, draw.uniforms(1)[0] * weights[-1], side="right"))]
        found = chosen.pair(text, draw, vocab, vocab + self.extra(len(text)) - 1)
        if not self.modes:
            return found
        return found._replace(source=np.append(vocab + MODES.index(chosen.mode), found.source))

    def complaint(self, context: int) -> tuple[str, str] | None:
        needed = self._spans(context)
        if self.sentinels is not None and self.sentinels < needed:
            return "sentinels", f"must be at least {needed} for a context of {context}, found {self.sentinels}"
        return _too_short(context)


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
    """A mixture of denoisers, by default UL2's (arXiv:2205.05131, table 1): regular R, sequential S, extreme X.

    A mode token before the source says which it was, unless `mode_tokens` is false. The name `ul2r` stands for the
    mixture that U-PaLM went on with (arXiv:2210.11399, section 3.1): half S, a quarter R, a quarter X.
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
