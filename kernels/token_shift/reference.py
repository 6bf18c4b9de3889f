"""Token shift by its formula, in at least float32."""

import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.activations import at_least_float32


def token_shift(x: Tensor, mix: Tensor, starts: Tensor | None = None) -> Tensor:
    """mix x_t + (1 - mix) x_(t-1) for x `[B, T, D]` and mix `[D]`; the result has x's dtype.

    The time shift of RWKV (arXiv:2305.13048 eq. 11 to 13). x_(t-1) is zero at the first token, and where `starts`
    `[B, T]` is not 0.
    """
    wide, share = at_least_float32(x), at_least_float32(mix)
    return (share * wide + (1 - share) * before(wide, starts)).to(x.dtype)


def before(x: Tensor, starts: Tensor | None) -> Tensor:
    """x_(t-1) for each x_t `[B, T, D]`."""
    found = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return found if starts is None else found.masked_fill(starts[..., None] != 0, 0)
