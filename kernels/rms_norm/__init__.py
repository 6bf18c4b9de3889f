"""rms_norm: x / sqrt(mean(x^2) + eps) * weight, the norm before branches and on queries and keys."""

import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.launch import in_triton
from archlab.kernels.op import Case, Implementation, Op, nbytes
from archlab.kernels.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` over the root of its mean square, times weight `[D]`; the result has x's dtype."""
    cast = None if weight is None else weight.to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), cast, eps)


def _cases() -> tuple[Case, ...]:
    shapes = {"heads": (2, 5, 3, 24), "length_1": (1, 1, 24), "odd": (37, 67), "wide": (3, 1100)}
    return tuple(
        Case(
            name if weighted else f"{name}_no_weight",
            {"x": shape, "weight": shape[-1:]} if weighted else {"x": shape},
            {"eps": 1e-6} if weighted else {"weight": None, "eps": 1e-3},
        )
        for name, shape in shapes.items()
        for weighted in (True, False)
    )


RMS_NORM = Op(
    name="rms_norm",
    version=1,
    reference=reference.rms_norm,
    implementations={
        "triton": in_triton("rms_norm", "one pass forward and backward"),
        "torch": Implementation("torch", lambda: rms_norm, "torch.nn.functional.rms_norm"),
    },
    cases=_cases(),
    options={"weight": (True, False)},
    ask=lambda weight, **_: {"weight": weight is not None},
    flops=lambda x, weight, **_: (3 + (weight is not None)) * x.numel(),  # square, add, scale by root and weight
    bytes=lambda x, weight, **_: nbytes(x, x, weight),
)
