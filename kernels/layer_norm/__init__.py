"""layer_norm: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, the norm of the first transformers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.launch import in_triton
from archlab.kernels.layer_norm import reference
from archlab.kernels.op import Case, Implementation, Op, nbytes


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` centred and over its deviation, times weight `[D]`, plus bias `[D]`; the result has x's dtype."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


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
        "triton": in_triton("layer_norm", "one pass forward and backward"),
        "torch": Implementation("torch", lambda: layer_norm, "torch.nn.functional.layer_norm"),
    },
    cases=_cases(),
    options={"weight": (True, False), "bias": (True, False)},
    ask=lambda weight, bias, **_: {"weight": weight is not None, "bias": bias is not None},
    # Mean, centre, square, add, scale by the root; by the weight and plus the bias where they are
    flops=lambda x, weight, bias, **_: (5 + (weight is not None) + (bias is not None)) * x.numel(),
    bytes=lambda x, weight, bias, **_: nbytes(x, x, weight, bias),
    tolerances={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},  # torch sums dw in the dtype of w
)
