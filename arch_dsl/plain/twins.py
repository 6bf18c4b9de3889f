"""Which layers of a model are equal, so that one is read for all."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from archlab import kernels
from archlab.arch_dsl.language.spec import Spec
from archlab.arch_dsl.plain.trace import Recorder, drawn
from archlab.arch_dsl.plain.trees import text

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
        tuple((key, _of_parameter(value)) for key, value in module._parameters.items()),
        tuple(
            (key, None if value is None else text(recorder.expression(value))) for key, value in module._buffers.items()
        ),
        tuple((key, None if child is None else _likeness(child, recorder)) for key, child in module._modules.items()),
    )


def _of_parameter(value: nn.Parameter | None) -> Any:
    return None if value is None else (tuple(value.shape), repr(drawn(value)))


def _of_value(value: Any) -> Any:
    if value is None or isinstance(
        value, str | int | float | bool | tuple | torch.dtype | Spec | kernels.attention.Pattern
    ):
        return repr(value)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, Spec):
        return value.__func__, repr(value.__self__)
    return getattr(value, "formula", None) or id(value)
