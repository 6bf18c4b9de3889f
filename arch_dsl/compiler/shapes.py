"""The parameters of a model and their shapes, without their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from archlab.arch_dsl.compiler.modules import build
from archlab.arch_dsl.model.model import Model

Shapes = Mapping[str, Sequence[int]]


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Every parameter of a resolved model with its shape; nothing is allocated."""
    with torch.device("meta"):
        module = build(model, model.context(backend="reference"))
    return {name: tuple(value.shape) for name, value in module.named_parameters()}
