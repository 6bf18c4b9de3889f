"""Whether a primitive is right: one verdict per property, over all models in which it is tried."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from archlab.arch_dsl.conformance.hosts import Case, cases_of
from archlab.arch_dsl.conformance.properties import PROPERTIES, one_graph
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.spec import Family, Spec, walk
from archlab.arch_dsl.model.model import Model


@dataclass(frozen=True)
class Verdict:
    """A property, and what is wrong with it in which case; '' where it holds."""

    property: str
    complaint: str = ""
    case: str = ""

    def holds(self) -> bool:
        """True where nothing is wrong."""
        return not self.complaint


def check(member: type[Family]) -> Iterator[Verdict]:
    """One verdict per property, each as soon as it is known."""
    with torch.random.fork_rng(devices=[]):
        try:
            cases = list(cases_of(member))
        except SpecError as error:
            yield Verdict("stands in a model", str(error).replace("\n", "; "), "")
            return
        places = ", ".join(dict.fromkeys(_places(cases[0].model, member)))
        yield Verdict(f"stands in a model: {places}")
        for name, holds in PROPERTIES.items():
            yield _first(name, holds, cases)
        yield _first("is captured and exported as one graph", lambda case: one_graph(case.model), cases)


def _first(name: str, holds: Callable[[Case], str], cases: list[Case]) -> Verdict:
    """The first case in which a property does not hold, if there is one."""
    for case in cases:
        try:
            complaint = holds(case)
        except Exception as error:
            complaint = _told(error, case.member)
        if complaint:
            return Verdict(name, complaint, case.id)
    return Verdict(name)


def _told(error: Exception, member: type[Family] | None) -> str:
    """An exception with the last line of the member's own file that took part in it."""
    import inspect

    own = os.path.abspath(inspect.getsourcefile(member) or "") if member else ""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f" ({frame.filename}:{frame.lineno})" for frame in reversed(frames) if frame.filename == own), "")
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}{place}"


def _places(model: Model, member: type[Spec]) -> Iterator[str]:
    """The sites that hold a member, by name."""
    for path, spec in walk(model):
        if isinstance(spec, member):
            yield ".".join(step for step in path.split(".") if not step.isdigit())
