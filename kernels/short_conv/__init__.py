"""short_conv: each channel mixed with its own last few values, as Mamba, DeltaNet and Canon layers do."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.activations import ACTIVATIONS, Activation, activation_of
from archlab.kernels.op import Ask, Case, Implementation, Op, nbytes
from archlab.kernels.short_conv import reference

WIDEST = 16  # taps that a program of Triton's holds


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, documents: Tensor | None = None,
    activation: str | Activation = "identity", residual: bool = False, time: int | None = None,
) -> Tensor:  # fmt: skip
    """The reference's, a tap after the other; the activation is computed in the dtype of x."""
    more, time = weight.shape[1] - 1, x.shape[1] if time is None else time
    inputs = F.pad(x, (0, 0, more, 0))[:, -time - more :]
    numbers = None if documents is None else F.pad(documents, (more, 0), value=-1)[:, -time - more :]
    y = inputs[:, more:] * weight[:, more]
    for i in range(more):
        before = inputs[:, i : i + time]
        if numbers is not None:
            before = before.masked_fill((numbers[:, i : i + time] != numbers[:, more:])[..., None], 0)
        y = y + before * weight[:, i]
    if bias is not None:
        y = y + bias
    y = activation_of(activation)(y.to(x.dtype))
    return inputs[:, more:] + y if residual else y


def _ask(
    weight: Tensor, documents: Tensor | None = None, activation: str | Activation = "identity", **_: Any
) -> dict[str, Any]:
    name = activation if isinstance(activation, str) else "function"
    return {"activation": name, "documents": documents is not None, "wide": weight.shape[1] > WIDEST}


def _unsupported(ask: Ask) -> str | None:
    if ask.options["wide"]:
        return f"holds at most {WIDEST} taps"
    return "has only the named activations" if ask.options["activation"] == "function" else launch.unsupported(ask)


def _case(
    name: str, shape: tuple[int, int, int], width: int = 4, bias: bool = False,
    documents: tuple[tuple[int, ...], ...] | None = None, **arguments: Any,
) -> Case:  # fmt: skip
    channels = shape[2]
    shapes = {"x": shape, "weight": (channels, width)} | ({"bias": (channels,)} if bias else {})
    integers: Mapping[str, Any] = {} if documents is None else {"documents": documents}
    return Case(name, shapes, arguments, integers=integers)


SHORT_CONV = Op(
    name="short_conv",
    reference=reference.short_conv,
    implementations={
        "triton": launch.in_triton("short_conv", "all taps and the activation in one pass", _unsupported),
        "torch": Implementation("torch", lambda: short_conv, "a tap after the other, elementwise"),
    },
    cases=(
        _case("taps", (2, 9, 24)),
        _case("taps_silu", (2, 37, 67), bias=True, activation="silu"),
        _case("taps_three", (3, 40, 24), width=3, activation="tanh", residual=True),
        _case("taps_canon", (1, 33, 130), bias=True, residual=True),
        _case("taps_wide", (1, 19, 70), width=16, activation="silu"),
        _case("taps_length_1", (2, 1, 24), bias=True, activation="silu"),
        _case("taps_last", (2, 11, 24), time=5, activation="silu", residual=True),
        _case("taps_documents", (2, 6, 24), activation="silu",
              documents=((0, 0, 1, 1, 1, 2), (0, 1, 2, 2, 2, 2))),
        _case("taps_documents_last", (2, 6, 24), width=3, bias=True, time=3, residual=True,
              documents=((0, 0, 1, 1, 1, 2), (0, 1, 2, 2, 2, 2))),
    ),
    options={
        "activation": ("silu", *(a for a in ACTIVATIONS if a != "silu"), "function"),
        "documents": (False, True),
        "wide": (False, True),
    },
    ask=_ask,
    # A product and a sum for each tap, and the activation as a single operation
    flops=lambda x, weight, time=None, **_: (2 * weight.shape[1] + 1) * x.numel() * (time or x.shape[1]) // x.shape[1],
    bytes=lambda x, weight, bias=None, documents=None, **_: nbytes(x, x, weight, bias, documents),
    tolerances={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},  # torch rounds before the activation
)  # fmt: skip
