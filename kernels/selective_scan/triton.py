"""The selective scan in Triton: a program walks through time with the states of its channels in registers.

Forward keeps the states before every chunk of CHUNK tokens, as torch's chunks do. Backward walks from the last chunk to
the first, computes the states of GROUP tokens at a time again from the one before their chunk, and leaves sums over
blocks of channels (of b and c) and over sequences (of log_a and d) to torch.
"""

# Tuples in kernels grow by sums, all that Triton knows of them:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from archlab.kernels import interpret
from archlab.kernels.custom_op import custom_op
from archlab.kernels.gradients import differentiable
from archlab.kernels.launch import Build, as_rows, like, on_device_of, power_of_2, tuned
from archlab.kernels.selective_scan import torch_ops
from archlab.kernels.selective_scan.reference import STATES, checked

interpret.apply()
CHUNK = 8 if interpret.small_tiles() else torch_ops.CHUNK
GROUP = 4 if interpret.small_tiles() else 2  # tokens at a time, as many as registers hold
WIDEST = STATES[0]  # numbers in the state of a channel
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); what 1 + e loses of a small e is put back."""
    e = tl.exp(-tl.abs(x))
    rounded = 1.0 + e
    kept = rounded - 1.0
    return tl.maximum(x, 0.0) + tl.where(kept == 0, e, tl.log(rounded) * (e / tl.where(kept == 0, 1.0, kept)))


@triton.jit
def _tokens(ptr, start, row, row_stride, T, place, size, COUNT: tl.constexpr):
    """What COUNT tokens from `start` on have at `place`, in float32; 0 beyond the last of them, and of `size`."""
    found = ()
    for i in tl.static_range(COUNT):
        mask = place < tl.where(start + i < T, size, 0)
        found = found + (tl.load(ptr + (row + start + i) * row_stride + place, mask=mask, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _keep(ptr, found, start, row, row_stride, T, place, size, COUNT: tl.constexpr):
    """Store what `_tokens` would load."""
    for i in tl.static_range(COUNT):
        mask = place < tl.where(start + i < T, size, 0)
        tl.store(ptr + (row + start + i) * row_stride + place, found[i].to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _steps(ptr, start, row, row_stride, T, channel, C, COUNT: tl.constexpr):
    """softplus(delta) and its derivative of COUNT tokens from `start` on: 0 after the last, which leaves states."""
    steps, slopes = (), ()
    for i in tl.static_range(COUNT):
        mask = channel < tl.where(start + i < T, C, 0)
        x = tl.load(ptr + (row + start + i) * row_stride + channel, mask=mask, other=float("-inf")).to(tl.float32)
        steps, slopes = steps + (_softplus(x),), slopes + (tl.sigmoid(x),)
    return steps, slopes


@triton.jit
def _rates(log_a, channel, n, C, N):
    """A log2(e) `[N,C]`, so that a decay is a power of 2."""
    found = tl.load(log_a + channel * N + n, mask=(channel < C) & (n < N), other=0.0).to(tl.float32)
    return -tl.exp(found) * LOG2_E


@triton.jit
def _states(held, steps, inputs, writes, rates, COUNT: tl.constexpr):
    """The state before each of COUNT tokens, and that after them."""
    found = (held,)
    for i in tl.static_range(COUNT):
        held = tl.exp2(steps[i] * rates) * held + (steps[i] * inputs[i]) * writes[i]
        found = found + (held,)
    return found


@triton.jit
def _forward(
    x, delta, log_a, b, c, d, first, y, last, starts, T, C, N, x_row, delta_row, b_row, c_row,
    SKIP: tl.constexpr, FIRST: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    batch, chunks = tl.program_id(0).to(tl.int64), tl.cdiv(T, CHUNK)
    channel, n = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :], tl.arange(0, STATE)[:, None]
    here, row = channel < C, batch * T
    inside = here & (n < N)
    rates = _rates(log_a, channel, n, C, N)
    held = tl.zeros((STATE, CHANNELS), tl.float32)
    if FIRST:
        held += tl.load(first + (batch * C + channel) * N + n, mask=inside, other=0.0).to(tl.float32)
    if SKIP:
        skip = tl.load(d + channel, mask=here, other=0.0).to(tl.float32)
    for chunk in range(0, chunks):
        tl.store(starts + ((batch * chunks + chunk) * N + n) * C + channel, held, mask=inside)
        for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, GROUP):
            inputs = _tokens(x, start, row, x_row, T, channel, C, GROUP)
            steps, _ = _steps(delta, start, row, delta_row, T, channel, C, GROUP)
            writes = _tokens(b, start, row, b_row, T, n, N, GROUP)
            reads = _tokens(c, start, row, c_row, T, n, N, GROUP)
            states, outs = _states(held, steps, inputs, writes, rates, GROUP), ()
            for i in tl.static_range(GROUP):
                out = tl.sum(states[i + 1] * reads[i], 0)[None, :]
                if SKIP:
                    out += skip * inputs[i]
                outs = outs + (out,)
            held = states[GROUP]
            _keep(y, outs, start, row, C, T, channel, C, GROUP)
    tl.store(last + (batch * C + channel) * N + n, held, mask=inside)


@triton.jit
def _backward(
    dy, dlast, x, delta, log_a, b, c, d, starts, dx, ddelta, dlog_a, db, dc, dd, dfirst, T, C, N,
    dy_row, x_row, delta_row, b_row, c_row,
    SKIP: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """The gradient g_t of the state h_t is dy_t c_t + exp(D_{t+1} A) g_{t+1}; `carried` is its second part."""
    batch, chunks = tl.program_id(0).to(tl.int64), tl.cdiv(T, CHUNK)
    channel, n = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :], tl.arange(0, STATE)[:, None]
    here, row = channel < C, batch * T
    inside = here & (n < N)
    part = (tl.program_id(1) * tl.num_programs(0) + batch) * T  # of the sums over channels, a part for each block
    rates = _rates(log_a, channel, n, C, N)
    carried = tl.load(dlast + (batch * C + channel) * N + n, mask=inside, other=0.0).to(tl.float32)
    drates, dskip = tl.zeros((STATE, CHANNELS), tl.float32), tl.zeros((1, CHANNELS), tl.float32)
    if SKIP:
        skip = tl.load(d + channel, mask=here, other=0.0).to(tl.float32)
    for back in range(0, chunks * (CHUNK // GROUP)):
        group = chunks * (CHUNK // GROUP) - 1 - back
        chunk, start = group // (CHUNK // GROUP), group * GROUP
        held = tl.load(starts + ((batch * chunks + chunk) * N + n) * C + channel, mask=inside, other=0.0)
        for early in range(chunk * CHUNK, start, GROUP):
            inputs = _tokens(x, early, row, x_row, T, channel, C, GROUP)
            steps, _ = _steps(delta, early, row, delta_row, T, channel, C, GROUP)
            writes = _tokens(b, early, row, b_row, T, n, N, GROUP)
            held = _states(held, steps, inputs, writes, rates, GROUP)[GROUP]
        inputs = _tokens(x, start, row, x_row, T, channel, C, GROUP)
        steps, slopes = _steps(delta, start, row, delta_row, T, channel, C, GROUP)
        writes = _tokens(b, start, row, b_row, T, n, N, GROUP)
        grads = _tokens(dy, start, row, dy_row, T, channel, C, GROUP)
        states = _states(held, steps, inputs, writes, rates, GROUP - 1)
        dinputs, ddeltas = (), ()
        for i in tl.static_range(GROUP - 1, -1, -1):
            decay, written = tl.exp2(steps[i] * rates), steps[i] * inputs[i]
            write = _tokens(b, start + i, row, b_row, T, n, N, 1)[0]
            read = _tokens(c, start + i, row, c_row, T, n, N, 1)[0]
            faded, dstate = decay * states[i], carried + read * grads[i]
            dexponent = dstate * faded  # of D A
            carried = decay * dstate
            drates += dexponent * steps[i]
            dwritten = tl.sum(dstate * write, 0)[None, :]  # of D x
            dinput = dwritten * steps[i]
            if SKIP:
                dinput += skip * grads[i]
                dskip += grads[i] * inputs[i]
            dstep = tl.sum(dexponent * rates, 0)[None, :] * LN_2 + dwritten * inputs[i]
            dinputs, ddeltas = (dinput,) + dinputs, (dstep * slopes[i],) + ddeltas
            dread = tl.sum((faded + written * write) * grads[i], 1)[:, None]
            _keep(db, (tl.sum(dstate * written, 1)[:, None],), start + i, part, N, T, n, N, 1)
            _keep(dc, (dread,), start + i, part, N, T, n, N, 1)
        _keep(dx, dinputs, start, row, C, T, channel, C, GROUP)
        _keep(ddelta, ddeltas, start, row, C, T, channel, C, GROUP)
    tl.store(dlog_a + (batch * C + channel) * N + n, drates * rates * LN_2, mask=inside)
    tl.store(dfirst + (batch * C + channel) * N + n, carried, mask=inside)
    if SKIP:
        tl.store(dd + batch * C + channel, dskip, mask=here)


def _tile(kernel: str, state: int) -> dict[str, Any]:
    """Few threads in a program, as a card is filled by batch x channels alone: a channel for each of 32, or 16 with
    wide states, which more of them share."""
    size = power_of_2(state)
    default = {"CHANNELS": 32, "num_warps": 1} if size <= 16 else {"CHANNELS": 16, "num_warps": size // 8}
    own = {"CHUNK": CHUNK, "GROUP": GROUP, "STATE": size}
    return {**tuned(f"selective_scan-{kernel}", {"N": state}, default), **own}


def _blocks(channels: int, tile: dict[str, Any]) -> int:
    return triton.cdiv(channels, tile["CHANNELS"])  # type: ignore[no-any-return]


@custom_op("selective_scan_walk")
def _scan(
    x: Tensor, delta: Tensor, log_a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs in x's dtype, the last state, and the states before the chunks `[B,chunks,N,C]`, in float32."""
    (batch, length, channels), size = x.shape, log_a.shape[1]
    rows = [as_rows(item) for item in (x, delta, b, c)]
    y, last, starts = _room(x, delta, log_a)
    tile = _tile("forward", size)
    with on_device_of(x):
        _forward[batch, _blocks(channels, tile)](
            *rows[:2], log_a.contiguous(), *rows[2:], y if d is None else d.contiguous(),
            last if state is None else state.contiguous(), y, last, starts, length, channels, size,
            *(item.stride(0) for item in rows), SKIP=d is not None, FIRST=state is not None, **tile,
        )  # fmt: skip
    return y, last, starts


