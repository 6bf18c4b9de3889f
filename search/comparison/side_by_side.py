"""What several trials were made of, place by place: their specs, recipes and machines, each apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("model", "recipe", "machine")


def side_by_side(trials: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, list[str], bool]]]:
    """By part the rows (path, text in each trial, whether they differ), in the order of the first that has the path.

    `trials` have the content of trial.json and, as `machine`, the fingerprint of their result. What a trial has no such
    place for is an empty text. Data and seed stand with the recipe.
    """
    found = {}
    for part in PARTS:
        flat = [_flat(_part(trial, part)) for trial in trials]
        paths = dict.fromkeys(path for each in flat for path in each)
        texts = {path: [each.get(path, "") for each in flat] for path in paths}
        found[part] = [(path, values, len(set(values)) > 1) for path, values in texts.items()]
    return found


def _part(trial: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    if part != "recipe":
        return trial.get(part) or {}
    return {**trial.get("recipe", {}), **{name: trial[name] for name in ("data", "seed") if name in trial}}


def _flat(value: Any, path: str = "") -> dict[str, str]:
    """Path to text of every leaf; branches of a block by their names, other lists as a whole."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        value = {item["name"]: {k: v for k, v in item.items() if k != "name"} for item in value}
    if isinstance(value, Mapping) and value:
        start = f"{path}." if path else ""
        return {where: text for name, item in value.items() for where, text in _flat(item, f"{start}{name}").items()}
    return {path: _text(value)} if path else {}


def _text(value: Any) -> str:
    """A value as people read it: members of a site by their types, with what they say beside these."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        rest = ", ".join(f"{name}={_text(item)}" for name, item in value.items() if name not in ("type", "version"))
        name = str(value.get("type", ""))
        return f"{name}({rest})" if rest and name else name or f"({rest})"
    return {True: "yes", False: "no", None: "none"}[value] if isinstance(value, bool | None) else str(value)
