"""Muon: momentum that is orthogonalised, all matrices of one shape at once. Nothing here waits for the device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5 (Jordan 2024)
MOST = 2**26  # elements that are orthogonalised at once, as their stack is memory of its own


class MuonUpdate(torch.optim.Optimizer):
    """Muon (Jordan 2024) on matrices, with the decoupled weight decay of arXiv:2502.16982, eq. 3.

    It computes what torch.optim.Muon does. That takes matrices one by one, and in bfloat16 on a CPU too, which without
    units for it is ten to twenty times as slow as float32.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, momentum: float, nesterov: bool, ns_steps: int, scaling: str
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.momentum, self.nesterov, self.ns_steps, self.scaling = momentum, nesterov, ns_steps, scaling

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for stack in _stacks(group["params"]):
                self._update(stack, group["lr"], group["weight_decay"])

    def _update(self, parameters: list[Tensor], lr: float, weight_decay: float) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["mean"] = torch.zeros_like(parameter)
        means = [self.state[parameter]["mean"] for parameter in parameters]
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_lerp_(means, grads, 1 - self.momentum)
        updates = torch._foreach_lerp(grads, means, self.momentum) if self.nesterov else means
        found = orthogonalised(torch.stack(list(updates)), self.ns_steps)
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        torch._foreach_add_(parameters, found.unbind(), alpha=-lr * self._size(*parameters[0].shape))

    def _size(self, rows: int, columns: int) -> float:
        if self.scaling == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def _stacks(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Those that have a gradient, by their shape."""
    alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            alike[parameter.shape].append(parameter)
    for shape, found in alike.items():
        count = max(1, MOST // max(1, shape.numel()))
        yield from (found[start : start + count] for start in range(0, len(found), count))


def orthogonalised(x: Tensor, steps: int) -> Tensor:
    """About U V^T of each U S V^T of a stack `[N, rows, columns]`: an odd polynomial draws singular values towards 1.

    On a GPU in bfloat16, as its authors have it.
    """
    first, third, fifth = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=1e-7)
    if x.device.type != "cpu":
        y = y.bfloat16()
    for _ in range(steps):
        square = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(square, square, square, beta=third, alpha=fifth), y, beta=first)
    return (y.mT if tall else y).to(x.dtype)
