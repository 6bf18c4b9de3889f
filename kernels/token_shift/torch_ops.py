"""Token shift in the dtype of its input: one step back, then torch's own interpolation."""

import torch
from torch import Tensor

from archlab.kernels.token_shift.reference import before


def token_shift(x: Tensor, mix: Tensor, starts: Tensor | None = None) -> Tensor:
    """mix x_t + (1 - mix) x_(t-1) for x `[B, T, D]` and mix `[D]`, x_(t-1) zero where `starts` `[B, T]` is not 0."""
    return torch.lerp(before(x, starts), x, mix.to(x.dtype))
