"""The gated linear unit's product by its formula: act(a) * b, in at least float32."""

from torch import Tensor

from archlab.kernels.activations import Activation, activation_of, at_least_float32


def glu(a: Tensor, b: Tensor, activation: str | Activation) -> Tensor:
    """act(a) * b for a and b of one shape `[..., D]`; the result has a's dtype (arXiv:2002.05202)."""
    return (activation_of(activation)(at_least_float32(a)) * at_least_float32(b)).to(a.dtype)
