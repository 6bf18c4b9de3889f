"""A function while it is being written: its statements, and names that are each assigned once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from torch import nn

from archlab.arch_dsl.plain.trees import Unexportable, from_self, load


class NotInline(Exception):
    """This code cannot stand inside another function; it needs one of its own."""


class Body:
    """The statements of one function of the written file, and how its names came about.

    Every assignment makes a new name, `base__3`, but for `pinned` ones, which control flow at run time assigns. `soft`
    names were not chosen by whoever wrote this function, and vanish where they are used once. `owner` is the module
    whose method this is; `optional` says that a return may give None.
    """

    def __init__(self, owner: nn.Module | None) -> None:
        self.owner = owner
        self.lists: list[list[ast.stmt]] = [[]]
        self.bases: dict[str, str] = {}
        self.soft: set[str] = set()
        self.temporary: set[str] = set()
        self.pinned: set[str] = set()
        self.silent = 0
        self.optional = False

    def fresh(self, base: str) -> str:
        """A new name that will read `base` wherever that is possible."""
        own = f"{base}__{len(self.bases)}"
        self.bases[own] = base
        return own

    def pin(self, base: str) -> str:
        """A new name that may be assigned more than once."""
        own = self.fresh(base)
        self.pinned.add(own)
        return own

    def emit(self, statement: ast.stmt, place: int | None = None) -> None:
        """Adds a statement, by default as the last. Raises NotInline inside an expression that is not always
        evaluated."""
        if self.silent:
            raise NotInline
        self.lists[-1].insert(len(self.lists[-1]) if place is None else place, statement)

    def assign(self, base: str, value: ast.expr, *, soft: bool, place: int | None = None) -> ast.Name:
        """Adds an assignment to a new name."""
        own = self.fresh(base)
        if soft:
            self.soft.add(own)
        self.emit(ast.Assign([ast.Name(own, ast.Store())], value), place)
        return load(own)

    @contextmanager
    def nested(self) -> Iterator[list[ast.stmt]]:
        """Collects statements into a list of their own."""
        self.lists.append([])
        try:
            yield self.lists[-1]
        finally:
            self.lists.pop()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Allows expressions alone."""
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1

    def path(self, module: nn.Module) -> ast.expr:
        """How a method reaches a module. Raises Unexportable."""
        if self.owner is None:
            raise Unexportable(f"a {type(module).__name__} takes part in a function, which has no modules")
        if id(module) not in self._paths:
            raise Unexportable(f"a {type(module).__name__} takes part in a module that it is no part of")
        return from_self(filter(None, self._paths[id(module)].split(".")))

    @cached_property
    def _paths(self) -> dict[int, str]:
        assert self.owner is not None
        return {id(module): path for path, module in self.owner.named_modules()}
