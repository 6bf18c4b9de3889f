"""Rotation of queries or keys in the dtype of its input, after torch's own norm."""

from torch import Tensor

from archlab.kernels.rms_norm.torch_ops import rms_norm
from archlab.kernels.rotary.reference import Pairs, turned


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """x `[B, T, H, D]`, normed where there is an `eps`, turned by cos and sin `[T, R / 2]`; in the dtype of x."""
    normed = x if eps is None else rms_norm(x, weight, eps)
    return turned(normed, cos.to(x.dtype), sin.to(x.dtype), pairs)
