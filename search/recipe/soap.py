"""SOAP: Adam in the eigenbasis of Shampoo. The first eigenvectors wait for the device, no later step does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SIDES = "left", "right"


class SOAPUpdate(torch.optim.Optimizer):
    """SOAP (arXiv:2409.11321, algorithm 3) on matrices, with bias correction, as the authors' own.

    Of each side that is `rotated` it keeps the running mean of g g^T or g^T g, and its eigenvectors as columns, that of
    the largest eigenvalue first. v is kept in the eigenbasis, the mean of g outside of it.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        frequency: int,
        rotated: Callable[[int, int], tuple[int, int]],
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.betas, self.eps, self.frequency, self.rotated = betas, eps, frequency, rotated

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if state:
                    self._update(parameter, parameter.grad, state, group["lr"], group["weight_decay"])
                else:
                    self._begin(parameter, parameter.grad, state)

    def _begin(self, parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        state["step"] = 0
        state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        for side, size in zip(SIDES, self.rotated(*parameter.shape), strict=True):
            if size:
                state[side] = torch.zeros(size, size, dtype=grad.dtype, device=grad.device)
        self._look(grad, state)
        for side in SIDES:
            if side in state:  # of numbers, so that a gradient that is not finite ends as a diverged trial
                found = torch.linalg.eigh(torch.nan_to_num(state[side], 0.0, 0.0, 0.0))[1]
                state[f"{side}_basis"] = found.flip(1).contiguous()

    def _update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], lr: float, weight_decay: float) -> None:
        first, second = self.betas
        step = state["step"] = state["step"] + 1
        turned = _turned(grad, state)
        state["square"].mul_(second).addcmul_(turned, turned, value=1 - second)
        mean = state["mean"].lerp_(grad, 1 - first)
        size = (state["square"] / (1 - second**step)).sqrt_().add_(self.eps)
        update = _turned(_turned(mean, state).div_(size), state, back=True)
        parameter.mul_(1 - lr * weight_decay).sub_(update, alpha=lr / (1 - first**step))
        self._look(grad, state)
        if step % self.frequency == 0:
            for dimension, side in enumerate(SIDES):
                if side in state:
                    _follow(state, side, dimension)

    def _look(self, grad: Tensor, state: dict[str, Any]) -> None:
        """Has the running means of g g^T and g^T g see a gradient."""
        for side, other in zip(SIDES, (grad, grad.T), strict=True):
            if side in state:
                state[side].lerp_(other @ other.T, 1 - self.betas[1])


def _turned(x: Tensor, state: dict[str, Any], back: bool = False) -> Tensor:
    """Q_L^T x Q_R, or `back` Q_L x Q_R^T; a side that is not rotated stays."""
    left, right = (state.get(f"{side}_basis") for side in SIDES)
    if left is not None:
        x = (left if back else left.T) @ x
    if right is not None:
        x = x @ (right.T if back else right)
    return x


def _follow(state: dict[str, Any], side: str, dimension: int) -> None:
    """One step of the power iteration that the eigenvectors follow (algorithm 4), the largest eigenvalue first."""
    basis = state[f"{side}_basis"]
    product = state[side] @ basis
    order = (basis * product).sum(0).argsort(descending=True, stable=True)
    state["square"] = state["square"].index_select(dimension, order)
    state[f"{side}_basis"] = torch.linalg.qr(product[:, order])[0]
