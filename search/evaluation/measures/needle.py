"""A needle in a haystack: whether a model finds a sentence again, by the length of the text and its depth in it."""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

from archlab.arch_dsl.language.spec import Count, Range
from archlab.search.data.dataset import Dataset
from archlab.search.data.documents.draws import Draw, Ints
from archlab.search.data.sources.needles import MOST, Fact, Mode, needle
from archlab.search.evaluation.family import About, Found, Grid, Measure, Subject
from archlab.search.evaluation.replies import asking, no_next_token, replies

_SEED = 1  # of the words and numbers, the same for all trials
SCORES = ("exact", "chosen", "rank", "loss")


class Prompt(NamedTuple):
    """The tokens of a needle: what is hidden (the right answer in it), the question, and the answers, the right one
    first."""

    hidden: Ints
    question: Ints
    answers: list[Ints]

    @property
    def length(self) -> int:
        """Tokens that a model reads at least, an end of a document before them: all but the last."""
        return len(self.hidden) + len(self.question) + max(map(len, self.answers))

    def rows(self, hay: Ints, depth: float, eod: int, hide: bool = True) -> list[tuple[Ints, int]]:
        """The prompt with each answer, and the length of that answer; a share `depth` of `hay` is before the needle."""
        place = round(depth * len(hay))
        hidden = [self.hidden] if hide else []
        start = [np.array([eod]), hay[:place], *hidden, hay[place:], self.question]
        return [(np.concatenate([*start, answer]), len(answer)) for answer in self.answers]


@Measure.register("needle")
class Needle(Measure):
    """A sentence that is hidden in text of the test set, and asked for after it (arXiv:2503.02130, after LongAlign).

    Cells are `lengths` of all that a model reads, in tokens (four up to the recipe's context without it) by `depths`
    places of the sentence, from 0% of the text before it to 100%; each is the mean over `samples` texts, the same for
    all trials. `exact` is the share where greedy decoding gives the whole answer; of `answers`, of which one is right,
    `chosen` is the share where that is the likeliest and `rank` its mean place, 1 the best; `loss` is its mean loss in
    nats per token. `floor` is `chosen` without the sentence, `ceiling` with it right before the question and no
    other text, `exact_ceiling` what `exact` is there, `chance` 1 / answers.

    `fact` is a random number of a random word, as in the data source `needles`, or the sentence of the paper.
    `mode: easy` hides the question before the sentence too, so that it comes again word for word.
    """

    main: ClassVar[str] = "mode"
    mode: Mode = "standard"
    fact: Fact = "number"
    lengths: tuple[Count, ...] = ()
    depths: Annotated[int, Range(min=2)] = 5
    samples: Count = 4
    answers: Annotated[int, Range(min=2, max=MOST)] = MOST

    @property
    def label(self) -> str:
        said = [self.mode] * (self.mode != "standard") + [self.fact] * (self.fact != "number")
        counts = {"depths": 5, "samples": 4, "answers": MOST}
        own = [f"{name[0]}{getattr(self, name)}" for name, usual in counts.items() if getattr(self, name) != usual]
        return "_".join([self.type, *said, *map(str, self.lengths), *own])

    def refusal(self, about: About) -> str | None:
        return no_text(about) or no_room(about, self.lengths, max(p.length for p in self.prompts(about.dataset)))

    def prompts(self, dataset: Dataset) -> list[Prompt]:
        """One for each sample."""
        found = []
        for index in range(self.samples):
            own = needle(Draw(_SEED, index), self.mode, self.fact, self.answers)
            texts = [own.needle, "\n", own.question, *own.answers]
            said, end, question, *answers = (
                tokens.astype(np.int64) for tokens in dataset.codec.encode([text.encode() for text in texts])
            )
            found.append(Prompt(np.concatenate([said, answers[0], end]), question, answers))
        return found

    def compute(self, subject: Subject) -> Found:
        about = subject.about
        stream, prompts = about.dataset.split("test"), self.prompts(about.dataset)
        lengths = read_lengths(about, self.lengths, max(prompt.length for prompt in prompts))
        depths = np.linspace(0, 1, self.depths)
        starts = np.linspace(0, len(stream) - lengths[-1], self.samples).astype(np.int64)
        model = subject.at(max(lengths[-1], about.recipe.context))

        def scored(length: int, depth: float, hide: bool = True) -> npt.NDArray[np.float64]:
            pairs = zip(prompts, starts, strict=True)
            texts = [stream[start : start + max(length - prompt.length, 0)].astype(np.int64) for prompt, start in pairs]
            asked = zip(prompts, texts, strict=True)
            rows = [row for prompt, hay in asked for row in prompt.rows(hay, depth, about.dataset.eod, hide)]
            return scores(subject, model, rows, self.answers)

        cells = np.array([[scored(length, depth) for depth in depths] for length in lengths])
        ceiling, floor = scored(0, 1), scored(lengths[-1], 1, hide=False)
        values = dict(zip(SCORES, cells.mean((0, 1)).tolist(), strict=True))
        values |= {"floor": floor[1], "ceiling": ceiling[1], "exact_ceiling": ceiling[0], "chance": 1 / self.answers}
        places = [round(100 * depth, 1) for depth in depths.tolist()]
        grids = {
            f"{self.label}_{name}": Grid(lengths, places, "length", "depth %", cells[..., k].tolist(), self.samples)
            for k, name in enumerate(SCORES)
        }
        return Found({f"{self.label}_{name}": float(value) for name, value in values.items()}, grids=grids)


