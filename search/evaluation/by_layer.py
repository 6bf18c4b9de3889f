"""Means by place, layer and column (head, site, expert), gathered window by window, as grids and numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from archlab.search.evaluation.family import Grid

Rows = dict[tuple[str, int], list[float]]


class ByLayer:
    """Sums of numbers in float64, and how many there were, by place and layer; a row of columns each."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, int], Tensor] = {}
        self.counts: dict[tuple[str, int], Tensor] = {}

    def add(self, place: str, layer: int, sums: Tensor, counts: Tensor | float) -> None:
        """More of them: their sums `[columns]`, and of how many these are."""
        many = counts if isinstance(counts, Tensor) else torch.full(sums.shape, float(counts))
        for kept, found in ((self.sums, sums), (self.counts, many)):
            wide = found.detach().double().cpu()
            kept[place, layer] = kept[place, layer] + wide if (place, layer) in kept else wide

    def heads(self, place: str, layer: int, x: Tensor, rows: Tensor) -> None:
        """More of them: x `[batch, heads, queries]` where `rows`, of the same shape, says that they count."""
        self.add(place, layer, torch.where(rows, x, 0).double().sum((0, 2)), rows.sum((0, 2)))

    @property
    def means(self) -> Rows:
        """The mean of each column, by place and layer; NaN where nothing was counted."""
        return {key: (sums / self.counts[key]).tolist() for key, sums in self.sums.items()}

    @property
    def mean(self) -> float:
        """The mean over all layers of the mean over their columns."""
        return mean_of(self.means)

    def grids(self, name: str, column: str, windows: int) -> dict[str, Grid]:
        """A grid of layers by columns for each place; where there are several, names tell the place."""
        return grids(self.means, name, column, windows)


def mean_of(rows: Rows) -> float:
    """The mean over layers of the mean over columns, of what is not NaN; NaN where there is none."""
    means = [sum(own) / len(own) for row in rows.values() if (own := [x for x in row if not math.isnan(x)])]
    return sum(means) / len(means) if means else math.nan


def grids(rows: Rows, name: str, column: str, windows: int, columns: list[int] | None = None) -> dict[str, Grid]:
    """Rows by place and layer as a grid for each place, whose layers are in order."""
    places = list(dict.fromkeys(place for place, _ in rows))
    found = {}
    for place in places:
        own = {layer: row for (other, layer), row in sorted(rows.items()) if other == place}
        widest = max(map(len, own.values()))
        wide: list[list[float | None]] = [[*row, *[None] * (widest - len(row))] for row in own.values()]
        end = "" if len(places) == 1 else f"_{place.replace('.', '_')}"
        found[name + end] = Grid(list(own), columns or list(range(widest)), "layer", column, wide, windows)
    return found


def by_site(rows: dict[tuple[str, int], float], name: str, windows: int) -> dict[str, Grid]:
    """Numbers by place and layer as one grid of layers by places; of two stacks one each."""
    found = {}
    for stack in dict.fromkeys(_stack(place) for place, _ in rows):
        own = {key: value for key, value in rows.items() if _stack(key[0]) == stack}
        layers, places = sorted({layer for _, layer in own}), list(dict.fromkeys(place for place, _ in own))
        values = [[own.get((place, layer)) for place in places] for layer in layers]
        labels = [place.removeprefix(f"{stack}.") for place in places]
        found[name + f"_{stack}" * bool(stack)] = Grid(layers, labels, "layer", "node", values, windows)
    return found


def _stack(place: str) -> str:
    first = place.partition(".")[0]
    return first if first in ("encoder", "decoder") else ""
