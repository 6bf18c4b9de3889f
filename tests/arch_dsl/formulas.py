"""The papers' formulas written out with loops and elementary functions: what primitives are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "tanh": lambda x: 2 * sigmoid(2 * x) - 1,
    "ns_sigmoid": lambda x: 0.5 + 0.5 * sigmoid(x),
    "identity": lambda x: x,
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x * x * (x > 0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """arXiv:1910.07467, eq. 4."""
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: Tensor, theta: float, dims: int, first: int = 0) -> Tensor:
    """x `[batch, time, heads, head_dim]`: channels (i, i + dims/2) turned as a complex number by t theta^(-2i/dims)."""
    half = dims // 2
    turned = x.clone()
    for t in range(x.shape[1]):
        for i in range(half):
            pair = torch.complex(x[:, t, :, i], x[:, t, :, i + half])
            angle = (t + first) * theta ** (-2 * i / dims)
            pair = pair * complex(math.cos(angle), math.sin(angle))
            turned[:, t, :, i], turned[:, t, :, i + half] = pair.real, pair.imag
    return turned


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Callable[[int, int], bool] = lambda i, j: j <= i,
    bias: Callable[[int, int, int], float] = lambda head, i, j: 0.0,
) -> Tensor:
    """q `[batch, time, heads, head_dim]`, k and v with fewer heads: each query over the keys that it may see."""
    batch, time, heads, head_dim = q.shape
    group = heads // k.shape[2]
    out = torch.zeros(batch, time, heads, v.shape[-1], dtype=q.dtype)
    for head in range(heads):
        keys, values = k[:, :, head // group], v[:, :, head // group]
        for i in range(time):
            seen = [j for j in range(time) if visible(i, j)]
            added = torch.tensor([bias(head, i, j) for j in seen], dtype=q.dtype)
            weights = ((keys[:, seen] @ q[:, i, head, :, None])[..., 0] / math.sqrt(head_dim) + added).exp()
            weights = weights / weights.sum(-1, keepdim=True)
            out[:, i, head] = (weights[..., None] * values[:, seen]).sum(1)
    return out
