"""Whether a value of JSON is like what a run stores there. A check returns "" for one that is, and otherwise where it
is not: `fault_of` makes a sentence of that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], str]

_SHOWN = 40  # characters of a value in a message
_MOST = 2**63  # above every count: a larger integer is no float
DEEPEST = 100  # mappings and lists within each other: what is written and read again must not end in a RecursionError


def fault_of(value: Any, check: Check) -> str | None:
    """What is wrong with a value, as a sentence: "its validation.loss is 'x', not a finite number"."""
    fault = check(value)
    return (f"it{fault}" if fault.startswith(" ") else f"its {fault}") if fault else None


def is_too_deep(value: Any, deepest: int = DEEPEST) -> bool:
    """Whether mappings and lists lie in each other more than so many times."""
    level, depth = [value], 0
    while level:
        depth += 1
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [child for each in inner for child in (each.values() if isinstance(each, dict) else each)]
        if depth > deepest:
            return True
    return False


def _is_not(value: Any, wanted: str) -> str:
    return f" is {str(value)[:_SHOWN]!r}, not {wanted}" if value is not None else f" is null, not {wanted}"


def anything(_: Any) -> str:
    """Any JSON."""
    return ""


def plain(value: Any) -> str:
    """Any JSON that can be written again: its numbers are finite, its texts whole."""
    kind = type(value)
    if kind is list:
        return _items(value)
    if kind is dict:
        return _entries(value)
    if kind is str:
        return text(value)
    return "" if value is None or kind is bool else number(value)


def number(value: Any) -> str:
    """A finite number."""
    kind = type(value)
    if (kind is float and math.isfinite(value)) or (kind is int and -_MOST < value < _MOST):
        return ""
    return _is_not(value, "a finite number")


def count(value: Any) -> str:
    """A whole number, 0 or more."""
    return "" if type(value) is int and 0 <= value < _MOST else _is_not(value, "a whole number from 0 on")


def positive(value: Any) -> str:
    """A finite number above 0."""
    return "" if not number(value) and value > 0 else _is_not(value, "a finite number above 0")


def deviation(value: Any) -> str:
    """A number of 0 or more, infinite where it is not known."""
    return "" if value == math.inf or (not number(value) and value >= 0) else _is_not(value, "a number from 0 on")


def text(value: Any) -> str:
    """A text that can be written: no half of a surrogate pair is in it."""
    if type(value) is str and (value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value)):
        return ""
    return _is_not(value, "a text") if type(value) is not str else " has half of a surrogate pair"


def flag(value: Any) -> str:
    """true or false."""
    return "" if type(value) is bool else _is_not(value, "true or false")


def one_of(*allowed: Any) -> Check:
    """One of several values."""
    return lambda value: "" if value in allowed else _is_not(value, f"one of {', '.join(map(repr, allowed))}")


def maybe(check: Check) -> Check:
    """null, or what the check says."""
    return lambda value: "" if value is None else check(value)


def both(first: Check, second: Check) -> Check:
    """What either of two checks finds wrong."""
    return lambda value: first(value) or second(value)


def whole(check: Check, least: int) -> Check:
    """A count of at least so many."""
    return lambda value: check(value) or ("" if value >= least else _is_not(value, f"{least} or more"))


def list_of(check: Check) -> Check:
    """A list of such values."""

    def found(value: Any) -> str:
        if type(value) is not list:
            return _is_not(value, "a list")
        return next((_at(f"[{place}]", fault) for place, each in enumerate(value) if (fault := check(each))), "")

    return found


def mapping_of(check: Check) -> Check:
    """A mapping from any names to such values."""

    def found(value: Any) -> str:
        if type(value) is not dict:
            return _is_not(value, "a mapping")
        for name, each in value.items():
            if fault := text(name) or check(each):
                return _at(repr(name)[1:-1], fault)
        return ""

    return found


def mapping(needed: Mapping[str, Check], known: Mapping[str, Check] | None = None) -> Check:
    """A mapping that has the `needed` entries, and may have the `known` ones. Others may be anything."""
    known = known or {}

    def found(value: Any) -> str:
        if type(value) is not dict:
            return _is_not(value, "a mapping")
        for name, check in needed.items():
            if fault := check(value[name]) if name in value else " is missing":
                return _at(name, fault)
        for name, check in known.items():
            if name in value and (fault := check(value[name])):
                return _at(name, fault)
        return ""

    return found


def _at(name: str, fault: str) -> str:
    return f"{name}{fault}" if fault[0] in " [" else f"{name}.{fault}"


_items, _entries = list_of(plain), mapping_of(plain)
