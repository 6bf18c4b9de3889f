"""Questions about facts that stand anywhere in a text, after RULER (arXiv:2404.06654), in words that are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar, get_args

from archlab.search.data.documents.draws import Draw

Item = TypeVar("Item")
Task = Literal["one", "keys", "values", "queries", "variables", "words"]
TASKS: tuple[Task, ...] = get_args(Task)
MOST = 10  # answers to choose from

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
_KEYS = 4  # facts of which one is asked for
_HOPS = 3  # names of one value, of which the last is asked for
_CHAINS = 2  # values with names
_LISTED, _OFTEN, _SELDOM = 6, 4, 2  # words of a list, how often the commonest one comes, and each other one


class Question(NamedTuple):
    """`facts` stand in the text, in this order and each in a line of its own; `asked` comes after all of the text and
    goes on with the answer. `answers` are the right one, then wrong ones. All are tokenised one by one, so that the
    answer has the same tokens everywhere."""

    facts: tuple[str, ...]
    asked: str
    answers: tuple[str, ...]


def question(draw: Draw, task: Task, answers: int = 1) -> Question:
    """A question of a task with `answers` answers, at most 10."""
    found = _ASKED[task](draw)
    return found._replace(answers=found.answers[:answers])


def _one(draw: Draw) -> Question:
    """A fact, and what it says."""
    (word,), numbers = _words(draw, 1), _numbers(draw, MOST)
    return Question((_fact(word, numbers[0]),), _asked(f"number of {word}", "is"), _told(numbers))


def _keys(draw: Draw) -> Question:
    """One of several facts. The first wrong answers are what the others say."""
    words, numbers = _words(draw, _KEYS), _numbers(draw, MOST)
    facts = [_fact(word, number) for word, number in zip(words, numbers, strict=False)]
    return Question(_shuffled(draw, facts), _asked(f"number of {words[0]}", "is"), _told(numbers))


def _values(draw: Draw) -> Question:
    """Two facts about one thing, both in the order of the text."""
    (word,), numbers = _words(draw, 1), _numbers(draw, 2 * MOST)
    pairs = [f"{first}, {second}" for first, second in zip(numbers[::2], numbers[1::2], strict=True)]
    facts = tuple(_fact(word, number) for number in numbers[:2])
    return Question(facts, _asked(f"numbers of {word}", "are"), _told(pairs))


def _queries(draw: Draw) -> Question:
    """Two of several facts, in the order of the question. The first wrong answer has them the other way round."""
    words, numbers = _words(draw, _KEYS), _numbers(draw, 2 * MOST)
    facts = [_fact(word, number) for word, number in zip(words, numbers, strict=False)]
    first, second = numbers[:2]
    pairs = [f"{first}, {second}", f"{second}, {first}"]
    pairs += [f"{a}, {b}" for a, b in zip(numbers[2::2], numbers[3::2], strict=True)]
    return Question(_shuffled(draw, facts), _asked(f"numbers of {words[0]} and {words[1]}", "are"), _told(pairs))


def _variables(draw: Draw) -> Question:
    """The value of the last name of a chain, beside another chain, whose value is the first wrong answer."""
    words, numbers = _words(draw, _CHAINS * _HOPS), _numbers(draw, MOST)
    chains = []
    for chain in range(_CHAINS):
        names = words[chain * _HOPS : (chain + 1) * _HOPS]
        values = [str(numbers[chain]), *names[:-1]]
        chains.append([f"\n{name} = {value}\n" for name, value in zip(names, values, strict=True)])
    mixed = [chains[chain].pop(0) for chain in _shuffled(draw, sorted([*range(_CHAINS)] * _HOPS))]
    last = words[_HOPS - 1]
    return Question(tuple(mixed), f"\nWhat is {last}? Answer: {last} is", _told(numbers))


def _commonest(draw: Draw) -> Question:
    """The word that comes most often in a list of words. The first wrong answers are other words of the list."""
    words = _words(draw, MOST)
    listed = [words[0]] * _OFTEN + words[1:_LISTED] * _SELDOM
    facts = [f"\nWord: {word}.\n" for word in listed]
    return Question(_shuffled(draw, facts), "\nWhich word comes most often? Answer:", tuple(f" {w}." for w in words))


_ASKED: dict[Task, Callable[[Draw], Question]] = {
    "one": _one,
    "keys": _keys,
    "values": _values,
    "queries": _queries,
    "variables": _variables,
    "words": _commonest,
}


def _fact(word: str, number: int) -> str:
    return f"\nThe number of {word} is {number}.\n"


def _asked(what: str, verb: str) -> str:
    return f"\nWhat {verb} the {what}? Answer: The {what} {verb}"


def _told(values: list[int] | list[str]) -> tuple[str, ...]:
    return tuple(f" {value}." for value in values)


def _numbers(draw: Draw, count: int) -> list[int]:
    """Different numbers of four digits."""
    return [1000 + number for number in draw.some(9000, count).tolist()]


def _words(draw: Draw, count: int) -> list[str]:
    """Different words of two syllables."""
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    places = draw.some(len(syllables) ** 2, count).tolist()
    return [syllables[place // len(syllables)] + syllables[place % len(syllables)] for place in places]


def _shuffled(draw: Draw, values: list[Item]) -> tuple[Item, ...]:
    return tuple(values[place] for place in draw.order(len(values)).tolist())
