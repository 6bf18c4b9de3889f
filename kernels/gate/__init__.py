"""gate: y * act(g) or y + act(g), the gates of attention outputs, values, keys, queries and residual updates; and glu:
act(a) * b, the product inside a gated feed-forward layer (SwiGLU, GEGLU, ReGLU)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.activations import ACTIVATIONS, Activation, activation_of, at_least_float32
from archlab.kernels.gate import reference
from archlab.kernels.gate.reference import Combine
from archlab.kernels.op import Ask, Case, Implementation, Op, nbytes

OPTIONS: dict[str, tuple[str, ...]] = {
    "activation": (*ACTIVATIONS, "function"),
    "combine": ("multiply", "add"),
    "granularity": ("elementwise", "headwise", "other"),
}


def gate(y: Tensor, g: Tensor, activation: str | Activation, combine: Combine) -> Tensor:
    """y `[..., D]` gated by g, which broadcasts against y; the result has y's dtype.

    A g smaller than y opens in float32: that costs nothing, and dg is a sum whose error would not average out.
    """
    opened = activation_of(activation)(g if g.numel() >= y.numel() else at_least_float32(g)).to(y.dtype)
    return y * opened if combine == "multiply" else y + opened


def granularity(y: Tensor, g: Tensor) -> str:
    """`elementwise` if g has y's shape, `headwise` if it has one value per last dimension, else `other`."""
    if g.shape == y.shape:
        return "elementwise"
    return "headwise" if g.shape == (*y.shape[:-1], 1) else "other"


def _ask(y: Tensor, g: Tensor, activation: str | Activation, combine: str) -> dict[str, Any]:
    name = activation if isinstance(activation, str) else "function"
    return {"activation": name, "combine": combine, "granularity": granularity(y, g)}


def unsupported(shapes: str = "") -> Callable[[Ask], str | None]:
    """Why Triton cannot serve a gate: `shapes` where g has none that it knows."""

    def objection(ask: Ask) -> str | None:
        if ask.options.get("granularity") == "other":
            return shapes
        return "has only the named activations" if ask.options["activation"] == "function" else launch.unsupported(ask)

    return objection


def _cases() -> tuple[Case, ...]:
    y = (2, 5, 3, 24)
    elementwise = [
        Case(f"elementwise_{a}", {"y": y, "g": y}, {"activation": a, "combine": "multiply"}) for a in ACTIVATIONS
    ]
    shapes = {
        "headwise": (y, (2, 5, 3, 1)),
        "scalar": (y, (2, 5, 1, 1)),
        "shared_heads": (y, (2, 5, 1, 24)),
        "constant": (y, (24,)),
        "length_1": ((1, 1, 3, 24), (1, 1, 3, 1)),
        "width_1": ((2, 5, 7, 1), (2, 5, 7, 1)),
        "wide": ((16, 1100), (16, 1)),
        "odd": ((1, 37, 1, 67), (1, 37, 1, 1)),
    }
    others = [
        Case(f"{name}_{combine}", {"y": a, "g": b}, {"activation": activation, "combine": combine})
        for name, (a, b) in shapes.items()
        for activation, combine in (("sigmoid", "multiply"), ("silu", "add"))
    ]
    return (*elementwise, *others)


GATE = Op(
    name="gate",
    reference=reference.gate,
    implementations={
        "triton": launch.in_triton(
            "gate",
            "one fused pass forward and backward",
            unsupported("g must have y's shape or one value per last dimension"),
        ),
        "torch": Implementation("torch", lambda: gate, "elementwise torch, in the dtype of its inputs"),
    },
    cases=_cases(),
    options=OPTIONS,
    ask=_ask,
    flops=lambda y, g, **_: y.numel() + g.numel(),  # the combination, and the activation as a single operation
    bytes=lambda y, g, **_: nbytes(y, y, g),
)


def glu(a: Tensor, b: Tensor, activation: str | Activation) -> Tensor:
    """act(a) * b for a and b of one shape `[..., D]`; the result has a's dtype."""
    return (activation_of(activation)(a) * b).to(a.dtype)


def _glu_cases() -> tuple[Case, ...]:
    shape = (2, 5, 40)
    every = [Case(activation, {"a": shape, "b": shape}, {"activation": activation}) for activation in ACTIVATIONS]
    odd = {"length_1": (1, 1, 40), "width_1": (3, 25, 1), "odd": (3, 7, 67), "wide": (3, 1100)}
    return (*every, *(Case(name, {"a": s, "b": s}, {"activation": "silu"}) for name, s in odd.items()))


GLU = Op(
    name="glu",
    reference=reference.glu,
    implementations={
        "triton": launch.in_triton("gate.glu", "one fused pass forward and backward", unsupported()),
        "torch": Implementation("torch", lambda: glu, "elementwise torch, in the dtype of its inputs"),
    },
    cases=_glu_cases(),
    options={"activation": ("silu", *(a for a in ACTIVATIONS if a != "silu"), "function")},
    ask=lambda activation, **_: {"activation": activation if isinstance(activation, str) else "function"},
    flops=lambda a, **_: 2 * a.numel(),  # the product, and the activation as a single operation
    bytes=lambda a, b, **_: nbytes(a, a, b),
)
