"""layer_norm: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, the norm of the first transformers."""

from typing import Any

import torch
from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.layer_norm import reference, torch_ops
from archlab.kernels.op import Call, Case, Implementation, Op


def _ask(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> dict[str, Any]:
    return {"weight": weight is not None, "bias": bias is not None}


def _load_triton() -> Call:
    from archlab.kernels.layer_norm.triton import layer_norm

    return layer_norm


def _flops(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> int:
    """Mean, centre, square, add, scale by the root; by the weight and plus the bias where they are."""
    return (5 + (weight is not None) + (bias is not None)) * x.numel()


def _bytes(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> int:
    return 2 * x.numel() * x.element_size() + sum(t.numel() * t.element_size() for t in (weight, bias) if t is not None)


def _cases() -> tuple[Case, ...]:
    shapes = {"heads": (2, 5, 3, 24), "length_1": (1, 1, 24), "odd": (7, 67), "wide": (3, 1100)}
    given = {"affine": ("weight", "bias"), "no_bias": ("weight",), "bias_alone": ("bias",), "bare": ()}
    return tuple(
        Case(
            f"{name}_{kind}",
            {"x": shape} | dict.fromkeys(parts, shape[-1:]),
            {own: None for own in ("weight", "bias") if own not in parts} | {"eps": 1e-5 if parts else 1e-3},
        )
        for name, shape in shapes.items()
        for kind, parts in given.items()
        if name in ("odd", "wide") or kind == "affine"
    )


LAYER_NORM = Op(
    name="layer_norm",
    version=1,
    reference=reference.layer_norm,
    implementations={
        "triton": Implementation(
            "triton", _load_triton, "one pass forward and backward", launch.unsupported, launch.slow, launch.missing
        ),
        "torch": Implementation("torch", lambda: torch_ops.layer_norm, "torch.nn.functional.layer_norm"),
    },
    cases=_cases(),
    options={"weight": (True, False), "bias": (True, False)},
    ask=_ask,
    flops=_flops,
    bytes=_bytes,
    tolerances={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},  # torch sums dw in the dtype of w
)
