"""glu: act(a) * b, the product inside a gated feed-forward layer (SwiGLU, GEGLU, ReGLU)."""

from typing import Any

from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.activations import ACTIVATIONS, Activation
from archlab.kernels.glu import reference, torch_ops
from archlab.kernels.op import Ask, Call, Case, Implementation, Op


def _ask(a: Tensor, b: Tensor, activation: str | Activation) -> dict[str, Any]:
    return {"activation": activation if isinstance(activation, str) else "function"}


def _load_triton() -> Call:
    from archlab.kernels.glu.triton import glu

    return glu


def _unsupported(ask: Ask) -> str | None:
    return "has only the named activations" if ask.options["activation"] == "function" else launch.unsupported(ask)


def _flops(a: Tensor, b: Tensor, activation: str | Activation) -> int:
    """The product, and the activation counted as a single operation."""
    return 2 * a.numel()


def _bytes(a: Tensor, b: Tensor, activation: str | Activation) -> int:
    return 2 * a.numel() * a.element_size() + b.numel() * b.element_size()


def _cases() -> tuple[Case, ...]:
    shape = (2, 5, 40)
    every = [Case(activation, {"a": shape, "b": shape}, {"activation": activation}) for activation in ACTIVATIONS]
    odd = {"length_1": (1, 1, 40), "width_1": (3, 25, 1), "odd": (3, 7, 67), "wide": (3, 1100)}
    return (*every, *(Case(name, {"a": s, "b": s}, {"activation": "silu"}) for name, s in odd.items()))


GLU = Op(
    name="glu",
    version=1,
    reference=reference.glu,
    implementations={
        "triton": Implementation(
            "triton", _load_triton, "one fused pass forward and backward", _unsupported, launch.slow, launch.missing
        ),
        "torch": Implementation("torch", lambda: torch_ops.glu, "elementwise torch, in the dtype of its inputs"),
    },
    cases=_cases(),
    options={"activation": ("silu", *(a for a in ACTIVATIONS if a != "silu"), "function")},
    ask=_ask,
    flops=_flops,
    bytes=_bytes,
)
