"""The norms: rms_norm and layer_norm, and add_norm, which norms the residual sum between two branches in one pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.launch import in_triton
from archlab.kernels.norms import reference
from archlab.kernels.norms.reference import Kind
from archlab.kernels.op import Case, Implementation, Op, nbytes


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` over the root of its mean square, times weight `[D]`; the result has x's dtype."""
    cast = None if weight is None else weight.to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), cast, eps)


def _case(
    name: str, shape: tuple[int, ...], parts: tuple[str, ...], optional: tuple[str, ...] = ("weight", "bias"),
    terms: tuple[str, ...] = ("x",), **arguments: Any,
) -> Case:  # fmt: skip
    """A call with these `parts` of what is `optional`, on the `terms` of a sum."""
    absent = {own: None for own in optional if own not in parts}
    return Case(name, dict.fromkeys(terms, shape) | dict.fromkeys(parts, shape[-1:]), absent | arguments)


RMS_NORM = Op(
    name="rms_norm",
    reference=reference.rms_norm,
    implementations={
        "triton": in_triton("norms.rms_norm", "one pass forward and backward"),
        "torch": Implementation("torch", lambda: rms_norm, "torch.nn.functional.rms_norm"),
    },
    cases=tuple(
        _case(f"{name}{label}", shape, parts, ("weight",), eps=eps)
        for name, shape in (("heads", (2, 5, 3, 24)), ("length_1", (1, 1, 24)), ("odd", (37, 67)), ("wide", (3, 1100)))
        for label, parts, eps in (("", ("weight",), 1e-6), ("_no_weight", (), 1e-3))
    ),
    options={"weight": (True, False)},
    ask=lambda weight, **_: {"weight": weight is not None},
    flops=lambda x, weight, **_: (3 + (weight is not None)) * x.numel(),  # square, add, scale by root and weight
    bytes=lambda x, weight, **_: nbytes(x, x, weight),
)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` centred and over its deviation, times weight `[D]`, plus bias `[D]`; the result has x's dtype."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


LAYER_NORM = Op(
    name="layer_norm",
    reference=reference.layer_norm,
    implementations={
        "triton": in_triton("norms.layer_norm", "one pass forward and backward"),
        "torch": Implementation("torch", lambda: layer_norm, "torch.nn.functional.layer_norm"),
    },
    cases=(
        _case("heads_affine", (2, 5, 3, 24), ("weight", "bias"), eps=1e-5),
        _case("length_1_affine", (1, 1, 24), ("weight", "bias"), eps=1e-5),
        _case("odd_affine", (7, 67), ("weight", "bias"), eps=1e-5),
        _case("odd_no_bias", (7, 67), ("weight",), eps=1e-5),
        _case("odd_bias_alone", (7, 67), ("bias",), eps=1e-5),
        _case("odd_bare", (7, 67), (), eps=1e-3),
        _case("wide_affine", (3, 1100), ("weight", "bias"), eps=1e-5),
        _case("wide_no_bias", (3, 1100), ("weight",), eps=1e-5),
        _case("wide_bias_alone", (3, 1100), ("bias",), eps=1e-5),
        _case("wide_bare", (3, 1100), (), eps=1e-3),
    ),
    options={"weight": (True, False), "bias": (True, False)},
    ask=lambda weight, bias, **_: {"weight": weight is not None, "bias": bias is not None},
    # Mean, centre, square, add, scale by the root; by the weight and plus the bias where they are
    flops=lambda x, weight, bias, **_: (5 + (weight is not None) + (bias is not None)) * x.numel(),
    bytes=lambda x, weight, bias, **_: nbytes(x, x, weight, bias),
    tolerances={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},  # torch sums dw in the dtype of w
)


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


def _added(name: str, shape: tuple[int, ...], kind: Kind, parts: tuple[str, ...], scale: float = 1.0) -> Case:
    return _case(name, shape, parts, terms=("stream", "update"), eps=1e-6, kind=kind, scale=scale)


ADD_NORM = Op(
    name="add_norm",
    reference=reference.add_norm,
    implementations={
        "triton": in_triton("norms.add_norm", "sum and norm in one pass"),
        "torch": Implementation("torch", lambda: add_norm, "a sum, then torch's own norm"),
    },
    cases=(
        _added("added", (2, 9, 24), "rms", ("weight",)),
        _added("added_plain", (2, 9, 24), "rms", ()),
        _added("added_biased", (3, 7, 67), "rms", ("weight", "bias")),
        _added("added_layer", (7, 67), "layer", ("weight", "bias")),
        _added("added_layer_no_bias", (2, 9, 24), "layer", ("weight",)),
        _added("added_layer_bare", (5, 40), "layer", ()),
        _added("added_scaled", (2, 9, 24), "layer", ("weight", "bias"), 1.7),
        _added("added_length_1", (1, 1, 24), "rms", ("weight",)),
        _added("added_wide", (3, 1100), "layer", ("bias",), 0.5),
    ),
    options={"kind": ("rms", "layer"), "weight": (True, False), "bias": (False, True)},
    ask=lambda kind, weight, bias, **_: {"kind": kind, "weight": weight is not None, "bias": bias is not None},
    flops=_flops,
    bytes=_bytes,
    tolerances={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},  # torch sums dw in the dtype of w
    wide=(),
)
