"""add_norm: stream + update and the norm of the sum, in one pass; the residual sum between two branches."""

from typing import Any

import torch
from torch import Tensor

from archlab.kernels.add_norm import reference
from archlab.kernels.add_norm.reference import Kind
from archlab.kernels.launch import in_triton
from archlab.kernels.layer_norm import layer_norm
from archlab.kernels.op import Case, Implementation, Op, nbytes
from archlab.kernels.rms_norm import rms_norm


def add_norm(
    stream: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: Kind, scale: float
) -> tuple[Tensor, Tensor]:
    """s = scale stream + update `[..., D]`, and norm(s) weight + bias, in the wider dtype of the two terms."""
    total = torch.add(update, stream, alpha=scale)
    if kind == "layer":
        return total, layer_norm(total, weight, bias, eps)
    normed = rms_norm(total, weight, eps)
    return total, normed if bias is None else normed + bias.to(normed.dtype)


def _flops(stream: Tensor, weight: Tensor | None, bias: Tensor | None, kind: Kind, scale: float, **_: Any) -> int:
    """The sum and what its norm needs: see rms_norm and layer_norm."""
    per_element = 1 + (3 if kind == "rms" else 5) + (weight is not None) + (bias is not None)
    return (per_element + (scale != 1.0)) * stream.numel()


def _bytes(stream: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, **_: Any) -> int:
    """Two are read, two are written in the wider dtype."""
    written = 2 * stream.numel() * max(stream.element_size(), update.element_size())
    return written + nbytes(stream, update, weight, bias)


def _case(name: str, shape: tuple[int, ...], kind: Kind, parts: tuple[str, ...], scale: float = 1.0) -> Case:
    absent = {own: None for own in ("weight", "bias") if own not in parts}
    shapes = {"stream": shape, "update": shape} | dict.fromkeys(parts, shape[-1:])
    return Case(name, shapes, {**absent, "eps": 1e-6, "kind": kind, "scale": scale})


ADD_NORM = Op(
    name="add_norm",
    version=1,
    reference=reference.add_norm,
    implementations={
        "triton": in_triton("add_norm", "sum and norm in one pass"),
        "torch": Implementation("torch", lambda: add_norm, "a sum, then torch's own norm"),
    },
    cases=(
        _case("added", (2, 9, 24), "rms", ("weight",)),
        _case("added_plain", (2, 9, 24), "rms", ()),
        _case("added_biased", (3, 7, 67), "rms", ("weight", "bias")),
        _case("added_layer", (7, 67), "layer", ("weight", "bias")),
        _case("added_layer_no_bias", (2, 9, 24), "layer", ("weight",)),
        _case("added_layer_bare", (5, 40), "layer", ()),
        _case("added_scaled", (2, 9, 24), "layer", ("weight", "bias"), 1.7),
        _case("added_length_1", (1, 1, 24), "rms", ("weight",)),
        _case("added_wide", (3, 1100), "layer", ("bias",), 0.5),
    ),
    options={"kind": ("rms", "layer"), "weight": (True, False), "bias": (False, True)},
    ask=lambda kind, weight, bias, **_: {"kind": kind, "weight": weight is not None, "bias": bias is not None},
    flops=_flops,
    bytes=_bytes,
    tolerances={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},  # torch sums dw in the dtype of w
    wide=(),
)
