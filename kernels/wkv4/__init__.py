"""wkv4: a mean over the past per channel, weighted by exp(k) and by age, with a bonus for the newest, as in RWKV-4."""

from typing import Any

from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.op import Call, Case, Implementation, Op
from archlab.kernels.wkv4 import reference, torch_ops


def _ask(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor | None = None) -> dict[str, Any]:
    return {}


def _load_triton() -> Call:
    from archlab.kernels.wkv4.triton import wkv4

    return wkv4


def _flops(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor | None = None) -> int:
    """Output and update by the formula: two exponents, two exponentials and two weighted sums each, and a quotient."""
    return 21 * k.numel()


def _bytes(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor | None = None) -> int:
    """Every argument and result once, with states in float32."""
    states = 8 * k.shape[0] * k.shape[2] * (1 if state is None else 2)
    return v.nbytes + states + sum(x.nbytes for x in (k, v, decay, bonus))


def _case(name: str, length: int = 19, batch: int = 2, channels: int = 6, state: bool = True) -> Case:
    tensors: dict[str, tuple[int, ...]] = {
        "k": (batch, length, channels),
        "v": (batch, length, channels),
        "decay": (channels,),
        "bonus": (channels,),
    }
    return Case(name, tensors | ({"state": (batch, 2, channels)} if state else {}), {})


WKV4 = Op(
    name="wkv4",
    version=1,
    reference=reference.wkv4,
    implementations={
        "triton": Implementation(
            "triton",
            _load_triton,
            "one walk through time with the states of channels in registers; its speed was measured on no card",
            launch.unsupported,
            launch.slow,
            launch.missing,
        ),
        "torch": Implementation(
            "torch", lambda: torch_ops.wkv4, "all chunks at once: as many steps as twice the root of the length"
        ),
    },
    cases=(
        _case("wkv"),
        _case("wkv_plain", state=False),
        _case("wkv_length_1", length=1),
        _case("wkv_length_2", length=2, state=False),
        _case("wkv_long", length=67, batch=1, channels=5),
    ),
    options={},
    ask=_ask,
    flops=_flops,
    bytes=_bytes,
)
