"""Overrides: what some layers of a stack change in its block, as patches by slices of layer numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from archlab.arch_dsl.language.errors import Mark, Problem
from archlab.arch_dsl.language.parse import INVALID, refuse
from archlab.arch_dsl.language.source import Node

_SLICE = r"(-?[0-9]+|(-?[0-9]+)?:(-?[0-9]+)?(:[1-9][0-9]*)?)"
LAYERS = rf"^{_SLICE}(,{_SLICE})*$"  # a pattern of such numbers, for editors


class LayersNotation:
    """Numbers of layers in one text: `1::2`, `-1`, `0,5,9`."""

    def parse_node(self, node: Node, path: str, problems: list[Problem]) -> Any:
        """The text, or INVALID."""
        text = str(node.value)
        return text if names_layers(text) else refuse(problems, path, _no_layers(text), node.mark)

    def words(self) -> str:
        return "numbers of layers: 1::2, -1, 0,5,9"

    def others(self, value: Any) -> list[Any]:
        return [other for other in ("0", "0:", "1") if other != value]

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "pattern": LAYERS}, {"type": "integer"}]}


class Overrides(Mapping[str, Node]):
    """Slices of layers (`1::2`, `-1`, `0,5,9`) to patches of the block, applied in the order in which they stand."""

    def __init__(self, patches: Mapping[str, Node] | None = None, marks: Mapping[str, Mark] | None = None) -> None:
        self._patches, self._marks = dict(patches or {}), dict(marks or {})

    def mark(self, layers: str) -> Mark | None:
        """Where a slice was written."""
        return self._marks.get(layers) or self[layers].mark

    def __getitem__(self, layers: str) -> Node:
        return self._patches[layers]

    def __iter__(self) -> Iterator[str]:
        return iter(self._patches)

    def __len__(self) -> int:
        return len(self._patches)

    def plain(self) -> dict[str, Any]:
        """The patches as plain data."""
        return {layers: node.plain() for layers, node in self._patches.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Overrides) and list(self.plain().items()) == list(other.plain().items())

    def __hash__(self) -> int:
        return hash(json.dumps(self.plain()))

    def __repr__(self) -> str:
        return f"Overrides({self.plain()!r})"

    def set(self, layers: str, path: str, value: Node) -> Overrides:
        """With one path of one slice set; both may be new. Without a path, the whole patch of the slice is."""
        if not path:
            return Overrides({**self._patches, layers: value}, self._marks)
        old = self._patches.get(layers, Node({}, value.mark))
        assert isinstance(old.value, dict)
        marks = {**old.key_marks, **({path: value.mark} if value.mark else {})}
        return Overrides({**self._patches, layers: Node({**old.value, path: value}, old.mark, marks)}, self._marks)

    def at(self, layers: str, path: str) -> Any:
        """What a slice sets a path to, as plain data; its whole patch without a path; None where there is none."""
        patch = self[layers].plain() if layers in self else {}
        return patch.get(path) if path else patch or None

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping of slices to mappings of paths."""
        if node.value is None:
            return cls()
        if not isinstance(node.value, dict):
            message = f"must be a mapping from layers ('1::2', '-1', '0,5') to patches, found {node.kind}"
            return refuse(problems, path, message, node.mark)
        before = len(problems)
        for layers, patch in node.value.items():
            mark = node.key_marks.get(layers, patch.mark)
            if not names_layers(layers):
                problems.append(Problem(path, _no_layers(layers), mark))
            if not isinstance(patch.value, dict) or not patch.value:
                message = f"must be a mapping from paths to values, found {patch.kind}"
                problems.append(Problem(f"{path}.{layers}", message, patch.mark or mark))
                continue
            for inner in patch.value:
                if inner.split(".")[0] != "block":
                    message = f"'{inner}' is not of a layer: a path here begins with block"
                    problems.append(Problem(f"{path}.{layers}", message, patch.key_marks.get(inner, mark)))
        return INVALID if len(problems) > before else cls(node.value, node.key_marks)


def names_layers(text: str) -> bool:
    """Whether a text is numbers or slices of layers."""
    return all(re.fullmatch(_SLICE, part.strip()) for part in text.split(","))


def _no_layers(text: str) -> str:
    return f"'{text}' names no layers; write a number, a slice such as 1::2, or several with commas"


def layers_of(text: str, n_layers: int) -> list[int]:
    """The layer numbers that a slice names, ascending."""
    found: set[int] = set()
    for part in (part.strip() for part in text.split(",")):
        if ":" in part:
            found.update(range(n_layers)[slice(*(int(number) if number else None for number in part.split(":")))])
        elif -n_layers <= int(part) < n_layers:
            found.add(int(part) % n_layers)
    return sorted(found)


def ranges(depths: list[int]) -> str:
    """Ascending layer numbers as text, with runs as `3-7`."""
    runs: list[list[int]] = []
    for depth in depths:
        if runs and depth == runs[-1][-1] + 1:
            runs[-1].append(depth)
        else:
            runs.append([depth])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
