"""The linear recurrence in Triton: chunks of 64, 32 or 16 tokens, products of matrices in them, states between them.

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
from archlab.kernels.launch import Build, as_rows, generation, like, on_device_of, power_of_2, tuned
from archlab.kernels.linear_recurrence import backward, forward
from archlab.kernels.linear_recurrence.reference import checked_groups

WIDEST = 128  # channels of a key
UNKNOWN_CARD = 132  # programs that fill a card that is not there: an H100's multiprocessors


def _chunk(operands: torch.dtype) -> int:
    """Tokens of a chunk: 64 rows are the least that Hopper multiplies at its full rate; others keep fewer in registers,
    and float32, whose products have no tensor cores, fewest."""
    if operands == torch.float32 and not interpret.small_tiles():
        return 16
    return 64 if generation() >= 90 else 32


def _tile(kernel: str, keys: int, values: int, decay: int, delta: bool, chunk: int) -> dict[str, Any]:
    """Channels of keys and values that a program holds, its warps and its stages: a card's winners, or what fits."""
    width, columns = max(16, power_of_2(keys)), max(16, power_of_2(values))
    warps = 8 if width > 64 or decay == 2 or chunk == 16 else 4
    walk = {"BV": chunk, "num_warps": warps, "num_stages": 1 if chunk == 16 else 2}
    default = {
        "invert": {"BK": min(width, 32) if decay == 2 else width, "num_warps": warps if decay == 2 else 4},
        "decay_channels": {"BK": min(width, 32), "num_warps": 4, "num_stages": 1},
        "weigh": {"BK": min(width, 16 if chunk == 16 else 64), "num_warps": warps, "num_stages": 1},
        "walk": {"BK": width, **walk},
        "read": {"BK": width, "BV": 32 if chunk == 16 else 128, "num_warps": warps},
        "walk_back": {"BK": width, **walk},
        "gradients": {"BK": width, "BV": _GRADIENTS[chunk][delta], "num_warps": 8, "num_stages": 1},
        "channel_gradients": {"BK": 16, "BV": min(chunk, 32), "num_warps": 8, "num_stages": 1},
    }[kernel]
    if "BV" in default:
        default["BV"] = min(columns, default["BV"])
    key = {"Dk": keys, "Dv": values, "decay": decay, "delta": delta, "chunk": chunk}
    return {**tuned(f"linear_recurrence-{kernel}", key, default), "CHUNK": chunk}


_GRADIENTS = {64: (64, 32), 32: (64, 16), 16: (16, 16)}  # columns of values by chunk, without and with the delta rule


