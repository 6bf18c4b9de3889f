"""Mistakes that a card would refuse, put into a model on purpose: the looking must find them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def _wrapped(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Has what the first norm gives changed."""
    model.get_submodule("block.0.attention.pre").register_forward_hook(lambda module, given, out: change(out))


def buffer(model: nn.Module) -> None:
    """A tensor that no module knows of stays on the CPU."""
    left = torch.ones(64)
    _wrapped(model, lambda x: x + left[: x.shape[-1]])


def waiting(model: nn.Module) -> None:
    """A number is asked for in the middle of a step."""
    _wrapped(model, lambda x: x * (1.0 if x.sum().item() > 0 else 2.0))


def dtype(model: nn.Module) -> None:
    """A product of two precisions, beside autocast."""

    def change(x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return x + x.half() @ x.new_ones(x.shape[-1], x.shape[-1])

    _wrapped(model, change)


PLANTED: dict[str, Callable[[nn.Module], None]] = {
    "": lambda model: None, "buffer": buffer, "waiting": waiting, "dtype": dtype,
}  # fmt: skip
