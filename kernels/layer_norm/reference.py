"""Layer norm by its formula: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, in at least float32."""

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` centred and over its deviation, times weight `[D]`, plus bias `[D]` (arXiv:1607.06450 eq. 3)."""
    wide = at_least_float32(x)
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * at_least_float32(weight)
    return (normed if bias is None else normed + at_least_float32(bias)).to(x.dtype)
