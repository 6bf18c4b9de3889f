"""gate: y * act(g) or y + act(g), the gates of attention outputs, values, keys, queries and residual updates."""

from typing import Any

from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.activations import ACTIVATIONS, Activation
from archlab.kernels.gate import reference, torch_ops
from archlab.kernels.op import Ask, Call, Case, Implementation, Op


def granularity(y: Tensor, g: Tensor) -> str:
    """`elementwise` if g has y's shape, `headwise` if it has one value per last dimension, else `other`."""
    if g.shape == y.shape:
        return "elementwise"
    return "headwise" if g.shape == (*y.shape[:-1], 1) else "other"


def _ask(y: Tensor, g: Tensor, activation: str | Activation, combine: str) -> dict[str, Any]:
    name = activation if isinstance(activation, str) else "function"
    return {"activation": name, "combine": combine, "granularity": granularity(y, g)}


def _load_triton() -> Call:
    from archlab.kernels.gate.triton import gate

    return gate


def _unsupported(ask: Ask) -> str | None:
    if ask.options["granularity"] == "other":
        return "g must have y's shape or one value per last dimension"
    if ask.options["activation"] == "function":
        return "has only the named activations"
    return launch.unsupported(ask)


def _flops(y: Tensor, g: Tensor, activation: str | Activation, combine: str) -> int:
    """One for the combination, and one per activation, which is counted as a single operation."""
    return y.numel() + g.numel()


def _bytes(y: Tensor, g: Tensor, activation: str | Activation, combine: str) -> int:
    return 2 * y.numel() * y.element_size() + g.numel() * g.element_size()


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
    version=1,
    reference=reference.gate,
    implementations={
        "triton": Implementation(
            "triton", _load_triton, "one fused pass forward and backward", _unsupported, launch.slow, launch.missing
        ),
        "torch": Implementation("torch", lambda: torch_ops.gate, "elementwise torch, in the dtype of its inputs"),
    },
    cases=_cases(),
    options={
        "activation": (*ACTIVATIONS, "function"),
        "combine": ("multiply", "add"),
        "granularity": ("elementwise", "headwise", "other"),
    },
    ask=_ask,
    flops=_flops,
    bytes=_bytes,
)
