"""selective_scan: a diagonal state per channel whose decay, writes and reads depend on the token, as in Mamba."""

from typing import Any

from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.op import Ask, Case, Implementation, Op, nbytes
from archlab.kernels.selective_scan import reference, torch_ops
from archlab.kernels.selective_scan.reference import STATES


def state_class(size: int) -> int:
    """What `select` is asked about states of so many numbers."""
    return STATES[0] if size <= STATES[0] else STATES[1]


def _unsupported(ask: Ask) -> str | None:
    if ask.options["state"] > STATES[0]:
        return f"a thread holds the state of a channel: at most {STATES[0]} numbers"
    return launch.unsupported(ask)


def _flops(x: Tensor, log_a: Tensor, d: Tensor | None = None, **_: Any) -> int:
    """Per number of a state: the exponent, decay, write (2) and read (2), with exp and softplus as one each; then d."""
    return x.numel() * (7 * log_a.shape[-1] + 2 + (0 if d is None else 2))


def _bytes(x: Tensor, log_a: Tensor, state: Tensor | None = None, **given: Tensor | None) -> int:
    """Every argument and result once, with states in float32."""
    states = 4 * x.shape[0] * log_a.numel() * (1 if state is None else 2)
    return states + nbytes(x, x, log_a, *given.values())


def _case(name: str, length: int = 19, batch: int = 2, channels: int = 6, size: int = 4, without: str = "") -> Case:
    tensors: dict[str, tuple[int, ...]] = {
        "x": (batch, length, channels),
        "delta": (batch, length, channels),
        "log_a": (channels, size),
        "b": (batch, length, size),
        "c": (batch, length, size),
        "d": (channels,),
        "state": (batch, channels, size),
    }
    return Case(name, {key: shape for key, shape in tensors.items() if key not in without.split()}, {})


SELECTIVE_SCAN = Op(
    name="selective_scan",
    reference=reference.selective_scan,
    implementations={
        "triton": launch.in_triton(
            "selective_scan",
            "one walk through time with the states of channels in registers; its speed was measured on no card",
            _unsupported,
        ),
        "torch": Implementation(
            "torch",
            lambda: torch_ops.selective_scan,
            "chunks: one multiplication and addition per token is sequential, and states are computed again backwards",
        ),
    },
    cases=(
        _case("scan"),
        _case("scan_plain", without="d state"),
        _case("scan_length_1", length=1),
        _case("scan_one_chunk", length=16, batch=1),
        _case("scan_long", length=67, channels=5, size=3, without="state"),
    ),
    options={"state": STATES},
    ask=lambda log_a, **_: {"state": state_class(log_a.shape[1])},
    flops=_flops,
    bytes=_bytes,
)
