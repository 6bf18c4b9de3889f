"""Mistakes of models, collected while variants are tried."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from archlab.arch_dsl.language.errors import Problem, nearest, unknown

_NAMED = 40  # variants that an error lists
_QUOTED = 40  # characters of a wrong name that it shows
_VARIANT = re.compile(r"[^\s\[\]]+( [^\s\[\]]+)*")
TWIN = "a table needs each once"  # why no two variants are the same


def quoted(name: str) -> str:
    """A wrong name as an error shows it."""
    return f"'{name[:_QUOTED]}…' ({len(name)} characters)" if len(name) > _QUOTED else repr(name)


def no_name(name: str) -> str:
    """Why no variant can be called so; '' if one can."""
    if _VARIANT.fullmatch(name) and len(name) <= 80 and name.isprintable():
        return ""
    return f"{quoted(name)} is no variant name: 1 to 80 characters, words and single spaces, no brackets"


def no_variant(name: str, names: list[str]) -> str:
    """That a variant is not there, without all names where a design made hundreds."""
    if len(names) <= _NAMED:
        return unknown(name, "variant", names)
    meant = nearest(name, names)
    return f"{unknown(name, 'variant', [meant] if meant else [])[:-1]} and {len(names) - bool(meant)} more)"


class Mistakes:
    """What is wrong with the variants, each mistake once: one of the base model shows in all of them."""

    def __init__(self, variants: int) -> None:
        self._variants = variants
        self._seen: dict[tuple[object, str], tuple[Problem, list[str]]] = {}

    def add(self, problems: Iterable[Problem], variant: str) -> None:
        """Notes the problems of one variant."""
        for problem in problems:
            _, names = self._seen.setdefault((problem.mark or problem.path, problem.message), (problem, []))
            if variant not in names[-1:]:
                names.append(variant)

    @property
    def found(self) -> bool:
        return bool(self._seen)

    def problems(self) -> Iterable[Problem]:
        """Every mistake with the variants that make it, unless all do."""
        for problem, names in self._seen.values():
            if len(names) == self._variants:
                yield problem
                continue
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            many = "s" if len(names) > 1 else ""
            yield dataclasses.replace(problem, message=f"{problem.message} (variant{many} {shown})")
