"""The norm of each head by torch's own functions, then the gate elementwise."""

from torch import Tensor

from archlab.kernels.activations import Activation
from archlab.kernels.add_norm.reference import Kind
from archlab.kernels.gate.reference import Combine
from archlab.kernels.gate.torch_ops import gate
from archlab.kernels.layer_norm.torch_ops import layer_norm
from archlab.kernels.rms_norm.torch_ops import rms_norm


def norm_gate(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: Kind,
    activation: str | Activation,
    combine: Combine,
) -> Tensor:
    """(norm(x) weight + bias) act(g), or plus act(g), for x `[B, T, H, D]`; the result has x's dtype."""
    normed = rms_norm(x, None, eps) if kind == "rms" else layer_norm(x, None, None, eps)
    if weight is not None:
        normed = normed * weight.to(x.dtype)
    return gate(normed if bias is None else normed + bias.to(x.dtype), g, activation, combine)
