"""wkv7 in Triton, as the linear recurrence has it: chunks of tokens, products of matrices in them, states between them.

Where batch x heads fill the card, one program per head walks from chunk to chunk with the state in registers, and no
state is ever written; else the states before all chunks are stored, and the outputs of all chunks computed at once. The
backward pass keeps nothing but the arguments: it walks once forward for the states, once back for their gradients.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from archlab.kernels import interpret
from archlab.kernels.custom_op import custom_op
from archlab.kernels.gradients import differentiable
from archlab.kernels.launch import Build, generation, like, on_device_of, power_of_2, tuned
from archlab.kernels.linear_recurrence.triton import fills
from archlab.kernels.wkv7 import WIDEST, backward, forward
from archlab.kernels.wkv7.reference import checked


def chunk_of(operands: torch.dtype) -> int:
    """Tokens of a chunk. 64 are too many on every card: gradients of four kinds of pairs do not fit into registers."""
    return 16 if operands == torch.float32 and not interpret.small_tiles() else 32


def _tile(kernel: str, keys: int, values: int, chunk: int) -> dict[str, Any]:
    """Channels of keys and values that a program holds, its warps and its stages: a card's winners, or what fits."""
    width, columns = max(16, power_of_2(keys)), max(16, power_of_2(values))
    walk = {"BK": width, "BV": min(columns, chunk), "num_warps": 8 if chunk == 16 else 4, "num_stages": 1}
    default = {
        "weigh": {"BK": 16, "num_warps": 8, "num_stages": 1},
        "decay_channels": {"BK": min(width, 32), "num_warps": 4, "num_stages": 1},
        "walk": walk,
        "read": {"BK": width, "BV": min(columns, 64), "num_warps": 4},
        "walk_back": walk,
        "pair_gradients": {"BV": min(columns, 64), "num_warps": 4, "num_stages": 1},
        "channel_gradients": {"BK": 16, "BV": min(columns, 32), "num_warps": 8, "num_stages": 1},
    }[kernel]
    return {**tuned(f"wkv7-{kernel}", {"Dk": keys, "Dv": values, "chunk": chunk}, default), "CHUNK": chunk}


