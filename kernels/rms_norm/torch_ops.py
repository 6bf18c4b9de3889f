"""RMSNorm by torch's own function."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` over the root of its mean square, times weight `[D]`; the result has x's dtype."""
    cast = None if weight is None else weight.to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), cast, eps)
