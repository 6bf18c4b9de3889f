"""The sum of stream and update and its norm by torch's own functions: two passes."""

import torch
from torch import Tensor

from archlab.kernels.add_norm.reference import Kind
from archlab.kernels.layer_norm.torch_ops import layer_norm
from archlab.kernels.rms_norm.torch_ops import rms_norm


def add_norm(
    stream: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: Kind, scale: float
) -> tuple[Tensor, Tensor]:
    """s = scale stream + update `[..., D]`, and norm(s) weight + bias, in the wider dtype of the two terms."""
    total = torch.add(update, stream, alpha=scale)
    if kind == "layer":
        return total, layer_norm(total, weight, bias, eps)
    normed = rms_norm(total, weight, eps)
    return total, normed if bias is None else normed + bias.to(normed.dtype)
