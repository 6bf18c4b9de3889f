"""Questions about hidden facts: what the text says is the right answer, found by readers that were written for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from archlab.arch_dsl.language.parse import parse
from archlab.search.data import Source
from archlab.search.data.documents.draws import Draw
from archlab.search.data.sources.needles import Needles
from archlab.search.data.sources.questions import MOST, TASKS, Task, question

FACT = re.compile(r"\nThe number of ([a-z]{4}) is (\d{4})\.\n")


def number(text: str, asked: str) -> str:
    (word,) = re.findall(r"What is the number of ([a-z]{4})\?", asked)
    return f" {dict(FACT.findall(text))[word]}."


def numbers(text: str, asked: str) -> str:
    (word,) = re.findall(r"What are the numbers of ([a-z]{4})\?", asked)
    return f" {', '.join(value for key, value in FACT.findall(text) if key == word)}."


def two(text: str, asked: str) -> str:
    (words,) = re.findall(r"What are the numbers of ([a-z]{4}) and ([a-z]{4})\?", asked)
    return f" {', '.join(dict(FACT.findall(text))[word] for word in words)}."


def followed(text: str, asked: str) -> str:
    (name,) = re.findall(r"What is ([a-z]{4})\?", asked)
    known = dict(re.findall(r"\n([a-z]{4}) = (\w+)\n", text))
    while name in known:
        name = known[name]
    return f" {name}."


def commonest(text: str, asked: str) -> str:
    ((word, often), (_, next_often)) = Counter(re.findall(r"\nWord: ([a-z]{4})\.\n", text)).most_common(2)
    assert often > next_often and asked == "\nWhich word comes most often? Answer:"
    return f" {word}."


READERS: dict[Task, Callable[[str, str], str]] = {
    "one": number,
    "keys": number,
    "values": numbers,
    "queries": two,
    "variables": followed,
    "words": commonest,
}


@pytest.mark.parametrize("task", TASKS)
def test_the_facts_of_a_question_have_its_answer(task: Task) -> None:
    for index in range(50):
        own = question(Draw(0, index), task, MOST)
        assert READERS[task]("".join(own.facts), own.asked) == own.answers[0]
        assert len({*own.answers}) == MOST
        assert question(Draw(0, index), task).answers == own.answers[:1]
    assert question(Draw(0, 0), task) != question(Draw(0, 1), task)


def test_a_chain_is_told_in_order_beside_another() -> None:
    own = question(Draw(0, 3), "variables", 2)
    text = "".join(own.facts)
    first, other = (answer.strip(" .") for answer in own.answers)
    assert len(own.facts) == 6 and first in text and other in text
    names = re.findall(r"\n([a-z]{4}) = ([a-z]{4})\n", text)
    assert all(text.index(f"\n{value} = ") < text.index(f"\n{name} = ") for name, value in names)


def test_documents_ask_the_tasks_in_turn() -> None:
    source = parse(Source, {"type": "needles", "tasks": list(TASKS), "seed": 4})
    assert isinstance(source, Needles)
    for index in range(12):
        text = source.hidden("lorem ipsum dolor " * 20, index).decode()
        task = TASKS[index % len(TASKS)]
        start = text.rindex("\nWhich" if task == "words" else "\nWhat")
        asked = "\nWhich word comes most often? Answer:" if task == "words" else text[start:]
        assert text.endswith(f"{READERS[task](text[:start], asked)}\n")
        for fact in question(Draw(4, index), task).facts:
            text = text.replace(fact, "", 1)
        assert text.startswith("lorem ipsum dolor " * 20 + "\nWh"), "of the text nothing is lost"
