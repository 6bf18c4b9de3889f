"""RMSNorm by its formula: x / sqrt(mean(x^2) + eps) * weight, in at least float32."""

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` over the root of its mean square, times weight `[D]` (arXiv:1910.07467 eq. 4); x's dtype."""
    wide = at_least_float32(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * at_least_float32(weight)).to(x.dtype)
