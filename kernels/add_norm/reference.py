"""The sum of stream and update and its norm, by their formulas, in at least float32."""

from typing import Literal

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.layer_norm.reference import layer_norm
from archlab.kernels.rms_norm.reference import rms_norm

Kind = Literal["rms", "layer"]


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
