"""Sources that generate their sequences: row i of a split is a pure function of (fields, seed, split, i)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.spec import Count, Range
from archlab.search.data.documents.document import Document
from archlab.search.data.documents.draws import Bools, Draw, Ints
from archlab.search.data.sources.family import Source
from archlab.search.data.sources.given_tokens import ANSWER, STORED
from archlab.search.data.sources.splits import NAMES, TEST_FROM, VALIDATION_FROM

Number = Annotated[int, Range(min=0, max=2**31)]

_GROUPS = {  # by whose first eight bytes, read as a number in [0, 1), the splits are told apart
    name: round(share * 2**64).to_bytes(8, "big")
    for name, share in zip(NAMES, (0, (VALIDATION_FROM + TEST_FROM) / 2, (1 + TEST_FROM) / 2), strict=True)
}


class Probe(Source):
    """A generated task: sequences of `length` tokens, some of which are answers, the only ones that are scored.

    An answer follows its question, as in text: a model reads the end of a document and the sequence, and predicts each
    answer from all that is before it. `sequences` are trained on, epoch after epoch; those of validation and test are
    others of the same task. `seed` is that of the data, the same for all variants and trials.
    """

    sequences: Count = 20_000
    validation_sequences: Count = 500
    test_sequences: Count = 1_000
    seed: Number = 0

    @property
    def holds_tokens(self) -> bool:
        return True

    @property
    def holds_answers(self) -> bool:
        return True

    @property
    def kinds(self) -> int:
        """How many different tokens sequences are made of: all of the vocabulary but the end of a document."""
        raise NotImplementedError

    @property
    def chance(self) -> float:
        """The accuracy of an answer that is drawn from those of the sequence that were not given yet."""
        raise NotImplementedError

    @property
    def ceiling(self) -> float:
        """The accuracy of whoever sees through the task."""
        return 1.0

    def sequence(self, draw: Draw) -> tuple[Ints, Bools]:
        """Tokens `[length]` and which of them are answers."""
        raise NotImplementedError

    def complaint(self) -> tuple[str, str] | None:
        """The field that the others make wrong, and what is wrong with it, or None."""
        return None

    def alphabet(self) -> tuple[int, int]:
        return self.kinds + 1, self.kinds

    def find(self, base: Path | None, path: str, root: Path | None = None) -> list[Path]:
        """None: nothing is read. Raises SpecError for fields that do not go together."""
        if wrong := self.complaint():
            field, message = wrong
            raise SpecError.of(f"{path}.{field}", message, self.mark(field) or self.mark())
        return []

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """The sequences of every split, answers marked; one that was there before is dropped by whoever keeps them."""
        counts = self.sequences, self.validation_sequences, self.test_sequences
        for name, count in zip(NAMES, counts, strict=True):
            seed = self.own_seed(name)
            for index in range(count):
                tokens, asked = self.sequence(Draw(seed, index))
                yield Document((tokens | asked * ANSWER).astype(STORED).tobytes(), _GROUPS[name])

    def own_seed(self, name: str) -> int:
        """64 bits for each use of the seed."""
        text = f"archlab:probe:{self.type}:{name}:{self.seed}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def label(self) -> str:
        """`associative_recall`"""
        return self.type


def in_turns(first: Ints, second: Ints) -> Ints:
    """One of each at a time."""
    return np.stack([first, second], axis=1).ravel()


def chance_of(held: int, answers: int, tokens: float = math.inf) -> float:
    """The mean over so many answers of how likely one of what a sequence holds (`held`) and has not answered yet, drawn
    at random, is right: 1/m of m different ones, and 1/m + (1 - 1/m) / tokens of m independent ones of so many."""
    return sum(1 / m + (1 - 1 / m) / tokens for m in range(held, held - answers, -1)) / answers
