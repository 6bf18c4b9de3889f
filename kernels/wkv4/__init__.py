"""wkv4: a mean over the past per channel, weighted by exp(k) and by age, with a bonus for the newest, as in RWKV-4."""

from torch import Tensor

from archlab.kernels.launch import in_triton
from archlab.kernels.op import Case, Implementation, Op, nbytes
from archlab.kernels.wkv4 import reference, torch_ops


def _bytes(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor | None = None) -> int:
    """Every argument and result once, with states in float32."""
    states = 8 * k.shape[0] * k.shape[2] * (1 if state is None else 2)
    return states + nbytes(k, v, v, decay, bonus)


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
    reference=reference.wkv4,
    implementations={
        "triton": in_triton(
            "wkv4", "one walk through time with the states of channels in registers; its speed was measured on no card"
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
    ask=lambda **_: {},
    # Output and update by the formula: two exponents, two exponentials and two weighted sums each, and a quotient
    flops=lambda k, **_: 21 * k.numel(),
    bytes=_bytes,
)