def no_text(about: About) -> str | None:
    """Why no sentence can be hidden and asked for."""
    if why := no_next_token(about):
        return why
    return None if about.dataset.has_text else "the data were given as tokens, in which no sentence can be written"


def no_room(about: About, lengths: tuple[int, ...], needed: int) -> str | None:
    """Why `lengths`, or the context without them, cannot be read; what is hidden and asked takes `needed` tokens."""
    most = max(lengths, default=about.recipe.context)
    if short := [length for length in lengths or (most,) if length < needed]:
        return f"{min(short)} tokens have no room for the sentence and the question, which take {needed}"
    if most >= about.dataset.tokens["test"]:
        return f"{most} tokens are more than the test text has"
    return about.refusal(most) if most > about.recipe.context else None


def read_lengths(about: About, lengths: tuple[int, ...], needed: int) -> list[int]:
    """The lengths, or those quarters of the context that have `needed` tokens."""
    quarters = (about.recipe.context * part // 4 for part in (1, 2, 3, 4))
    return sorted(set(lengths)) or [length for length in quarters if length >= needed]


def scores(subject: Subject, model: nn.Module, rows: list[tuple[Ints, int]], answers: int) -> npt.NDArray[np.float64]:
    """Means over texts of what `SCORES` names, `[4]`; of each text there are so many rows, that of the right answer
    first. What a row lacks is filled at its end, where nothing is asked."""
    ends = np.array([len(tokens) for tokens, _ in rows])
    padded = np.zeros((len(rows), ends.max()), dtype=np.int64)
    for row, (tokens, _) in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    sizes, places = np.array([size for _, size in rows]), np.arange(1, ends.max())
    scored = (places >= (ends - sizes)[:, None]) & (places < ends[:, None])
    found = replies(subject, model, asking(padded, scored))
    nll = found.nll.sum(1).reshape(-1, answers)
    exact = (found.right | ~scored).all(1).reshape(-1, answers)[:, 0]
    rank = 1 + (nll[:, 1:] <= nll[:, :1]).sum(1)
    loss = nll[:, 0] / sizes.reshape(-1, answers)[:, 0]
    return np.array([exact.mean(), (rank == 1).mean(), rank.mean(), loss.mean()])
