"""The gated linear unit's product in the dtype of its inputs."""

from torch import Tensor

from archlab.kernels.activations import Activation, activation_of


def glu(a: Tensor, b: Tensor, activation: str | Activation) -> Tensor:
    """act(a) * b for a and b of one shape `[..., D]`; the result has a's dtype."""
    return (activation_of(activation)(a) * b).to(a.dtype)
