"""glu: act(a) * b, the product inside a gated feed-forward layer (SwiGLU, GEGLU, ReGLU)."""

from torch import Tensor

from archlab.kernels.activations import ACTIVATIONS, Activation, activation_of
from archlab.kernels.gate import unsupported
from archlab.kernels.glu import reference
from archlab.kernels.launch import in_triton
from archlab.kernels.op import Case, Implementation, Op, nbytes


def glu(a: Tensor, b: Tensor, activation: str | Activation) -> Tensor:
    """act(a) * b for a and b of one shape `[..., D]`; the result has a's dtype."""
    return (activation_of(activation)(a) * b).to(a.dtype)


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
        "triton": in_triton("glu", "one fused pass forward and backward", unsupported()),
        "torch": Implementation("torch", lambda: glu, "elementwise torch, in the dtype of its inputs"),
    },
    cases=_cases(),
    options={"activation": ("silu", *(a for a in ACTIVATIONS if a != "silu"), "function")},
    ask=lambda activation, **_: {"activation": activation if isinstance(activation, str) else "function"},
    flops=lambda a, **_: 2 * a.numel(),  # the product, and the activation as a single operation
    bytes=lambda a, b, **_: nbytes(a, a, b),
)
