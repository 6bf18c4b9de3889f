"""What is written so far: the functions of the file, and the methods of each of its classes."""

from __future__ import annotations

import ast
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from archlab import kernels
from archlab.arch_dsl.language.spec import Spec
from archlab.arch_dsl.plain.trace import Recorder, drawn
from archlab.arch_dsl.plain.trees import numbered, text


@dataclass
class Written:
    """A function with what is known of its arguments worked in: `parameters` are those that are left."""

    node: ast.FunctionDef
    parameters: list[str]
    optional: bool
    signature: str = ""  # of a method: what it was written for


Names = tuple[dict[int, set[str]], ...]  # of methods, by the id of their module


class Program:
    """`entries` are the methods that others call and `helpers` those that these call, by the id of their module.

    `twins` maps a part of a layer to that of the first layer equal to it, for which alone methods are written.
    """

    def __init__(self, twins: Mapping[int, nn.Module]) -> None:
        self.functions: dict[str, ast.FunctionDef] = {}
        self.entries: defaultdict[int, dict[str, Written]] = defaultdict(dict)
        self.helpers: defaultdict[int, dict[str, ast.FunctionDef]] = defaultdict(dict)
        self._twins = twins
        self._names: dict[str, str] = {}

    def written(self) -> Names:
        """The methods that are there by now."""
        return tuple({owner: set(methods) for owner, methods in held.items()} for held in self._held())

    def take_back(self, written: Names) -> None:
        """Leaves the methods that were there then."""
        for held, before in zip(self._held(), written, strict=True):
            for owner, methods in held.items():  # which others hold
                for name in methods.keys() - before.get(owner, set()):
                    del methods[name]

    def _held(self) -> tuple[defaultdict[int, dict[str, Any]], ...]:
        return self.entries, self.helpers

    def twin(self, module: nn.Module) -> nn.Module:
        """The module whose methods stand for those of this one."""
        return self._twins.get(id(module), module)

    def add(self, node: ast.FunctionDef) -> str:
        """The name that a function has in the file; equal functions are one."""
        key = text(node)
        if key not in self._names:
            names = numbered(node.name.lstrip("_"))
            self._names[key] = node.name = next(item for item in names if item not in self.functions)
            self.functions[node.name] = node
        return self._names[key]

    def methods(self, module: nn.Module) -> list[ast.FunctionDef]:
        """The methods of a module's class."""
        owner = id(self.twin(module))
        entries = self.entries.get(owner, {}).values()
        return [*self.helpers.get(owner, {}).values(), *(entry.node for entry in entries)]

    def nodes(self) -> Iterator[ast.FunctionDef]:
        """All functions and methods."""
        yield from self.functions.values()
        for entries in self.entries.values():
            yield from (entry.node for entry in entries.values())
        for helpers in self.helpers.values():
            yield from helpers.values()


# Which layers are equal, so that one is read for all

_OF_TORCH = set(vars(nn.Module()))


def twins(layers: Iterable[nn.Module], recorder: Recorder) -> dict[int, nn.Module]:
    """The id of every part of every layer, with the part of the first equal layer at the same path."""
    first: dict[Any, nn.Module] = {}
    found: dict[int, nn.Module] = {}
    for layer in layers:
        twin = first.setdefault(_likeness(layer, recorder), layer)
        for path, module in layer.named_modules():
            found.setdefault(id(module), twin.get_submodule(path))
    return found


def _likeness(module: nn.Module, recorder: Recorder) -> Any:
    """Equal for modules that compute alike."""
    own = {key: value for key, value in vars(module).items() if key not in (*_OF_TORCH, "path")}
    return (
        type(module),
        tuple((key, _of_value(value)) for key, value in sorted(own.items())),
        _by_name(module._parameters, lambda value: (tuple(value.shape), repr(drawn(value)))),
        _by_name(module._buffers, lambda value: text(recorder.expression(value))),
        _by_name(module._modules, lambda child: _likeness(child, recorder)),
    )


def _by_name(parts: Mapping[str, Any], likeness: Callable[[Any], Any]) -> Any:
    return tuple((key, None if part is None else likeness(part)) for key, part in parts.items())


def _of_value(value: Any) -> Any:
    if value is None or isinstance(
        value, str | int | float | bool | tuple | torch.dtype | Spec | kernels.attention.Pattern
    ):
        return repr(value)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, Spec):
        return value.__func__, repr(value.__self__)
    return getattr(value, "formula", None) or id(value)
