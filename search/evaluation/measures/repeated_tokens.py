"""Probes of any language model: random tokens that come again, in order (induction) or pair by pair (recall)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from archlab.arch_dsl.language.spec import Count, added
from archlab.search.data.dataset import Dataset
from archlab.search.data.documents.draws import Bools, Draw, Ints
from archlab.search.evaluation.family import About, Found, Measure, Subject
from archlab.search.evaluation.replies import asking, no_next_token, replies

_SEED = 0  # of what is drawn, the same for all trials
_LOOKED_AT = 1 << 18  # tokens of the test text


class _Repeated(Measure):
    """Random tokens of the test text, all different, read after an end of a document, and all of them once more.

    Told are the share of the tokens asked for the second time that are the model's likeliest, the mean loss in nats of
    these and that of the same tokens the first time, and the chance of one of them drawn at random.
    """

    length: Count | None = added(default=None)
    sequences: Count = 64
    least: ClassVar[int] = 2

    @property
    def ending(self) -> str:
        return "" if self.length is None else f"_{self.length}"

    def refusal(self, about: About) -> str | None:
        if why := no_next_token(about):
            return why
        half, known = self.half(about), len(_tokens_of(about.dataset))
        if half > known:
            return f"{half} different tokens are asked for, and the test text has {known}"
        if half < self.least:
            return f"a context of {about.recipe.context} tokens is too short"
        return about.refusal(2 * half) if 2 * half > about.recipe.context else None

    def half(self, about: About) -> int:
        """How many tokens come twice: as many as fit into the context, unless it is said."""
        raise NotImplementedError

    def once_more(self, half: int, draw: Draw) -> tuple[Ints, Bools]:
        """The places of the first time in the order of the second, `[half]`, and which of these are asked for."""
        raise NotImplementedError

    def compute(self, subject: Subject) -> Found:
        about = subject.about
        half, known = self.half(about), _tokens_of(about.dataset)
        rows = np.full((self.sequences, 2 * half + 1), about.dataset.eod, dtype=np.int64)
        scored = np.zeros((self.sequences, 2, half), dtype=bool)
        order = np.empty((self.sequences, half), dtype=np.int64)
        for index in range(self.sequences):
            draw = Draw(_SEED, index)
            own = known[draw.some(len(known), half)]
            order[index], asked = self.once_more(half, draw)
            rows[index, 1:] = np.concatenate([own, own[order[index]]])
            scored[index, 1] = asked
            scored[index, 0, order[index][asked]] = True
        batch = asking(rows, scored.reshape(self.sequences, -1))
        found = replies(subject, subject.at(max(2 * half, about.recipe.context)), batch)
        nll, right = found.nll.reshape(scored.shape), found.right.reshape(scored.shape)
        count = int(scored[:, 1].sum())
        values = {
            "accuracy": right[:, 1].sum() / count,
            "loss_first": nll[:, 0].sum() / count,
            "loss_second": nll[:, 1].sum() / count,
            "chance": self.sequences / count,
        }
        return Found({f"{self.label}_{name}": float(value) for name, value in values.items()})


@Measure.register("induction")
class Induction(_Repeated):
    """Whether a model goes on as it did before (induction heads, arXiv:2209.11895): a random sequence of `length`
    tokens twice in a row. Asked for are all but the first of the second time; without `length` both fill the context.
    """

    main: ClassVar[str] = "length"

    def half(self, about: About) -> int:
        return self.length or min(about.recipe.context // 2, len(_tokens_of(about.dataset)))

    def once_more(self, half: int, draw: Draw) -> tuple[Ints, Bools]:
        places = np.arange(half)
        return places, places > 0


@Measure.register("recall")
class Recall(_Repeated):
    """Whether a model finds what stood beside a token (associative recall, arXiv:2312.04927): `length` / 2 pairs of
    random tokens, then the same pairs in another order. Asked for is the second of each; without `length` both fill the
    context."""

    main: ClassVar[str] = "length"
    least: ClassVar[int] = 4

    def half(self, about: About) -> int:
        half = self.length or min(about.recipe.context // 2, len(_tokens_of(about.dataset)))
        return half // 2 * 2

    def once_more(self, half: int, draw: Draw) -> tuple[Ints, Bools]:
        pairs = draw.order(half // 2)
        return np.stack([2 * pairs, 2 * pairs + 1], axis=1).ravel(), np.arange(half) % 2 == 1


def _tokens_of(dataset: Dataset) -> Ints:
    """The different tokens of the beginning of the test text, but for the end of a document."""
    found = np.unique(dataset.split("test")[:_LOOKED_AT]).astype(np.int64)
    return np.delete(found, found == dataset.eod)
