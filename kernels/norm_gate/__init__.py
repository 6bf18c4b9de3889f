"""norm_gate: the norm of each head and the gate on it in one pass, on what attention or a recurrence gives."""

from typing import Any

import torch
from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.activations import ACTIVATIONS, Activation
from archlab.kernels.add_norm.reference import Kind
from archlab.kernels.gate import granularity
from archlab.kernels.gate.reference import Combine
from archlab.kernels.norm_gate import reference, torch_ops
from archlab.kernels.op import Ask, Call, Case, Implementation, Op


def _ask(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: Kind,
    activation: str | Activation,
    combine: Combine,
) -> dict[str, Any]:
    name = activation if isinstance(activation, str) else "function"
    return {"kind": kind, "activation": name, "granularity": granularity(x, g), "combine": combine}


def _load_triton() -> Call:
    from archlab.kernels.norm_gate.triton import norm_gate

    return norm_gate


def _unsupported(ask: Ask) -> str | None:
    if ask.options["granularity"] == "other":
        return "g must have x's shape or one value per head"
    if ask.options["activation"] == "function":
        return "has only the named activations"
    return launch.unsupported(ask)


def _flops(x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any, kind: Kind, **__: Any) -> int:
    """What the norm needs, the combination, and one per activation."""
    norm = (3 if kind == "rms" else 5) + (weight is not None) + (bias is not None)
    return (norm + 1) * x.numel() + g.numel()


def _bytes(x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any, **__: Any) -> int:
    factors = sum(t.numel() * t.element_size() for t in (weight, bias) if t is not None)
    return 2 * x.numel() * x.element_size() + g.numel() * g.element_size() + factors


def _case(name: str, shape: tuple[int, ...], g: int, parts: dict[str, tuple[int, ...]], **arguments: Any) -> Case:
    absent = {own: None for own in ("weight", "bias") if own not in parts}
    given = {"eps": 1e-6, "kind": "rms", "activation": "sigmoid", "combine": "multiply"} | arguments
    return Case(name, {"x": shape, "g": (*shape[:3], g), **parts}, {**absent, **given})


_HEADS: dict[str, tuple[int, ...]] = {"weight": (3, 24), "bias": (3, 24)}

NORM_GATE = Op(
    name="norm_gate",
    version=1,
    reference=reference.norm_gate,
    implementations={
        "triton": Implementation(
            "triton", _load_triton, "norm and gate in one pass", _unsupported, launch.slow, launch.missing
        ),
        "torch": Implementation("torch", lambda: torch_ops.norm_gate, "torch's own norm, then elementwise torch"),
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
    options={
        "kind": ("rms", "layer"),
        "activation": (*ACTIVATIONS, "function"),
        "combine": ("multiply", "add"),
        "granularity": ("elementwise", "headwise", "other"),
    },
    ask=_ask,
    flops=_flops,
    bytes=_bytes,
    tolerances={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},  # torch rounds between its steps
)
