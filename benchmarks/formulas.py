"""The formulas of the ops as rivals, compiled; those that go token by token in stretches, which a compiler unrolls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from archlab.kernels import OPS, Op

STRETCH = 16  # tokens that are compiled as one graph; 512 would take half an hour
SEQUENTIAL = ("linear_recurrence", "selective_scan", "wkv4", "wkv7", "slstm")


def compiled(op: Op) -> Callable[..., Any]:
    """`torch.compile` of an op's formula."""
    if op.name in SEQUENTIAL:
        return in_stretches(op)
    return torch.compile(op.reference, dynamic=False)


def in_stretches(op: Op) -> Callable[..., Any]:
    """The formula of a recurrence compiled for `STRETCH` tokens and called for one stretch after another, each with
    the state that the last one left: the same numbers as of the loop over all tokens. The first stretch, which begins
    with no state and would be compiled anew, stays eager."""
    one = torch.compile(op.reference, dynamic=False)
    parameters = inspect.signature(op.reference)

    @torch.compiler.disable(recursive=False)
    def whole(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        arguments = parameters.bind(*given, **named).arguments
        length = next(iter(arguments.values())).shape[1]
        timed = [name for name, x in arguments.items() if name != "state" and _has_time(x, length)]
        outputs = []
        for start in range(0, length, STRETCH):
            part = {name: arguments[name][:, start : start + STRETCH] for name in timed}
            out, state = (one if start else op.reference)(**{**arguments, **part})
            arguments["state"] = state
            outputs.append(out)
        return torch.cat(outputs, 1), state

    return whole


def _has_time(x: Any, length: int) -> bool:
    return isinstance(x, Tensor) and x.ndim > 2 and x.shape[1] == length


@contextmanager
def recurrences_in_stretches() -> Iterator[None]:
    """Models that are built meanwhile of the formulas have their recurrences compiled in stretches."""
    before = {name: OPS[name] for name in SEQUENTIAL}
    OPS.update({name: replace(op, reference=in_stretches(op)) for name, op in before.items()})
    try:
        yield
    finally:
        OPS.update(before)
