"""The optimizers that torch lacks, and several as one. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class LionUpdate(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675, algorithm 2). One moment per parameter."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], cautious: bool) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.betas, self.cautious = betas, cautious

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        slow, fast = self.betas[1], self.betas[0]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                direction = torch.lerp(parameter.grad, mean, fast).sign_()
                if self.cautious:
                    direction = agreed(direction, parameter.grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                mean.lerp_(parameter.grad, 1 - slow)


class CautiousAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) without what the first moment and the gradient disagree on (arXiv:2411.16085)."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.betas, self.eps = betas, eps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        first, second = self.betas
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
                step = state["step"] = state["step"] + 1
                mean, square = state["mean"].lerp_(grad, 1 - first), state["square"]
                square.mul_(second).addcmul_(grad, grad, value=1 - second)
                size = (square / (1 - second**step)).sqrt_().add_(self.eps)
                update = agreed(mean, grad).div_(size)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(update, alpha=group["lr"] / (1 - first**step))


def agreed(update: Tensor, grad: Tensor) -> Tensor:
    """The update where it has the gradient's sign, times n / (kept + 1); 0 elsewhere."""
    same = update * grad > 0
    return torch.where(same, update * (same.numel() / (same.sum() + 1)), 0.0)


class AdafactorUpdate(torch.optim.Optimizer):
    """Adafactor (arXiv:1804.04235, algorithms 4 and 5), with 1e-30 added to g^2 and 1e-3 below the RMS of weights.

    A parameter of more than two dimensions is a stack of matrices.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        factored: bool,
        decay: float,
        beta1: float,
        threshold: float,
        relative: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.factored, self.decay, self.beta1 = factored, decay, beta1
        self.threshold, self.relative = threshold, relative

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        fresh = state["step"] ** -self.decay  # 1 - beta2 at this step: all of the first gradient
        update = self._scaled(state, parameter.grad, fresh)
        update = update / (_rms(update) / self.threshold).clamp(min=1.0)
        if self.beta1:
            update = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(update, 1 - self.beta1)
        size = _rms(parameter).clamp(min=1e-3) if self.relative else 1.0
        parameter.mul_(1 - lr * weight_decay).sub_(update * size * lr)

    def _scaled(self, state: dict[str, Any], grad: Tensor | None, fresh: float) -> Tensor:
        """g / sqrt(v), with v as it is after this gradient."""
        assert grad is not None
        square = grad.square().add_(1e-30)
        if not self.factored or grad.ndim < 2:
            whole: Tensor = state.setdefault("square", torch.zeros_like(grad)).lerp_(square, fresh)
            return grad * whole.rsqrt()
        rows: Tensor = state.setdefault("rows", torch.zeros_like(square[..., 0])).lerp_(square.mean(-1), fresh)
        columns: Tensor = state.setdefault("columns", torch.zeros_like(square[..., 0, :])).lerp_(square.mean(-2), fresh)
        share = (rows / rows.mean(-1, keepdim=True)).rsqrt()
        return grad * share[..., None] * columns.rsqrt()[..., None, :]


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


class Together(torch.optim.Optimizer):
    """Several optimizers as one: their groups one after another, their states side by side."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([{"params": []}], {})
        self.parts = list(parts)
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
