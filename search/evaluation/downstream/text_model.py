"""A trained causal model as what tasks ask: how likely a text is after another, and how a text goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from archlab.arch_dsl.compiler.generation import GREEDY, Sampling, stream
from archlab.arch_dsl.compiler.modules import LanguageModel
from archlab.search.data.tokenizers.family import Codec
from archlab.search.hardware.peaks import Precision
from archlab.search.objectives import has_encoder
from archlab.search.training.held_out import autocast, evaluating

if TYPE_CHECKING:
    from archlab.search.evaluation.family import About, Subject

Tokens = list[int]


def not_continued(about: About) -> str | None:
    """Why a model cannot say how a text goes on, or None."""
    if not about.dataset.has_text:
        return "the data were given as tokens, whose text is not known"
    if has_encoder(about.model) or about.recipe.objective.type not in ("causal", "targets"):
        return "the model was not trained to say how a text goes on: its objective must be causal, without an encoder"
    return None


def text_model(subject: Subject, context: int) -> TextModel:
    """A measured model that reads and writes at most `context` tokens at a time."""
    at_once = subject.rows(context) * context
    model: Any = subject.at(context)
    about = subject.about
    return TextModel(model, about.dataset.codec, context, at_once, about.recipe.precision, subject.tick)


@dataclass(frozen=True)
class Window:
    """One forward pass: what is read, and the last of its predictions that count, for the `index`-th question."""

    index: int
    read: tuple[int, ...]
    asked: tuple[int, ...]


@dataclass
class TextModel:
    """A model, its tokenizer and the `context` that it reads at most; `at_once` tokens are computed together.

    `tick` is called before each forward pass; what it raises ends the work.
    """

    model: LanguageModel
    codec: Codec
    context: int
    at_once: int
    precision: Precision = "fp32"
    tick: Callable[[], None] = field(default=lambda: None)

    def encode(self, text: str) -> Tokens:
        """The tokens of a text, without an end of the document."""
        return [int(token) for token in next(iter(self.codec.encode([text.encode()])))]

    def scores(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Of each continuation after its context (one token at least): log p in nats, and whether every token of it is
        the likeliest one.

        A pair that is longer than the window keeps its end. A continuation that is longer itself is read in windows,
        each token of it predicted once, after as many before it as the window has.
        """
        waiting = [window for i, pair in enumerate(pairs) for window in windows(i, *pair, self.context)]
        sums, greedy = [0.0] * len(pairs), [True] * len(pairs)
        for batch in self._batches(waiting):
            for window, (logs, best) in zip(batch, self._read(batch), strict=True):
                sums[window.index] += logs
                greedy[window.index] &= best
        return list(zip(sums, greedy, strict=True))

    def _batches(self, waiting: list[Window]) -> Iterator[list[Window]]:
        """Windows of like length together, the longest first; those that read the same side by side."""
        ordered = sorted(waiting, key=lambda each: (-len(each.read), each.read))
        while ordered:
            rows = max(1, self.at_once // len(ordered[0].read))
            yield ordered[:rows]
            ordered = ordered[rows:]

    def _read(self, batch: list[Window]) -> list[tuple[float, bool]]:
        """log p of what each window asks for, and whether it is the likeliest. What several read is read once."""
        self.tick()
        rows = {read: row for row, read in enumerate(dict.fromkeys(window.read for window in batch))}
        longest = max(map(len, rows))
        tokens = torch.full((len(rows), longest), self.codec.eod)  # what follows a text changes nothing before it
        for read, row in rows.items():
            tokens[row, : len(read)] = torch.tensor(read)
        with self.computing() as device:
            hidden = self.model.hidden(tokens.to(device))
            return [self._score(hidden[rows[window.read]], window) for window in batch]

    def _score(self, hidden: Tensor, window: Window) -> tuple[float, bool]:
        end, count, total, greedy = len(window.read), len(window.asked), 0.0, True
        asked = torch.tensor(window.asked, device=hidden.device)
        pieces = hidden[end - count : end].split(self.model.rows_at_once)
        for piece, wanted in zip(pieces, asked.split(self.model.rows_at_once), strict=True):
            logs = self.model.logits(piece).float().log_softmax(-1)
            total += float(logs.gather(-1, wanted[:, None]).double().sum())
            greedy = greedy and bool((logs.argmax(-1) == wanted).all())
        return total, greedy

    def continued(
        self,
        prompts: Sequence[Tokens],
        most: int,
        until: Sequence[str] = (),
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] | None = None,
    ) -> list[str]:
        """How each prompt (one token at least) goes on: at most `most` tokens, up to the end of the document or the
        first of the strings of `until`, which are no part of it.

        A prompt keeps its end where the window has no place for all of it and of what follows. Prompts of one length
        are continued together. Row i is drawn by `seeds[i]`, by default i. Bytes that are no UTF-8 become U+FFFD.
        """
        most = min(most, self.context - 1)
        cut = [prompt[-(self.context - most) :] for prompt in prompts]
        seeds = range(len(cut)) if seeds is None else seeds
        order = sorted(range(len(cut)), key=lambda i: len(cut[i]))
        stops, found = [text.encode() for text in until if text], [b""] * len(cut)
        while order:
            length = len(cut[order[0]])
            rows = max(1, self.at_once // (length + most))
            batch = [i for i in order[:rows] if len(cut[i]) == length]
            order = order[len(batch) :]
            texts = self._continue([cut[i] for i in batch], most, stops, sampling, [seeds[i] for i in batch])
            for i, text in zip(batch, texts, strict=True):
                found[i] = text
        return [text.decode(errors="replace") for text in found]

    def _continue(
        self, prompts: list[Tokens], most: int, stops: list[bytes], sampling: Sampling, seeds: list[int]
    ) -> list[bytes]:
        texts, open_ = [b""] * len(prompts), [True] * len(prompts)
        with self.computing() as device:
            going_on = stream(self.model, torch.tensor(prompts, device=device), None, sampling, seeds)
            for count, tokens in enumerate(going_on):
                self.tick()
                for row, token in enumerate(tokens.tolist()):
                    if open_[row]:
                        texts[row] += self.codec.decode(np.array([token]))
                        open_[row] = token != self.codec.eod and not any(stop in texts[row] for stop in stops)
                if count + 1 >= most or not any(open_):
                    break
        return [min((text.partition(stop)[0] for stop in stops), key=len, default=text) for text in texts]

    @contextmanager
    def computing(self) -> Iterator[torch.device]:
        """Evaluation mode, no gradients, the precision of training; gives the device."""
        device = next(self.model.parameters()).device
        with evaluating(self.model), autocast(device, self.precision):
            yield device


def windows(index: int, context: Tokens, asked: Tokens, most: int) -> Iterator[Window]:
    """The forward passes that predict every token of `asked` once, of at most `most` tokens each."""
    tokens, first = context + asked, len(context)
    while first < len(tokens):
        end = min(len(tokens), first + most)
        yield Window(index, tuple(tokens[max(0, end - 1 - most) : end - 1]), tuple(tokens[first:end]))
        first = end
