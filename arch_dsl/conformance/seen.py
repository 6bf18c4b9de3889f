"""One primitive by itself: what it was given in a small model, and what it made of that."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from archlab.arch_dsl.conformance.effects import build
from archlab.arch_dsl.conformance.hosts import HOSTS, TOKENS, Data, case_of
from archlab.arch_dsl.conformance.properties import read
from archlab.arch_dsl.language.errors import SpecError, unknown
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Primitive


class Seen(NamedTuple):
    """A module, the arguments of the first call of it, and the result."""

    module: nn.Module
    inputs: tuple[Any, ...]
    output: Any


def seen(name: str, fields: Data | None = None) -> Seen:
    """The primitive of that name in a small model that is read: its module, what that was given, and what it gave.

    All is in float64, and every parameter random. `fields` are the primitive's, by default those of its first example.
    What has no module, as a mask, or one that nobody calls, is seen by the whole model. Raises SpecError for a name
    that none has, and for fields that do not fit.
    """
    members = {found.type: found for family in HOSTS for found in family.members.values()}
    if name not in members:
        raise SpecError.of("", unknown(name, "primitive", members))
    member: Any = members[name]
    case = case_of(member, member.examples[0] if fields is None else fields)
    with _made(member) as modules:
        model = build(case.model)
    found: list[Seen] = []
    for module in (*modules[-1:], model):
        if not found:
            _watch(module, model, found)
    return found[0]


def _watch(module: nn.Module, model: nn.Module, found: list[Seen]) -> None:
    """Enters the calls of a module while the model reads."""
    given: list[tuple[Any, ...]] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        twice = [itertools.tee(value) if isinstance(value, Iterator) else (value, value) for value in inputs]
        given.append(tuple(pair[0] for pair in twice))
        return tuple(pair[1] for pair in twice)

    def enter(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        found.append(Seen(module, given[-1], output))

    hooks = module.register_forward_pre_hook(keep), module.register_forward_hook(enter)
    model(TOKENS, read())
    for hook in hooks:
        hook.remove()


@contextmanager
def _made(member: type[Primitive]) -> Iterator[list[nn.Module]]:
    """The modules that a member builds meanwhile."""
    own, modules = member.build, list[nn.Module]()

    def build_and_note(self: Primitive, ctx: BuildContext) -> nn.Module:
        modules.append(own(self, ctx))
        return modules[-1]

    try:
        member.build = build_and_note  # type: ignore[method-assign]
        yield modules
    finally:
        member.build = own  # type: ignore[method-assign]
