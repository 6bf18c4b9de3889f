"""Needles in a haystack, as text: a sentence somewhere in other text, and a question about it at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.spec import Count, Range, added
from archlab.search.data.documents.document import GIVEN, Document, pieces
from archlab.search.data.documents.draws import Draw
from archlab.search.data.sources.family import Corpus, Source, Stdlib
from archlab.search.data.sources.questions import CONSONANTS, VOWELS, Task, question

Raw = bytes
Mode = Literal["standard", "easy"]
Fact = Literal["number", "san_francisco"]
Seed = Annotated[int, Range(min=0, max=2**31)]

_BEST = "the best thing to do in San Francisco"
_THINGS = (  # the first is arXiv:2503.02130's; the others are what else one could say
    " eat a sandwich and sit in Dolores Park on a sunny day.",
    " walk across the Golden Gate Bridge early in the morning.",
    " take the ferry to Sausalito and come back at sunset.",
    " ride a cable car up the hill and look at the bay.",
    " visit the aquarium and watch the sea lions at the pier.",
    " drink coffee in North Beach and read an old book.",
    " climb the stairs to Coit Tower and count the ships.",
    " rent a bicycle and follow the coast to Ocean Beach.",
    " see the paintings in the museum and have tea in the garden.",
    " listen to a concert in Golden Gate Park with friends.",
)
MOST = len(_THINGS)


class Needle(NamedTuple):
    """A fact as pieces of text, which are tokenised one by one, so that the answer has the same tokens everywhere.

    `needle` stands in the haystack and goes on with the answer and a line's end; `question` comes after all other text
    and goes on with the answer. `answers` are the right one, then wrong ones.
    """

    needle: str
    question: str
    answers: tuple[str, ...]


def needle(draw: Draw, mode: Mode = "standard", fact: Fact = "number", answers: int = 1) -> Needle:
    """A needle and `answers` answers, at most 10: of a random number of four digits that belongs to a random word, or
    the one of arXiv:2503.02130 (after LongAlign). `standard` hides the sentence, `easy` the question before it too."""
    if fact == "number":
        what = f"the number of {_word(draw)}"
        told = tuple(f" {1000 + number}." for number in draw.some(9000, answers).tolist())
    else:
        what, told = _BEST, _THINGS[:answers]
    asked, said = f"\nWhat is {what}? Answer:", f"{what[0].upper()}{what[1:]} is"
    question = f"{asked} {said}"
    return Needle(question if mode == "easy" else f"\n{said}", question, told)


def _word(draw: Draw) -> str:
    """Two syllables."""
    letters = (CONSONANTS, VOWELS) * 2
    return "".join(kind[draw.below(len(kind))] for kind in letters)


@Source.register("needles")
class Needles(Corpus):
    """Documents with a needle, for a domain of a mixture: pieces of a `haystack`'s documents of at most
    `document_bytes` with a sentence about a number at a random place, and the question and answer at the end, as the
    measure `needle` asks for it.

    With `tasks` the questions are those of the measure `ruler`, in turn. The first `documents` pieces are taken. Each
    is in the split of the text that it was made of, so that none tells of another domain's held-out text. With
    `as_examples` text and question are given and the answer is asked for, by the objective `targets`.
    """

    haystack: Source = Stdlib()
    documents: Count = 2_000
    document_bytes: Annotated[int, Range(min=16)] = 1_000
    mode: Mode = "standard"
    seed: Seed = 0
    as_examples: bool = added(default=False)
    tasks: tuple[Task, ...] = added(default=())

    @property
    def holds_examples(self) -> bool:
        return self.as_examples

    def find(self, base: Path | None, path: str, root: Path | None = None) -> list[Path]:
        """Those of the haystack. Raises SpecError."""
        if self.tasks and self.mode != "standard":
            message = f"'{self.mode}' is of needles without `tasks`; leave one of the two out"
            raise SpecError.of(f"{path}.mode", message, self.mark("mode"))
        return self.haystack.find(base, f"{path}.haystack", root)

    def absent(self, root: Path) -> bool:
        """Whether the haystack is."""
        return self.haystack.absent(root)

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """One needle for each of the haystack's pieces, in their order."""
        made = 0
        for document in self.haystack.read(files, f"{path}.haystack"):
            for piece in pieces(document.data, self.document_bytes):
                if made == self.documents:
                    return
                yield Document(self.hidden(piece.decode(), made), document.group)
                made += 1

    def hidden(self, text: str, index: int) -> Raw:
        """A text with its facts, and a question about them."""
        draw, given = Draw(self.seed, index), GIVEN.decode() if self.as_examples else ""
        if self.tasks:
            own = question(draw, self.tasks[index % len(self.tasks)])
            facts, asked, (answer, *_) = own
        else:
            hidden = needle(draw, self.mode)
            (answer, *_), asked = hidden.answers, hidden.question
            facts = (f"{hidden.needle}{answer}\n",)
        places = sorted(draw.below(len(text) + 1) for _ in facts)
        if given:
            text = text.replace(given, " ")
        pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
        read = "".join(piece + fact for piece, fact in zip(pieces, [*facts, ""], strict=True))
        return f"{read}{asked}{given}{answer}\n".encode()

    def label(self) -> str:
        """`needles in text: books/*.txt`"""
        return f"needles in {self.haystack.label()}"
