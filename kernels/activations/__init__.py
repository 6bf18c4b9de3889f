"""The named activations: pure torch functions of one tensor, differentiable, for any floating dtype."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def ns_sigmoid(x: Tensor) -> Tensor:
    """0.5 + 0.5 sigmoid(x): the non-sparse sigmoid of Gated Attention (arXiv:2505.06708), between 0.5 and 1."""
    return 0.5 + 0.5 * torch.sigmoid(x)


def identity(x: Tensor) -> Tensor:
    """x itself, for gates without a non-linearity."""
    return x


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2: Primer (arXiv:2109.08668)."""
    return torch.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (arXiv:1606.08415), as GPT-2 and Gemma use it."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Activation] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "ns_sigmoid": ns_sigmoid,
    "identity": identity,
    "relu": torch.relu,
    "relu2": relu2,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
}


def activation_of(activation: str | Activation) -> Activation:
    """The function of that name; a function is returned as it is. Raises ValueError for an unknown name."""
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)} or a function; received {activation!r}")
    return ACTIVATIONS[activation]


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32 if its dtype is narrower, x itself otherwise."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
