"""The zoo as a table: every size with our count of its parameters beside the published one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from archlab.arch_dsl.model.model import Model, cost, resolve
from archlab.arch_dsl.zoo.entries import Entry, entry, load, names


@dataclass(frozen=True)
class Row:
    """A size: `parameters` counted here as the publication counts, `published` as printed, and whether they agree."""

    name: str
    size: str
    parameters: int
    published: str | None
    agrees: bool | None
    context: int | None
    release: str


def rows() -> Iterator[Row]:
    """Every published size of every entry."""
    for name in names():
        found = entry(name)
        for size, published in found.sizes.items():
            if published.published is None:
                continue
            model = load(name, size)
            count = counted(found, model)
            agrees = published.agrees(count)
            yield Row(name, size, count, published.published, agrees, model.max_positions, found.card.release)


def counted(found: Entry, model: Model) -> int:
    """The parameters of a model as its publication counts them."""
    resolved = resolve(model)
    total = cost(resolved, tokens=1)
    if found.card.counted == "all parameters":
        return total.parameters
    return total.parameters - total.children["embedding"].parameters
