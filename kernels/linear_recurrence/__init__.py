"""linear_recurrence: a matrix state that decays, is written to and is read, for linear attention and its relatives."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.linear_recurrence import reference, torch_ops
from archlab.kernels.op import Ask, Case, Implementation, Op, nbytes

DECAYS = ("none", "constant", "token", "channel")
WIDTHS = (64, 128, 256)  # channels of a key: at most that many, and more than 128


def width_class(keys: int) -> int:
    """What `select` is asked about keys of so many channels."""
    return next((width for width in WIDTHS if keys <= width), WIDTHS[-1])


def _ask(q: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None, **_: Any) -> dict[str, Any]:
    return {
        "decay": DECAYS[{0: 0, 1: 1, 3: 2, 4: 3}[0 if log_decay is None else log_decay.ndim]],
        "delta": beta is not None,
        "keys": width_class(q.shape[-1]),
    }


def _unsupported(ask: Ask) -> str | None:
    """A program holds all channels of a key, in registers."""
    if ask.options["keys"] > 128:
        return "holds keys of at most 128 channels"
    return launch.unsupported(ask)


def _slower(ask: Ask) -> str | None:
    spills = ask.dtype == torch.float32 and ask.options["delta"] and ask.options["keys"] > 64
    wide = "in float32 the delta rule's gradients of keys above 64 channels do not fit into registers"
    return launch.slow(ask) or (wide if spills else None)


def _flops(q: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None, **_: Any) -> int:
    """The products of the recurrent form, the least there is: write and read, with the delta rule erase; and decay."""
    products = (2 if beta is None else 3) * 2
    return v.numel() * q.shape[-1] * (products + (log_decay is not None))


def _bytes(q: Tensor, v: Tensor, state: Tensor | None = None, scale: float = 1.0, **given: Tensor | None) -> int:
    """Every argument and result once, with states in float32."""
    states = 4 * v.shape[0] * v.shape[2] * q.shape[-1] * v.shape[-1] * (1 if state is None else 2)
    return states + nbytes(q, v, v, *given.values())


def _case(
    name: str, decay: str, delta: bool = False, state: bool = True, length: int = 19, groups: int = 2,
    scale: float = 1.0,
) -> Case:  # fmt: skip
    batch, heads, width, values = 2, 2, 8, 6
    tensors: dict[str, tuple[int, ...]] = {
        "q": (batch, length, groups, width),
        "k": (batch, length, groups, width),
        "v": (batch, length, heads, values),
    }
    per_token = (batch, length, heads)
    if decay != "none":
        tensors["log_decay"] = {"constant": (heads,), "token": per_token, "channel": (*per_token, width)}[decay]
    if delta:
        tensors["beta"] = per_token
    if state:
        tensors["state"] = (batch, heads, width, values)
    return Case(name, tensors, {"scale": scale})


LINEAR_RECURRENCE = Op(
    name="linear_recurrence",
    reference=reference.linear_recurrence,
    implementations={
        "triton": launch.in_triton(
            "linear_recurrence",
            "chunks of tokens, states between them in registers; its speed was measured on no card",
            _unsupported,
            _slower,
        ),
        "torch": Implementation("torch", lambda: torch_ops.chunked, "chunks in parallel, states between them in order"),
    },
    cases=(
        _case("sum", "none", state=False),
        _case("sum_state", "none", scale=0.3),
        _case("retention", "constant"),
        _case("decay", "token"),
        _case("decay_grouped", "token", groups=1, length=9),
        _case("decay_stateless", "token", state=False, length=65),
        _case("decay_long", "token", length=130),
        _case("decay_length_1", "token", length=1),
        _case("channels", "channel"),
        _case("channels_grouped", "channel", groups=1, state=False),
        _case("channels_long", "channel", length=130),
        _case("delta", "none", delta=True),
        _case("delta_retention", "constant", delta=True, length=65),
        _case("delta_decay", "token", delta=True, scale=0.3, length=9),
        _case("delta_decay_grouped", "token", delta=True, groups=1, state=False),
        _case("delta_long", "token", delta=True, length=130),
        _case("delta_channels", "channel", delta=True, length=65),
        _case("delta_length_1", "channel", delta=True, length=1),
    ),
    options={"decay": DECAYS, "delta": (False, True), "keys": WIDTHS},
    ask=_ask,
    flops=_flops,
    bytes=_bytes,
    # In bfloat16 the delta rule is a chain of products, each rounded; fla-core allows its kernels 6e-3 to 8e-3.
    tolerances={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 3e-3},
    domains={
        "k": lambda x: F.normalize(x, dim=-1),
        "log_decay": lambda x: -x.square().square(),
        "beta": lambda x: x.sigmoid(),
    },
)
