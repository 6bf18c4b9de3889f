"""The gate and the gated linear unit's product by their formulas, in at least float32."""

from typing import Literal

from torch import Tensor

from archlab.kernels.activations import Activation, activation_of, at_least_float32

Combine = Literal["multiply", "add"]


def gate(y: Tensor, g: Tensor, activation: str | Activation, combine: Combine) -> Tensor:
    """y `[..., D]` gated by g, which broadcasts against y; the result has y's dtype.

    Gated Attention (arXiv:2505.06708), eq. 5 with `multiply` and its additive form with `add`.
    """
    wide, opened = at_least_float32(y), activation_of(activation)(at_least_float32(g))
    return (wide * opened if combine == "multiply" else wide + opened).to(y.dtype)


def glu(a: Tensor, b: Tensor, activation: str | Activation) -> Tensor:
    """act(a) * b for a and b of one shape `[..., D]`; the result has a's dtype (arXiv:2002.05202)."""
    return (activation_of(activation)(at_least_float32(a)) * at_least_float32(b)).to(a.dtype)