class _Launch:
    """The arguments of one call as the kernels take them, contiguous, and what is made of them."""

    def __init__(self, r: Tensor, k: Tensor, v: Tensor, g: Tensor, removal: Tensor, rate: Tensor) -> None:
        self.batch, self.length, self.heads, self.values = v.shape
        self.keys, self.chunk = r.shape[3], chunk_of(v.dtype)
        self.chunks = triton.cdiv(self.length, self.chunk)
        self.r, self.k, self.v, self.g, self.removal, self.rate = (x.contiguous() for x in (r, k, v, g, removal, rate))
        self.sums = "ieee" if v.dtype == torch.float32 else "tf32x3"
        self.sizes = self.length, self.heads, self.keys, self.values, self.chunks
        self.recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] | None = None

    def start(self, name: str, kernel: Any, rest: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        """Launches a kernel for each head, or keeps what it would be launched with."""
        meta |= _tile(name, self.keys, self.values, self.chunk)
        if self.recorded is None:
            kernel[(self.batch * self.heads, *rest)](*arguments, **meta)
        else:
            self.recorded.append((kernel, arguments, meta))

    def across(self, name: str, of: str) -> int:
        """The blocks of columns that a kernel takes, of keys (`BK`) or of values (`BV`)."""
        tile = _tile(name, self.keys, self.values, self.chunk)
        blocks: int = triton.cdiv(self.keys if of == "BK" else self.values, tile[of])
        return blocks

    def of_tokens(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.v.new_empty((self.batch, self.length, self.heads, width), dtype=dtype)

    def of_chunks(self, rows: int, columns: int) -> Tensor:
        """A matrix for each chunk of each head, in v's dtype: an operand of products."""
        return self.v.new_empty((self.batch, self.heads, self.chunks, rows, columns))

    def pairs(self) -> tuple[Tensor, Tensor]:
        """A matrix of tokens with keys, and one with what is removed, for each chunk of each head."""
        return self.of_chunks(self.chunk, self.chunk), self.of_chunks(self.chunk, self.chunk)

    def prepare(self) -> None:
        """What is computed of the tokens of each chunk alone: products and the inverse, and all that decays."""
        self.weights, self.seen = self.pairs(), self.pairs()
        for reads, found, before in ((self.r, self.weights, False), (self.removal, self.seen, True)):
            self.start(
                "weigh", forward.weigh, (self.chunks,), reads, self.k, self.removal, self.rate, self.g, *found,
                self.length, self.heads, self.keys, self.chunks, BEFORE=before, SUMS=self.sums,
            )  # fmt: skip
        self.decayed = [self.of_tokens(self.keys) for _ in range(4)]
        self.over = self.v.new_empty((self.batch, self.heads, self.chunks, self.keys), dtype=torch.float32)
        self.start(
            "decay_channels", forward.decay_channels, (self.chunks, self.across("decay_channels", "BK")),
            self.r, self.k, self.removal, self.rate, self.g, *self.decayed, self.over,
            self.length, self.heads, self.keys, self.chunks,
        )  # fmt: skip

    def walk(self, state: Tensor | None, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The states before all chunks, what is erased, and the last state; with `out` the outputs and the last."""
        keep = out is None
        states = self.of_chunks(self.keys, self.values) if keep else self.v
        erased = self.of_tokens(self.values) if keep else self.v
        last = self.v.new_empty((self.batch, self.heads, self.keys, self.values), dtype=torch.float32)
        self.start(
            "walk", forward.walk, (self.across("walk", "BV"),), *self.decayed, self.over, self.v,
            *self.weights, *self.seen, self.v if state is None else state.contiguous(), self.v if out is None else out,
            states, erased, last, *self.sizes, FIRST=state is not None, OUT=not keep, KEEP=keep,
        )  # fmt: skip
        return states, erased, last

    def read(self, states: Tensor, erased: Tensor, out: Tensor) -> None:
        self.start(
            "read", forward.read, (self.chunks, self.across("read", "BV")),
            self.decayed[0], *self.weights, self.v, states, erased, out, *self.sizes,
        )  # fmt: skip

    def walk_back(self, dout: Tensor, dlast: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of the states after all chunks, of the right sides, of v, and of the first state."""
        dstates, dfirst = self.of_chunks(self.keys, self.values), like(dlast, torch.float32)
        dright, dv = self.of_tokens(self.values), self.of_tokens(self.values)
        self.start(
            "walk_back", backward.walk_back, (self.across("walk_back", "BV"),), *self.decayed, self.over,
            *self.weights, *self.seen, dout, dlast.contiguous(), dstates, dright, dv, dfirst, *self.sizes,
        )  # fmt: skip
        return dstates, dright, dv, dfirst

    def gradients(
        self, states: Tensor, erased: Tensor, dout: Tensor, dstates: Tensor, dright: Tensor
    ) -> tuple[Tensor, ...]:
        """Those of r, k, removal, rate and log decay, the last in float32."""
        pairs = self.pairs(), self.pairs()
        for left, found in zip((dout, dright), pairs, strict=True):
            self.start(
                "pair_gradients", backward.pair_gradients, (self.chunks,), left, self.v, erased, *found,
                self.length, self.heads, self.values, self.chunks,
            )  # fmt: skip
        own = *(self.of_tokens(self.keys) for _ in range(4)), self.of_tokens(self.keys, torch.float32)
        self.start(
            "channel_gradients", backward.channel_gradients, (self.chunks, self.across("channel_gradients", "BK")),
            self.r, self.k, self.removal, self.rate, self.g, *pairs[0], *pairs[1], dout, dright, self.v, erased,
            states, dstates, *own, *self.sizes,
        )  # fmt: skip
        return own


@custom_op("wkv7")
def _wkv7(
    r: Tensor, k: Tensor, v: Tensor, g: Tensor, removal: Tensor, rate: Tensor, state: Tensor | None, walks: bool
) -> tuple[Tensor, Tensor]:
    """Outputs in v's dtype and the last state in float32, by one walk or with the states of all chunks stored."""
    with on_device_of(v):
        launch = _Launch(r, k, v, g, removal, rate)
        launch.prepare()
        out = launch.of_tokens(launch.values)
        states, erased, last = launch.walk(state, out if walks else None)
        if not walks:
            launch.read(states, erased, out)
    return out, last


@_wkv7.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    r, _, v = given[:3]
    return like(v), v.new_empty((v.shape[0], v.shape[2], r.shape[3], v.shape[3]), dtype=torch.float32)


@custom_op("wkv7_backward")
def _wkv7_backward(
    dout: Tensor, dlast: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, removal: Tensor, rate: Tensor,
    state: Tensor | None, walks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of all tensors, either way to the outputs: of the log decay and the first state in float32."""
    with on_device_of(v):
        launch = _Launch(r, k, v, g, removal, rate)
        launch.prepare()
        states, erased, _ = launch.walk(state, None)
        douts = dout.contiguous()
        dstates, dright, dv, dfirst = launch.walk_back(douts, dlast)
        dr, dk, dremoval, drate, dg = launch.gradients(states, erased, douts, dstates, dright)
    return dr, dk, dv, dg, dremoval, drate, dfirst


@_wkv7_backward.register_fake
def _(dout: Tensor, dlast: Tensor, *given: Any) -> tuple[Tensor, ...]:
    r, k, v, g, removal, rate = given[:6]
    return like(r), like(k), like(v), like(g, torch.float32), like(removal), like(rate), like(dlast, torch.float32)


differentiable(_wkv7, _wkv7_backward, 7)


def wkv7(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, removal: Tensor, rate: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Arguments and results are the reference's. Raises ValueError for keys above 64 wide."""
    checked(r, k, v, log_decay, removal, rate, state)
    if r.shape[-1] > WIDEST:
        raise ValueError(f"a program holds all channels of a key: at most {WIDEST}; received {r.shape[-1]}")
    first = None if state is None else state.float()
    reads, keys, removals, rates = (x.to(v.dtype) for x in (r, k, removal, rate))
    out, last = _wkv7(reads, keys, v, log_decay, removals, rates, first, v.shape[0] * v.shape[2] >= fills(v))
    return out, last


# Card, name, dtype, and which of the two ways to the outputs
BUILDS: tuple[tuple[int, str, torch.dtype, bool], ...] = (
    (90, "64", torch.bfloat16, True),
    (80, "64", torch.bfloat16, False),
    (86, "64-float32", torch.float32, True),
    (89, "64", torch.bfloat16, True),
)


def builds() -> Iterator[Build]:
    """Heads of 64 channels, as the published models have."""
    for card, name, dtype, walks in BUILDS:
        if card == generation():
            v, state, g = (
                torch.empty(1, 4096, 16, 64, dtype=dtype),
                torch.empty(1, 16, 64, 64),
                torch.empty(1, 4096, 16, 64),
            )
            launch = _Launch(v, v, v, g, v, v)
            launch.recorded = []
            launch.prepare()
            states, erased, _ = launch.walk(state, v if walks else None)
            if not walks:
                launch.read(states, erased, v)
            dstates, dright, _, _ = launch.walk_back(v, state)
            launch.gradients(states, erased, v, dstates, dright)
            distinct = {f"{x[0].__name__}{'-before' * x[2].get('BEFORE', False)}": x for x in launch.recorded}
            for kernel, (function, arguments, meta) in distinct.items():
                yield Build(f"wkv7-{kernel}-{name}", function, arguments, meta)
