"""The norm of each head and the gate on it by their formulas, in at least float32."""

from torch import Tensor

from archlab.kernels.activations import Activation, activation_of, at_least_float32
from archlab.kernels.gate.reference import Combine
from archlab.kernels.norms.reference import Kind, layer_norm, rms_norm


def norm_gate(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: Kind,
    activation: str | Activation, combine: Combine,
) -> Tensor:  # fmt: skip
    """(norm(x) weight + bias) act(g), or plus act(g), for x `[B, T, H, D]`; the result has x's dtype.

    weight and bias are `[D]`, or `[H, D]` for heads with their own; g is `[B, T, H, D]` or `[B, T, H, 1]`. What follows
    retention (arXiv:2307.08621 eq. 8: groupnorm, then silu of a gate) and forget-gate attention (arXiv:2503.02130,
    section 4).
    """
    wide = at_least_float32(x)
    normed = rms_norm(wide, None, eps) if kind == "rms" else layer_norm(wide, None, None, eps)
    if weight is not None:
        normed = normed * at_least_float32(weight)
    if bias is not None:
        normed = normed + at_least_float32(bias)
    opened = activation_of(activation)(at_least_float32(g))
    return (normed * opened if combine == "multiply" else normed + opened).to(x.dtype)
