"""Modules of transformers whose functions a test replaces: by torch's form of them, or by one whose epsilon shows."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import nn

GATED_DELTA = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def modeling(name: str) -> ModuleType:
    """The module of a model of transformers."""
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def by_torch(theirs: ModuleType, *rules: str) -> None:
    """Has a module compute some functions by torch, and not by kernels of a GPU that are installed."""
    for rule in rules:
        setattr(theirs, rule, inspect.unwrap(getattr(theirs, rule)))


def as_buffers(theirs: nn.Module, name: str) -> nn.Module:
    """Makes buffers of all parameters of a name that no gradient reaches, as other models hold them."""
    for part in theirs.modules():
        if name in part._parameters:
            part.register_buffer(name, part._parameters.pop(name).data)  # type: ignore[union-attr]
    return theirs


@contextmanager
def put_back(*names: str) -> Iterator[None]:
    """Undoes, after the block, whatever was replaced in the modules of these models, for the tests of other files."""
    kept = [(theirs := modeling(name), dict(vars(theirs))) for name in names]
    yield
    for theirs, functions in kept:
        vars(theirs).update(functions)
