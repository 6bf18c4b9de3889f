"""rotary: queries or keys turned by their positions, with the norm of each head before that in the same pass."""

from typing import Any

import torch
from torch import Tensor

from archlab.kernels.launch import in_triton, unsupported
from archlab.kernels.norms import rms_norm
from archlab.kernels.op import Ask, Case, Implementation, Op, nbytes
from archlab.kernels.rotary import reference
from archlab.kernels.rotary.reference import Pairs, turned


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """x `[B, T, H, D]`, normed where there is an `eps`, turned by cos and sin `[T, R / 2]` or, with `rows`,
    `[B, T, R / 2]`; in the dtype of x."""
    normed = x if eps is None else rms_norm(x, weight, eps)
    return turned(normed, cos.to(x.dtype), sin.to(x.dtype), pairs)


def _ask(pairs: Pairs, cos: Tensor, weight: Tensor | None = None, eps: float | None = None, **_: Any) -> dict[str, Any]:
    norm = "none" if eps is None else "plain" if weight is None else "weight"
    return {"pairs": pairs, "norm": norm, "rows": cos.ndim == 3}


def _cannot_in_triton(ask: Ask) -> str | None:
    return "has one table for all rows" if ask.options["rows"] else unsupported(ask)


def _flops(x: Tensor, cos: Tensor, weight: Tensor | None = None, eps: float | None = None, **_: Any) -> int:
    """Four products and two sums for each pair that is turned, and what the norm needs."""
    turned = 3 * x.numel() // x.shape[-1] * 2 * cos.shape[-1]
    return turned + (0 if eps is None else (3 + (weight is not None)) * x.numel())


def _case(name: str, shape: tuple[int, ...], turned: int, pairs: Pairs, norm: str = "none", rows: bool = False) -> Case:
    angles = torch.arange(shape[1])[:, None] * 100.0 ** (-torch.arange(turned // 2) / (turned // 2))
    if rows:
        angles = angles * torch.arange(1, shape[0] + 1)[:, None, None]
    arguments = {"cos": angles.cos(), "sin": angles.sin(), "pairs": pairs}
    if norm == "weight":
        return Case(name, {"x": shape, "weight": shape[-1:]}, {**arguments, "eps": 1e-6})
    return Case(name, {"x": shape}, {**arguments, "weight": None, "eps": 1e-3 if norm == "plain" else None})


ROTARY = Op(
    name="rotary",
    reference=reference.rotary,
    implementations={
        "triton": in_triton("rotary", "norm and rotation in one pass", _cannot_in_triton),
        "torch": Implementation("torch", lambda: rotary, "elementwise torch, in the dtype of its input"),
    },
    cases=(
        _case("turned", (2, 5, 3, 16), 16, "half"),
        _case("turned_interleaved", (2, 5, 3, 16), 16, "interleaved"),
        _case("turned_partly", (2, 7, 3, 24), 12, "half"),
        _case("turned_partly_interleaved", (1, 7, 2, 20), 6, "interleaved"),
        _case("turned_length_1", (2, 1, 1, 8), 8, "half"),
        _case("turned_normed", (2, 5, 3, 16), 16, "half", "weight"),
        _case("turned_normed_plain", (2, 5, 3, 16), 16, "interleaved", "plain"),
        _case("turned_normed_partly", (1, 37, 2, 24), 12, "half", "weight"),
        _case("turned_normed_interleaved", (2, 9, 2, 20), 6, "interleaved", "weight"),
        _case("turned_by_rows", (2, 5, 3, 16), 12, "half", rows=True),
        _case("turned_by_rows_normed", (3, 5, 2, 16), 16, "interleaved", "weight", rows=True),
    ),
    options={"pairs": ("half", "interleaved"), "norm": ("none", "plain", "weight"), "rows": (False, True)},
    ask=_ask,
    flops=_flops,
    bytes=lambda x, cos, sin, weight=None, **_: nbytes(x, x, cos, sin, weight),
)
