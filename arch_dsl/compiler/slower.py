"""Warnings of models that compute more slowly than the device could."""

from __future__ import annotations

import warnings

import torch

from archlab.arch_dsl.parts.context import NodeChoice

_WARNED: set[str] = set()  # what this process has warned of


class SlowerKernel(UserWarning):
    """A node of a model is computed in a slower way than its op has for the device."""


def fallbacks(choices: list[NodeChoice]) -> dict[str, NodeChoice]:
    """By op, the first node that fell back from what its op has for the device."""
    return {choice.op: choice for choice in reversed(choices) if choice.fallback}


def warn_of_fallbacks(choices: list[NodeChoice]) -> None:
    """Once for each op in a process; the warning names the caller of `compile`."""
    for op, choice in fallbacks(choices).items():
        if op not in _WARNED:
            _WARNED.add(op)
            message = f"{op} at {choice.path} is computed by {choice.implementation}: {choice.reason}"
            warnings.warn(message, SlowerKernel, stacklevel=3)


def warn_of_move(built_for: str, now: torch.device) -> None:
    """Once in a process, that a model computes on a GPU with what was chosen for the CPU."""
    if built_for == "cpu" and now.type == "cuda" and "moved" not in _WARNED:
        _WARNED.add("moved")
        message = "this model was compiled for the CPU and computes slowly on a GPU: say compile(..., device='cuda')"
        warnings.warn(message, SlowerKernel, stacklevel=4)
