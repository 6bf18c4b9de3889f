"""The norms by their formulas, in at least float32."""

from typing import Literal

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32

Kind = Literal["rms", "layer"]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` over the root of its mean square, times weight `[D]` (arXiv:1910.07467 eq. 4); x's dtype."""
    wide = at_least_float32(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * at_least_float32(weight)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` centred and over its deviation, times weight `[D]`, plus bias `[D]` (arXiv:1607.06450 eq. 3)."""
    wide = at_least_float32(x)
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * at_least_float32(weight)
    return (normed if bias is None else normed + at_least_float32(bias)).to(x.dtype)


def add_norm(
    stream: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: Kind, scale: float
) -> tuple[Tensor, Tensor]:
    """s = scale stream + update, all `[..., D]`, and norm(s) weight + bias, in the wider dtype of the two terms.

    The residual sum before a norm: after a branch and before the next (arXiv:2002.04745, figure 1b), or where the norm
    is the stream itself (figure 1a; with a scale DeepNorm, arXiv:2203.00555, figure 2).
    """
    wide = scale * at_least_float32(stream) + at_least_float32(update)
    normed = rms_norm(wide, weight, eps) if kind == "rms" else layer_norm(wide, weight, bias, eps)
    if kind == "rms" and bias is not None:
        normed = normed + at_least_float32(bias)
    dtype = torch.promote_types(stream.dtype, update.dtype)
    return wide.to(dtype), normed.to(dtype)
