"""Settings and counts in words: the shortest name of a path, a value in few characters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def is_number(value: Any) -> bool:
    """Whether values like this one have an order."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def spelled(settings: dict[str, Any]) -> str:
    """Settings for people, each by the last step of its path."""
    texts = {name: f"{value:g}" if is_number(value) else json.dumps(value) for name, value in settings.items()}
    return ", ".join(f"{name.rsplit('.', 1)[-1]} {text}" for name, text in texts.items())


def terse(settings: Mapping[str, Any], beside: Iterable[str] = ()) -> list[str]:
    """What a table says of settings: `width=256` by the fewest last steps of a path, floats with 3 digits.

    `beside` are paths of other rows that a name must differ from too. A proposal's number and a rate's second name are
    left out.
    """
    kept = {"lr" if name == "train.lr" else name: value for name, value in settings.items() if name != "number"}
    paths = {*kept, *beside}
    return [f"{shortest(name, paths)}={_brief(value)}" for name, value in kept.items()]


def shortest(path: str, paths: Iterable[str]) -> str:
    """The fewest last steps of a path that tell it from the others."""
    steps = path.split(".")
    ends = [".".join(steps[-count:]) for count in range(1, len(steps) + 1)]
    others = [f".{other}" for other in paths if other != path]
    return next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), path)


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int | str) and not isinstance(value, bool):
        return str(value)
    from archlab.arch_dsl.tree.identity import brief_text  # which imports torch, and most settings are numbers

    return brief_text(value)


def counted(value: float) -> str:
    """Three digits with a unit: 1.2M, 861k, 2B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{float(f'{value / size:.3g}'):g}{unit}"
    return f"{value:g}"
