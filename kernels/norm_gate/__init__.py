"""norm_gate: the norm of each head and the gate on it in one pass, on what attention or a recurrence gives."""

from typing import Any

import torch
from torch import Tensor

from archlab.kernels.activations import Activation
from archlab.kernels.gate import OPTIONS, gate, granularity, unsupported
from archlab.kernels.gate.reference import Combine
from archlab.kernels.launch import in_triton
from archlab.kernels.norm_gate import reference
from archlab.kernels.norms import layer_norm, rms_norm
from archlab.kernels.norms.reference import Kind
from archlab.kernels.op import Case, Implementation, Op, nbytes


def norm_gate(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: Kind,
    activation: str | Activation, combine: Combine,
) -> Tensor:  # fmt: skip
    """(norm(x) weight + bias) act(g), or plus act(g), for x `[B, T, H, D]`; the result has x's dtype."""
    normed = rms_norm(x, None, eps) if kind == "rms" else layer_norm(x, None, None, eps)
    if weight is not None:
        normed = normed * weight.to(x.dtype)
    return gate(normed if bias is None else normed + bias.to(x.dtype), g, activation, combine)


def _ask(x: Tensor, g: Tensor, kind: Kind, activation: str | Activation, combine: Combine, **_: Any) -> dict[str, Any]:
    name = activation if isinstance(activation, str) else "function"
    return {"kind": kind, "activation": name, "granularity": granularity(x, g), "combine": combine}


def _flops(x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, kind: Kind, **_: Any) -> int:
    """What the norm needs, the combination, and one per activation."""
    norm = (3 if kind == "rms" else 5) + (weight is not None) + (bias is not None)
    return (norm + 1) * x.numel() + g.numel()


def _case(name: str, shape: tuple[int, ...], g: int, parts: dict[str, tuple[int, ...]], **arguments: Any) -> Case:
    absent = {own: None for own in ("weight", "bias") if own not in parts}
    given = {"eps": 1e-6, "kind": "rms", "activation": "sigmoid", "combine": "multiply"} | arguments
    return Case(name, {"x": shape, "g": (*shape[:3], g), **parts}, {**absent, **given})


_HEADS: dict[str, tuple[int, ...]] = {"weight": (3, 24), "bias": (3, 24)}

NORM_GATE = Op(
    name="norm_gate",
    reference=reference.norm_gate,
    implementations={
        "triton": in_triton(
            "norm_gate", "norm and gate in one pass", unsupported("g must have x's shape or one value per head")
        ),
        "torch": Implementation("torch", lambda: norm_gate, "torch's own norm, then elementwise torch"),
    },
    cases=(
        _case("opened", (2, 5, 3, 24), 24, {"weight": (24,)}),
        _case("opened_per_head", (2, 5, 3, 24), 24, {"weight": (3, 24)}, activation="silu"),
        _case("opened_groups", (2, 5, 3, 24), 24, _HEADS, kind="layer", activation="silu"),
        _case("opened_headwise", (2, 7, 2, 16), 1, {"weight": (16,)}),
        _case("opened_added", (1, 37, 2, 20), 20, {}, combine="add", activation="tanh"),
        _case("opened_layer_headwise", (1, 9, 2, 20), 1, {"weight": (20,)}, kind="layer", combine="add"),
        _case("opened_length_1", (2, 1, 1, 8), 8, {"bias": (8,)}, kind="layer"),
    ),
    options={"kind": ("rms", "layer"), **OPTIONS},
    ask=_ask,
    flops=_flops,
    bytes=lambda x, g, weight, bias, **_: nbytes(x, x, g, weight, bias),
    tolerances={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},  # torch rounds between its steps
)