@_scan.register_fake
def _room(x: Tensor, delta: Tensor, log_a: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, length, channels), size = x.shape, log_a.shape[1]
    last = x.new_empty((batch, channels, size), dtype=torch.float32)
    return like(x), last, x.new_empty((batch, -(-length // CHUNK), size, channels), dtype=torch.float32)


@custom_op("selective_scan_walk_backward")
def _scan_backward(
    dy: Tensor, dlast: Tensor, dstarts: Tensor, x: Tensor, delta: Tensor, log_a: Tensor, b: Tensor, c: Tensor,
    d: Tensor | None, state: Tensor | None, starts: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of all arguments in their dtypes, of the first state in float32; that of no d is empty."""
    (batch, length, channels), size = x.shape, log_a.shape[1]
    rows = [as_rows(item) for item in (dy, x, delta, b, c)]
    dx, ddelta = like(x), like(delta)
    dlog_a, dfirst = (x.new_empty((batch, channels, size), dtype=torch.float32) for _ in range(2))
    dd = x.new_empty((batch, 0 if d is None else channels), dtype=torch.float32)
    tile = _tile("backward", size)
    blocks = _blocks(channels, tile)
    db, dc = (x.new_empty((blocks, batch, length, size), dtype=torch.float32) for _ in range(2))
    with on_device_of(x):
        _backward[batch, blocks](
            rows[0], dlast.contiguous(), *rows[1:3], log_a.contiguous(), *rows[3:], dd if d is None else d.contiguous(),
            starts, dx, ddelta, dlog_a, db, dc, dd, dfirst, length, channels, size,
            *(item.stride(0) for item in rows), SKIP=d is not None, **tile,
        )  # fmt: skip
    dlog_a, db, dc = dlog_a.sum(0).to(log_a.dtype), db.sum(0).to(b.dtype), dc.sum(0).to(c.dtype)
    return dx, ddelta, dlog_a, db, dc, dd.sum(0).to(dd.dtype if d is None else d.dtype), dfirst


@_scan_backward.register_fake
def _(dy: Tensor, dlast: Tensor, dstarts: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *found, d = given[:6]
    dd = dy.new_empty(0, dtype=torch.float32) if d is None else d
    return *map(like, (*found, dd)), like(dlast, torch.float32)


differentiable(_scan, _scan_backward, 7, kept=slice(2, 3))


def selective_scan(
    x: Tensor, delta: Tensor, log_a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Arguments and results are the reference's. Raises ValueError for states of more than 64 numbers."""
    checked(x, delta, log_a, b, c, d, state)
    if log_a.shape[1] > WIDEST:
        raise ValueError(f"a thread holds the state of a channel: at most {WIDEST} numbers; received {log_a.shape[1]}")
    y, last, _ = _scan(x, delta, log_a, b, c, d, state)
    return y, last


def builds() -> Iterator[Build]:
    """States of 16 numbers as in Mamba, of 32 and of 64, the most; inputs of 16 bits, parameters in float32 as under
    autocast."""
    x, wide, channels = torch.bfloat16, torch.float32, 2048
    for state in (16, 32, WIDEST):
        sizes, rows = (4096, channels, state), (channels, channels, state, state)
        forward = (x, x, wide, x, x, wide, wide, x, wide, wide, *sizes, *rows)
        flags = {"SKIP": True, "FIRST": True, **_tile("forward", state)}
        yield Build(f"selective_scan-forward-{state}", _forward, forward, flags)
        backward = (x, wide, x, x, wide, x, x, wide, wide, x, x, wide, wide, wide, wide, wide, *sizes, channels, *rows)
        yield Build(f"selective_scan-backward-{state}", _backward, backward, {"SKIP": True, **_tile("backward", state)})
