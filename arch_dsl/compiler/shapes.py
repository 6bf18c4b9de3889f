"""The parameters of a model and their shapes, without their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from archlab.arch_dsl.compiler.modules import build, stored
from archlab.arch_dsl.model.model import Model

Shapes = Mapping[str, Sequence[int]]


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Every parameter of a resolved model with its shape; nothing is allocated."""
    return {name: tuple(value.shape) for name, value in unallocated(model)}


def stored_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """What a checkpoint of a resolved model holds, with its shapes: parameters, and state without a gradient."""
    with torch.device("meta"):
        module = build(model, model.context(backend="reference"))
    return {name: tuple(value.shape) for name, value in stored(module).items()}


def unallocated(model: Model) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a resolved model by their names, without memory."""
    with torch.device("meta"):
        module = build(model, model.context(backend="reference"))
    return module.named_parameters()
