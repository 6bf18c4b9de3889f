"""Rotation of queries or keys by their positions, with the norm before it, by the formulas, in at least float32."""

from typing import Literal

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.norms.reference import rms_norm

Pairs = Literal["half", "interleaved"]


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """(a, b) -> (a cos - b sin, a sin + b cos) for x `[B, T, H, D]` and cos, sin `[T, R / 2]` or, with `rows`,
    `[B, T, R / 2]`, in the dtype of x.

    RoPE (arXiv:2104.09864 eq. 34) of the first R channels; a is channel i and b channel i + R / 2, or with
    `interleaved` channels 2i and 2i + 1. With `eps` each head is normed before, x / sqrt(mean(x^2) + eps) * weight
    `[D]`. cos and sin have no gradient.
    """
    wide = at_least_float32(x) if eps is None else rms_norm(at_least_float32(x), weight, eps)
    return turned(wide, at_least_float32(cos), at_least_float32(sin), pairs).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """The rotation alone, in the dtype that x, cos and sin have together."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    size = cos.shape[-1]
    if pairs == "half":
        a, b, rest = x.split([size, size, x.shape[-1] - 2 * size], dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)
    both, rest = x.split([2 * size, x.shape[-1] - 2 * size], dim=-1)
    a, b = both.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2), rest], dim=-1)
