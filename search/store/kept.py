"""What a store keeps beside trials, decisions of studies and what all may use: what each of them has to hold."""

from __future__ import annotations

from typing import Any

# Of a decision how its name begins, of a memory its kind; and something like the value: a number, a text, one of
# several (a tuple), a list of such, a mapping with these entries, or with any (`*`). Others may be any JSON.
_LIKE: dict[str, dict[str, Any]] = {
    "decision": {
        "precision and compile": dict.fromkeys(("precision", "compile", "why_precision", "why_compile"), ""),
        "micro_batch": 1,
        "tune_sd": 0.0,
        "seed_sd": 0.0,
    },
    "memory": {
        "step_time": {"seconds": 0.0},
        "noise": {"*": {"variance": 0.0, "df": 1, "documents": (None, 0.0), "trials": 1, "keys": [""]}},
    },
}


def fault_of(table: str, place: str, name: str, value: Any) -> str | None:
    """What is wrong with the value of a row of `decision` or `memory`; None where nothing is."""
    known = _LIKE[table]
    if table == "memory":
        like = known.get(place)
    else:
        like = next((each for word, each in known.items() if f"{name} ".startswith(f"{word} ")), None)
    return None if like is None or _is_like(value, like) else "it is not what a run stored there"


def _is_like(value: Any, like: Any) -> bool:
    if isinstance(like, tuple):
        return any(_is_like(value, each) for each in like)
    if isinstance(like, float):
        return isinstance(value, float | int) and not isinstance(value, bool)
    if type(value) is not type(like):
        return False
    if isinstance(like, list):
        return all(_is_like(each, like[0]) for each in value)
    if isinstance(like, dict):
        if "*" in like:
            return all(_is_like(each, like["*"]) for each in value.values())
        return all(name in value and _is_like(value[name], each) for name, each in like.items())
    return True
