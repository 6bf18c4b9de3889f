"""An entry of the zoo: a published architecture as a model, with its sizes, its card and its recipes, in one YAML file.

`sizes` and `train` may be tables: `columns` names the paths or fields, and every other key is a row of values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from archlab.arch_dsl.language.errors import SpecError, unknown
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import Node, read_text
from archlab.arch_dsl.language.spec import Spec
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.arch_dsl.zoo.budget import Budget, solve

FOLDER = Path(__file__).parent
_UNITS = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_PRINTED = ("parameters", "active")  # what a size says that changes nothing
_NOTED = re.compile(r"not published|not said|UNSURE|UNKNOWN|arithmetic|[Ee]rrat(um|a)\b")


class Card(Spec):
    """What a publication says of itself; null where what was read does not say it."""

    title: ClassVar[str] = "card"
    release: str
    largest: str | None
    tokens: str | None
    category: str
    objective: str
    tokenizer: str | None
    positions: str | None
    optimizer: str | None
    counted: Literal["all parameters", "all but the input table"] = "all parameters"
    source: str
    introduced: str


@dataclass(frozen=True)
class Size:
    """A published size: its numbers of parameters as printed, and what it changes in the model as written.

    `active` are those that a token meets; None where all are, or the publication does not say.
    """

    name: str
    published: str | None
    node: Node
    active: str | None = None

    @property
    def parameters(self) -> float | None:
        """The published number: 6.7B as 6.7e9."""
        return None if self.published is None else _number(self.published)

    def agrees(self, count: int) -> bool | None:
        """Whether a count is the published number, rounded up, down or to the nearest; None where there is none."""
        return None if self.published is None else rounds_to(count, self.published)


@dataclass(frozen=True)
class Entry:
    """A published architecture. `sizes` in the order of its file; `train` holds its recipes as they were published."""

    name: str
    text: str
    card: Card
    node: Node
    sizes: Mapping[str, Size]
    budget: Budget
    train: Mapping[str, Mapping[str, Any]]

    @property
    def notes(self) -> tuple[str, ...]:
        """What its file says of things unpublished, unsure, inferred or misprinted, with the key that it stands at."""
        return tuple(_notes(self.text))

    def size(self, name: str) -> Size:
        """A size by its name. Raises SpecError with the names that there are."""
        if name not in self.sizes:
            raise SpecError.of("size", unknown(name, f"size of {self.name}", self.sizes))
        return self.sizes[name]


def names() -> list[str]:
    """The names of all entries."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def entry(name: str) -> Entry:
    """An entry by its name. Raises SpecError with the names that there are."""
    if name not in names():
        raise SpecError.of("zoo", unknown(name, "model of the zoo", names()))
    path = FOLDER / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    parts = read_text(text, str(path)).value
    assert isinstance(parts, dict)
    if missing := {"card", "model", "sizes", "budget", "train"} ^ set(parts):
        raise SpecError.of(name, f"an entry has card, model, sizes, budget and train: {', '.join(sorted(missing))}?")
    sizes = {key: _size(key, node) for key, node in _table(parts["sizes"])}
    train = {key: node.plain() for key, node in _table(parts["train"])}
    card, budget = parse(Card, parts["card"], "card"), parse(Budget, parts["budget"], "budget")
    return Entry(name, text, card, parts["model"], sizes, budget, train)


def load(name: str, size: str | None = None, *, parameters: int | None = None) -> Model:
    """A published model, unresolved, with its published vocabulary and positions.

    `size` is one of the entry's; without it the model is as the entry writes it. `parameters` asks instead for a model
    of that shape with about so many parameters, embeddings not counted. Raises SpecError for what there is not.
    """
    found = entry(name)
    model = parse(Model, found.node)
    if parameters is not None:
        return apply(model, solve(model, found.budget, parameters))
    return model if size is None else apply(model, settings(found.size(size).node))


def settings(node: Node) -> list[Setting]:
    """The changes of a size."""
    assert isinstance(node.value, dict)
    return [Setting(path, child, "the size", child.mark) for path, child in node.value.items()]


def recipe(name: str) -> dict[str, Any]:
    """The fields of a published recipe (`gpt3-125m`) but its tokens, the batch in sequences.

    Raises SpecError with the names that there are.
    """
    of, recipes = name.partition("-")[0], {}
    if of in names():
        recipes = dict(entry(of).train)
    if name not in recipes:
        known = recipes or [key for other in names() for key in entry(other).train]
        raise SpecError.of("recipe", unknown(name, "published recipe", known))
    fields = {key: value for key, value in recipes[name].items() if key != "tokens"}
    if (tokens := fields.pop("batch_tokens", None)) is not None:
        fields["batch"] = round(_number(tokens) / fields["context"])
    return fields


def _table(node: Node) -> Iterator[tuple[str, Node]]:
    """The rows of a table as mappings: `columns` names what a list holds, `all` is in every row."""
    assert isinstance(node.value, dict)
    rows = {name: child for name, child in node.value.items() if name not in ("columns", "all")}
    columns = node.value["columns"].plain() if "columns" in node.value else []
    shared = node.value["all"].value if "all" in node.value else {}
    assert isinstance(shared, dict)
    for name, child in rows.items():
        own = child.value
        if isinstance(own, list):
            if len(own) != len(columns):
                raise SpecError.of(name, f"{len(own)} values for {len(columns)} columns", child.mark)
            own = dict(zip(columns, own, strict=True))
        assert isinstance(own, dict)
        yield name, Node({**shared, **own}, child.mark)


def _size(name: str, node: Node) -> Size:
    assert isinstance(node.value, dict)
    changes = {path: child for path, child in node.value.items() if path not in _PRINTED}
    published, active = (str(node.value[key].value) if key in node.value else None for key in _PRINTED)
    return Size(name, published, Node(changes, node.mark), active)


def rounds_to(count: int, printed: str) -> bool:
    """Whether a count is a printed number such as 6.7B, rounded up, down or to the nearest."""
    number = re.sub(r"[kMBT]$", "", printed)
    unit = _number(f"1{printed[len(number) :]}") / 10.0 ** len(number.partition(".")[2])
    return abs(count - round(_number(printed))) < round(unit)


def _number(text: str | float) -> float:
    """6.7B as 6.7e9."""
    if isinstance(text, str) and text[-1] in _UNITS:
        return float(text[:-1]) * _UNITS[text[-1]]
    return float(text)


def _notes(text: str) -> Iterator[str]:
    for line in text.splitlines():
        code, _, comment = line.partition("#")
        if _NOTED.search(comment):
            key = re.match(r"\s*('[^']*'|[^:]+):", code)
            yield f"{key[1]}: {comment.strip()}" if key else comment.strip()
