"""Schedule-free AdamW: gradients are taken at one point, another is evaluated. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class ScheduleFreeUpdate(torch.optim.Optimizer):
    """Schedule-free AdamW (arXiv:2405.15682, algorithm 1). The parameters are y; z is kept, and x follows from both."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.betas, self.eps = betas, eps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update(self, y: Tensor, grad: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[y]
        if not state:
            state.update(step=0, weights=0.0, z=y.clone(), square=torch.zeros_like(y))
        first, second = self.betas
        step = state["step"] = state["step"] + 1
        z, square = state["z"], state["square"]
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        rate = lr * (1 - second**step) ** 0.5
        state["weights"] += rate**2
        share = rate**2 / state["weights"]
        move = (grad / square.sqrt().add_(self.eps)).add_(y, alpha=weight_decay).mul_(rate)
        y.lerp_(z, share).sub_(move, alpha=1 - first * (1 - share))  # (1 - b1) z + b1 x, of the new z and x
        z.sub_(move)

    @torch.no_grad()
    def settle(self) -> None:
        """Leaves x in the parameters, for good."""
        for parameter, state in self.state.items():
            if "z" in state:
                ahead = 1 / self.betas[0] - 1
                parameter.add_(parameter - state["z"], alpha=ahead)
        self.state.clear()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Meanwhile x is in the parameters; afterwards they have the bits that they had."""
        state = self.state.copy()
        before = {parameter: parameter.detach().clone() for parameter in state}
        self.settle()
        try:
            yield
        finally:
            self.state.update(state)
            with torch.no_grad():
                for parameter, value in before.items():
                    parameter.copy_(value)


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[bool]:
    """Meanwhile the parameters are those to evaluate; whether these differ from those that are trained."""
    if not isinstance(optimizer, ScheduleFreeUpdate) or not optimizer.state:
        yield False
        return
    with optimizer.settled():
        yield True


def average(optimizer: torch.optim.Optimizer) -> None:
    """Leaves the parameters that are evaluated, at the end of training."""
    if isinstance(optimizer, ScheduleFreeUpdate):
        optimizer.settle()
