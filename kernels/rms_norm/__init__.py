"""rms_norm: x / sqrt(mean(x^2) + eps) * weight, the norm before branches and on queries and keys."""

from typing import Any

from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.op import Call, Case, Implementation, Op
from archlab.kernels.rms_norm import reference, torch_ops


def _ask(x: Tensor, weight: Tensor | None, eps: float) -> dict[str, Any]:
    return {"weight": weight is not None}


def _load_triton() -> Call:
    from archlab.kernels.rms_norm.triton import rms_norm

    return rms_norm


def _flops(x: Tensor, weight: Tensor | None, eps: float) -> int:
    """Square, add, scale by the root, and scale by the weight if there is one."""
    return (3 if weight is None else 4) * x.numel()


def _bytes(x: Tensor, weight: Tensor | None, eps: float) -> int:
    return 2 * x.numel() * x.element_size() + (0 if weight is None else weight.numel() * weight.element_size())


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
        "triton": Implementation(
            "triton", _load_triton, "one pass forward and backward", launch.unsupported, launch.slow, launch.missing
        ),
        "torch": Implementation("torch", lambda: torch_ops.rms_norm, "torch.nn.functional.rms_norm"),
    },
    cases=_cases(),
    options={"weight": (True, False)},
    ask=_ask,
    flops=_flops,
    bytes=_bytes,
)
