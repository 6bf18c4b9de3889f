"""token_shift: each channel mixed with what it was one token before, as RWKV does before its maps."""

import torch
from torch import Tensor

from archlab.kernels.launch import in_triton
from archlab.kernels.op import Case, Implementation, Op, nbytes
from archlab.kernels.token_shift import reference
from archlab.kernels.token_shift.reference import before


def token_shift(x: Tensor, mix: Tensor, starts: Tensor | None = None) -> Tensor:
    """mix x_t + (1 - mix) x_(t-1) for x `[B, T, D]` and mix `[D]`, x_(t-1) zero where `starts` `[B, T]` is not 0."""
    return torch.lerp(before(x, starts), x, mix.to(x.dtype))


def _case(name: str, shape: tuple[int, ...]) -> Case:
    return Case(name, {"x": shape, "mix": shape[-1:]}, {"starts": None})


TOKEN_SHIFT = Op(
    name="token_shift",
    reference=reference.token_shift,
    implementations={
        "triton": in_triton("token_shift", "shift and mix in one pass"),
        "torch": Implementation("torch", lambda: token_shift, "a step back, then torch.lerp"),
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
    ask=lambda starts=None, **_: {"starts": starts is not None},
    flops=lambda x, **_: 3 * x.numel(),  # a difference, a product, a sum
    bytes=lambda x, mix, **_: nbytes(x, x, mix),
    tolerances={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},  # torch mixes in the dtype of x
)
