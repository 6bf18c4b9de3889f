"""Layer norm by torch's own function."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` centred and over its deviation, times weight `[D]`, plus bias `[D]`; the result has x's dtype."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
