"""What gradients of operators share: how they are registered, where they are written, their dtypes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def float32_of(x: Tensor | None, beside: Tensor) -> Tensor:
    """Uninitialised memory of x's shape in float32, for the gradient of x; empty where there is no x."""
    return beside.new_empty(0 if x is None else x.shape, dtype=torch.float32)


def gradient_of(x: Tensor | None, found: Tensor) -> Tensor | None:
    """The gradient of x in its dtype; None where there is no x."""
    return None if x is None else found.to(x.dtype)


def differentiable(operator: Any, backward: Callable[..., Any], tensors: int, kept: slice = slice(0)) -> None:
    """Gives an operator its gradients: `backward` takes those of its outputs, its first `tensors` arguments, the
    outputs that are `kept` for it, and its other arguments. It gives the gradients of the first arguments, or of some
    of them; what it gives for one that is None does not matter."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*inputs[:tensors], *outputs[kept])
        ctx.rest = inputs[tensors:]

    def differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # which checkpoints unpack once
        found = backward(*gradients, *saved, *ctx.rest)
        given = [gradient_of(x, dx) for x, dx in zip(saved[:tensors], found, strict=False)]
        return (*given, *[None] * (tensors + len(ctx.rest) - len(given)))

    operator.register_autograd(differentiate, setup_context=save)
