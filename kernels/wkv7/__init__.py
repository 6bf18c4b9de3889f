"""wkv7: a matrix state with a decay for each channel, of which each token removes a part and to which it adds, as in
RWKV-7: the delta rule with a removal key of its own and a rate for each channel."""

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.op import Ask, Case, Implementation, Op, nbytes
from archlab.kernels.wkv7 import reference, torch_ops

WIDEST = 64  # channels of a key that a program of Triton's holds


def _unsupported(ask: Ask) -> str | None:
    return f"holds keys of at most {WIDEST} channels" if ask.options["wide"] else launch.unsupported(ask)


def _bytes(r: Tensor, v: Tensor, state: Tensor | None = None, **given: Tensor) -> int:
    """Every argument and result once, with states in float32."""
    states = 4 * v.shape[0] * v.shape[2] * r.shape[-1] * v.shape[-1] * (1 if state is None else 2)
    return states + nbytes(r, v, v, *given.values())


def _case(name: str, length: int = 19, state: bool = True, values: int = 6) -> Case:
    batch, heads, width = 2, 2, 8
    per_token = (batch, length, heads, width)
    tensors = dict.fromkeys(("r", "k", "log_decay", "removal", "rate"), per_token)
    tensors["v"] = (batch, length, heads, values)
    return Case(name, tensors | ({"state": (batch, heads, width, values)} if state else {}), {})


WKV7 = Op(
    name="wkv7",
    reference=reference.wkv7,
    implementations={
        "triton": launch.in_triton(
            "wkv7",
            "chunks of tokens, states between them in registers; its speed was measured on no card",
            _unsupported,
        ),
        "torch": Implementation("torch", lambda: torch_ops.chunked, "chunks in parallel, states between them in order"),
    },
    cases=(
        _case("removing"),
        _case("removing_plain", state=False, values=8),
        _case("removing_length_1", length=1),
        _case("removing_length_2", length=2, state=False),
        _case("removing_long", length=67),
    ),
    options={"wide": (False, True)},
    ask=lambda r, **_: {"wide": r.shape[-1] > WIDEST},
    # The products of the recurrent form: read, erase, and write twice; and decay
    flops=lambda r, v, **_: 9 * v.numel() * r.shape[-1],
    bytes=_bytes,
    tolerances={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 3e-3},
    domains={
        "removal": lambda x: F.normalize(x, dim=-1),
        "rate": lambda x: x.sigmoid(),
        "log_decay": lambda x: -x.square().square(),
    },
)
