"""token_shift: each channel mixed with what it was one token before, as RWKV does before its maps."""

from typing import Any

import torch
from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.op import Call, Case, Implementation, Op
from archlab.kernels.token_shift import reference, torch_ops


def _ask(x: Tensor, mix: Tensor, starts: Tensor | None = None) -> dict[str, Any]:
    return {"starts": starts is not None}


def _load_triton() -> Call:
    from archlab.kernels.token_shift.triton import token_shift

    return token_shift


def _flops(x: Tensor, mix: Tensor, starts: Tensor | None = None) -> int:
    """A difference, a product, a sum."""
    return 3 * x.numel()


def _bytes(x: Tensor, mix: Tensor, starts: Tensor | None = None) -> int:
    return 2 * x.numel() * x.element_size() + mix.numel() * mix.element_size()


def _case(name: str, shape: tuple[int, ...]) -> Case:
    return Case(name, {"x": shape, "mix": shape[-1:]}, {"starts": None})


TOKEN_SHIFT = Op(
    name="token_shift",
    version=1,
    reference=reference.token_shift,
    implementations={
        "triton": Implementation(
            "triton", _load_triton, "shift and mix in one pass", launch.unsupported, launch.slow, launch.missing
        ),
        "torch": Implementation("torch", lambda: torch_ops.token_shift, "a step back, then torch.lerp"),
    },
    cases=(
        _case("shifted", (2, 9, 24)),
        _case("shifted_odd", (3, 37, 67)),
        _case("shifted_wide", (1, 3, 1100)),
        _case("shifted_length_1", (2, 1, 24)),
        Case(
            "shifted_documents",
            {"x": (2, 5, 24), "mix": (24,)},
            {},
            integers={"starts": ((0, 0, 1, 0, 1), (0, 1, 0, 0, 0))},
        ),
    ),
    options={"starts": (False, True)},
    ask=_ask,
    flops=_flops,
    bytes=_bytes,
    tolerances={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},  # torch mixes in the dtype of x
)