class _Launch:
    """The arguments of one call as the kernels take them: rows of tokens, each with its stride, and what they hold."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, scale: float) -> None:
        self.batch, self.length, self.heads, self.values = v.shape
        self.shared, self.keys, self.scale = self.heads // q.shape[2], q.shape[3], scale
        self.chunk = _chunk(v.dtype)
        self.chunks = triton.cdiv(self.length, self.chunk)
        self.decay = 0 if g is None else 2 if g.ndim == 4 else 1
        self.sums = "ieee" if v.dtype == torch.float32 else "tf32x3"
        self.q, self.k, self.v = (self.rows(x) for x in (q, k, v))
        self.g = self.q if g is None else g.contiguous()[None] if g.ndim == 1 else self.rows(g)
        self.g_stride = 0 if g is None or g.ndim == 1 else self.g.stride(0)
        self.delta, self.unused = beta is not None, v
        self.beta = self.v if beta is None else self.rows(beta)
        # What states are read, written and erased by, what they decay by, and how many heads share these
        self.reading, self.writing, self.erasing = self.q, self.k, self.k
        self.decays, self.sharing = self.g, self.shared
        self.recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] | None = None

    def start(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        """Launches a kernel, or keeps what it would be launched with."""
        if self.recorded is None:
            kernel[grid](*arguments, **meta)
        else:
            self.recorded.append((kernel, arguments, meta))

    @staticmethod
    def rows(x: Tensor) -> Tensor:
        """`[B,T,...]` as rows of tokens `[B*T,...]`, without a copy where heads lie side by side."""
        return as_rows(x.flatten(2))

    def of_tokens(self, width: int, dtype: torch.dtype) -> Tensor:
        return self.v.new_empty((self.batch, self.length, self.heads, width), dtype=dtype)

    def of_chunks(self, rows: int, columns: int) -> Tensor:
        """A matrix for each chunk of each head, in v's dtype: an operand of products."""
        return self.v.new_empty((self.batch, self.heads, self.chunks, rows, columns))

    def tile(self, kernel: str) -> dict[str, Any]:
        return _tile(kernel, self.keys, self.values, self.decay, self.delta, self.chunk)

    def among(self) -> tuple[Tensor, Tensor]:
        """What is computed of the tokens of each chunk alone: (I + L)^-1 with the delta rule, and A."""
        sizes = self.length, self.heads, self.shared, self.keys, self.chunks
        inverse, weights = self.unused, self.of_chunks(self.chunk, self.chunk)
        grid = (self.batch * self.heads, self.chunks)
        if self.delta:
            inverse = self.of_chunks(self.chunk, self.chunk)
            self.start(
                forward.invert, grid,
                self.k, self.g, self.beta, inverse, *sizes, self.k.stride(0), self.g_stride, self.beta.stride(0),
                DECAY=self.decay, SUMS=self.sums, **self.tile("invert"),
            )  # fmt: skip
        self.start(
            forward.weigh, grid,
            self.q, self.k, self.g, weights, *sizes, self.q.stride(0), self.k.stride(0), self.g_stride,
            DECAY=self.decay, **self.tile("weigh"),
        )  # fmt: skip
        if self.decay == 2:
            self.decay_channels()
        return inverse, weights

    def decay_channels(self) -> None:
        """Queries and keys of each head of v with their decays per channel in place of those without."""
        tile = self.tile("decay_channels")
        self.reading, self.writing = (self.rows(self.of_tokens(self.keys, self.v.dtype)) for _ in range(2))
        self.erasing = torch.empty_like(self.writing) if self.delta else self.writing
        self.decays = self.v.new_empty((self.batch, self.heads, self.chunks, self.keys), dtype=torch.float32)
        self.start(
            forward.decay_channels, (self.batch * self.heads, self.chunks, triton.cdiv(self.keys, tile["BK"])),
            self.q, self.k, self.g, self.reading, self.writing, self.erasing, self.decays,
            self.length, self.heads, self.shared, self.keys, self.chunks,
            self.q.stride(0), self.k.stride(0), self.g_stride, DELTA=self.delta, **tile,
        )  # fmt: skip
        self.sharing = 1

    def walk(
        self, inverse: Tensor, weights: Tensor, state: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states before all chunks, what is written, and the last state; with `out` the outputs and the last."""
        keep = out is None
        states = self.of_chunks(self.keys, self.values) if keep else self.unused
        written = self.of_tokens(self.values, self.v.dtype).flatten(0, 1).flatten(1) if keep and self.delta else self.v
        last = self.v.new_empty((self.batch, self.heads, self.keys, self.values), dtype=torch.float32)
        tile = self.tile("walk")
        self.start(
            forward.walk, (self.batch * self.heads, triton.cdiv(self.values, tile["BV"])),
            self.reading, self.writing, self.v, self.decays, self.erasing, self.beta, inverse, weights,
            self.unused if state is None else state.contiguous(), self.unused if out is None else out, states, written,
            last, *self.sizes(self.sharing), self.reading.stride(0), self.writing.stride(0), self.v.stride(0),
            self.g_stride, self.beta.stride(0), self.scale,
            DECAY=self.decay, DELTA=self.delta, FIRST=state is not None, OUT=not keep, KEEP=keep, **tile,
        )  # fmt: skip
        return states, written, last

    def read(self, weights: Tensor, states: Tensor, written: Tensor, out: Tensor) -> None:
        tile = self.tile("read")
        self.start(
            forward.read, (self.batch * self.heads, self.chunks, triton.cdiv(self.values, tile["BV"])),
            self.reading, self.decays, weights, states, written, out, *self.sizes(self.sharing),
            self.reading.stride(0), self.g_stride, written.stride(0), self.scale,
            DECAY=self.decay, **tile,
        )  # fmt: skip

    def walk_back(
        self, inverse: Tensor, weights: Tensor, douts: Tensor, dlast: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the states after all chunks, of what is written (or of r), and of the first state."""
        dstates, dwritten = self.of_chunks(self.keys, self.values), self.of_tokens(self.values, self.v.dtype)
        dfirst = like(dlast, torch.float32)
        tile = self.tile("walk_back")
        self.start(
            backward.walk_back, (self.batch * self.heads, triton.cdiv(self.values, tile["BV"])),
            self.reading, self.writing, self.decays, self.erasing, self.beta, inverse, weights, douts,
            dlast.contiguous(), dstates, dwritten, dfirst, *self.sizes(self.sharing), self.reading.stride(0),
            self.writing.stride(0), self.g_stride, self.beta.stride(0), douts.stride(0), self.scale,
            DECAY=self.decay, DELTA=self.delta, **tile,
        )  # fmt: skip
        return dstates, dwritten, dfirst

    def gradients(
        self, weights: Tensor, written: Tensor, douts: Tensor, states: Tensor, dstates: Tensor, dwritten: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of q and k for each head of v, of v, of the log decay and of beta."""
        sizes = (
            *self.sizes(self.shared), self.q.stride(0), self.k.stride(0), self.v.stride(0), self.g_stride,
            self.beta.stride(0), written.stride(0), douts.stride(0), self.scale,
        )  # fmt: skip
        partial = self.v.dtype if self.shared == 1 else torch.float32
        dq, dk = (self.of_tokens(self.keys, partial) for _ in range(2))
        dg = self.of_tokens((0, 1, self.keys)[self.decay], torch.float32)
        dv = torch.empty_like(dwritten) if self.delta else dwritten
        if self.decay == 2:
            tile = self.tile("channel_gradients")
            blocks = triton.cdiv(self.keys, tile["BK"])
            dbeta = self.of_tokens(blocks * self.delta, torch.float32)
            self.start(
                backward.channel_gradients, (self.batch * self.heads, self.chunks, blocks),
                self.q, self.k, self.v, self.g, self.beta, written, douts, states, dstates, dwritten,
                dq, dk, dv, dg, dbeta, *sizes, DELTA=self.delta, **tile,
            )  # fmt: skip
            return dq, dk, dv, dg, dbeta.sum(-1, keepdim=True) if self.delta else dbeta
        dbeta = self.of_tokens(int(self.delta), torch.float32)
        self.start(
            backward.gradients, (self.batch * self.heads, self.chunks),
            self.q, self.k, self.v, self.g, self.beta, weights, written, douts, states, dstates, dwritten,
            dq, dk, dv, dg, dbeta, *sizes,
            DECAY=self.decay, DELTA=self.delta, **self.tile("gradients"),
        )  # fmt: skip
        return dq, dk, dv, dg, dbeta

    def sizes(self, shared: int) -> tuple[int, ...]:
        return self.length, self.heads, shared, self.keys, self.values, self.chunks


@custom_op("linear_recurrence")
def _recur(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor | None, scale: float,
    walks: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs in v's dtype and the last state in float32, by one walk or with the states of all chunks stored."""
    with on_device_of(v):
        launch = _Launch(q, k, v, g, beta, scale)
        out = launch.of_tokens(launch.values, v.dtype)
        inverse, weights = launch.among()
        states, written, last = launch.walk(inverse, weights, state, out if walks else None)
        if not walks:
            launch.read(weights, states, written, out)
    return out, last


@_recur.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    q, _, v = given[:3]
    last = v.new_empty((v.shape[0], v.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32)
    return like(v), last


@custom_op("linear_recurrence_backward")
def _recur_backward(
    dout: Tensor, dlast: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
    state: Tensor | None, scale: float, walks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of all tensors in their dtypes, either way to the outputs; those of a log decay or beta that is not
    there are empty."""
    with on_device_of(v):
        launch = _Launch(q, k, v, g, beta, scale)
        inverse, weights = launch.among()
        states, written, _ = launch.walk(inverse, weights, state, None)
        douts = launch.rows(dout)
        dstates, dwritten, dfirst = launch.walk_back(inverse, weights, douts, dlast)
        dq, dk, dv, dg, dbeta = launch.gradients(weights, written, douts, states, dstates, dwritten)
    if launch.shared > 1:
        dq, dk = (x.unflatten(2, (q.shape[2], -1)).sum(3).to(v.dtype) for x in (dq, dk))
    dg = dg.sum((0, 1)) if g is not None and g.ndim == 1 else dg
    dg = dout.new_empty(0) if g is None else dg.reshape(g.shape).to(g.dtype)
    dbeta = dout.new_empty(0) if beta is None else dbeta.squeeze(-1).to(beta.dtype)
    return dq, dk, dv, dg, dbeta, dfirst


@_recur_backward.register_fake
def _(dout: Tensor, dlast: Tensor, *given: Any) -> tuple[Tensor, ...]:
    found = *(dout.new_empty(0) if x is None else x for x in given[:5]), dlast
    return tuple(map(like, found))


differentiable(_recur, _recur_backward, 6)


def linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    state: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments and results are the reference's. Raises ValueError for keys above 128 wide."""
    checked_groups(q, k, v, log_decay, beta, state)
    if q.shape[-1] > WIDEST:
        raise ValueError(f"a program holds all channels of a key: at most {WIDEST}; received {q.shape[-1]}")
    first = None if state is None else state.float()
    out, last = _recur(
        q.to(v.dtype), k.to(v.dtype), v, log_decay, beta, first, scale, v.shape[0] * v.shape[2] >= fills(v)
    )
    return out, last


def fills(x: Tensor) -> int:
    """The programs that keep all multiprocessors busy."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else UNKNOWN_CARD


# Card, name, decay, delta rule, channels, dtype, and which of the two ways to the outputs
BUILDS: tuple[tuple[int, str, int, bool, int, torch.dtype, bool], ...] = (
    (90, "token-128", 1, False, 128, torch.bfloat16, True),
    (90, "delta-token-128", 1, True, 128, torch.bfloat16, True),
    (90, "channel-128", 2, False, 128, torch.bfloat16, True),
    (90, "delta-channel-128", 2, True, 128, torch.bfloat16, True),
    (90, "none-64", 0, False, 64, torch.float16, False),
    (80, "token-128", 1, False, 128, torch.bfloat16, False),
    (80, "channel-128-float32", 2, False, 128, torch.float32, True),
    (86, "delta-token-128", 1, True, 128, torch.bfloat16, True),
    (86, "token-128-float32", 1, False, 128, torch.float32, False),
    (80, "delta-channel-64-float32", 2, True, 64, torch.float32, False),
    (89, "delta-channel-128", 2, True, 128, torch.bfloat16, False),
    (89, "channel-128", 2, False, 128, torch.bfloat16, False),
    (89, "delta-token-64-float32", 1, True, 64, torch.float32, True),
)


def builds() -> Iterator[Build]:
    """Each decay and the delta rule with the widest keys that are chosen, on sm_90; on older cards some on each."""
    for card, name, decay, delta, width, dtype, walks in BUILDS:
        if card == generation():
            yield from _builds(name, decay, delta, width, dtype, walks)


def _builds(name: str, decay: int, delta: bool, width: int, x: torch.dtype, walks: bool) -> Iterator[Build]:
    """The kernels of one kind of recurrence; `walks` says which of the two ways to the outputs."""
    v, state = torch.empty(1, 4096, 16, width, dtype=x), torch.empty(1, 16, width, width)
    per_token = torch.empty(v.shape[:3])
    log_decay = (None, per_token, torch.empty(v.shape))[decay]
    launch = _Launch(v, v, v, log_decay, per_token if delta else None, 0.125)
    launch.recorded = []
    inverse, weights = launch.among()
    states, written, _ = launch.walk(inverse, weights, state, v if walks else None)
    if not walks:
        launch.read(weights, states, written, v)
    dstates, dwritten, _ = launch.walk_back(inverse, weights, launch.v, state)
    launch.gradients(weights, written, launch.v, states, dstates, dwritten)
    for kernel, arguments, meta in launch.recorded:
        yield Build(f"linear_recurrence-{kernel.__name__}-{name}", kernel, arguments, meta)
