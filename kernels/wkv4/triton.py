"""WKV of RWKV-4 in Triton: a program walks through time with the states of its channels in registers.

Tokens come in groups, whose loads are under way before the first is used. Forward keeps the states before the groups;
backward walks from the last group to the first, computes the states within each again, and leaves the gradients of
decay and bonus of each sequence to a sum by torch. The states and gradients are those of `torch_ops`.
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
from archlab.kernels.launch import Build, as_rows, like, on_device_of, tuned
from archlab.kernels.wkv4.reference import EMPTY, checked

interpret.apply()
NOTHING = tl.constexpr(EMPTY)
GROUP = 4 if interpret.small_tiles() else 16  # tokens between two states that are kept


@triton.jit
def _shares(x):
    """sigmoid(x) and sigmoid(-x), each to its own last digits, and log(1 + exp(-|x|))."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 / (1.0 + small)
    less = small * more
    return tl.where(x > 0, more, less), tl.where(x > 0, less, more), tl.log(1.0 + small)


@triton.jit
def _after(mean, weight, key, value, rate):
    """The state after a token."""
    faded = weight - rate
    share, _, more = _shares(key - faded)
    return mean + share * (value - mean), tl.maximum(faded, key) + more


@triton.jit
def _there(index, size, token, T):
    """Which of `size` indices there are of a token; none after the last one."""
    return index < tl.where(token < T, size, 0)


@triton.jit
def _tokens(ptr, start, row, row_stride, T, channel, C, other, GROUP: tl.constexpr):
    """A group of tokens from `start` on, in float32, with `other` after the last one."""
    found = ()
    for i in tl.static_range(GROUP):
        place = ptr + (row + start + i) * row_stride + channel
        found = found + (tl.load(place, mask=_there(channel, C, start + i, T), other=other).to(tl.float32),)
    return found


@triton.jit
def _state(ptr, which, C, channel, inside):
    """The mean and the log of the weight of state number `which`."""
    place = ptr + which * 2 * C + channel
    mean = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return mean, tl.load(place + C, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _keep(ptr, which, C, channel, inside, mean, weight):
    tl.store(ptr + which * 2 * C + channel, mean, mask=inside)
    tl.store(ptr + which * 2 * C + C + channel, weight, mask=inside)


@triton.jit
def _forward(
    k, v, decay, bonus, first, y, last, starts, T, C, k_row, v_row,
    FIRST: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside, row, groups = channel < C, batch * T, tl.cdiv(T, GROUP)
    rate = tl.exp(tl.load(decay + channel, mask=inside, other=0.0).to(tl.float32))
    own = tl.load(bonus + channel, mask=inside, other=0.0).to(tl.float32)
    mean, weight = tl.zeros((CHANNELS,), tl.float32), tl.full((CHANNELS,), NOTHING, tl.float32)
    if FIRST:
        mean, weight = _state(first, batch, C, channel, inside)
    for group in range(0, groups):
        start = group * GROUP
        _keep(starts, batch * groups + group, C, channel, inside, mean, weight)
        keys = _tokens(k, start, row, k_row, T, channel, C, float("-inf"), GROUP)
        values = _tokens(v, start, row, v_row, T, channel, C, 0.0, GROUP)
        found = ()
        for i in tl.static_range(GROUP):
            share, _, _ = _shares(own + keys[i] - weight)
            found = found + (mean + share * (values[i] - mean),)
            next_mean, next_weight = _after(mean, weight, keys[i], values[i], rate)
            exists = _there(channel, C, start + i, T)
            mean, weight = tl.where(exists, next_mean, mean), tl.where(exists, next_weight, weight)
        for i in tl.static_range(GROUP):
            place = y + (row + start + i) * C + channel
            tl.store(place, found[i].to(y.dtype.element_ty), mask=_there(channel, C, start + i, T))
    _keep(last, batch, C, channel, inside, mean, weight)


@triton.jit
def _backward(
    dy, dlast, k, v, decay, bonus, starts, dk, dv, ddecay, dbonus, dfirst, T, C, dy_row, k_row, v_row,
    GROUP: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside, row, groups = channel < C, batch * T, tl.cdiv(T, GROUP)
    rate = tl.exp(tl.load(decay + channel, mask=inside, other=0.0).to(tl.float32))
    own = tl.load(bonus + channel, mask=inside, other=0.0).to(tl.float32)
    drate, down = tl.zeros((CHANNELS,), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    dmean, dweight = _state(dlast, batch, C, channel, inside)
    for step in range(0, groups):
        group = groups - 1 - step
        start = group * GROUP
        keys = _tokens(k, start, row, k_row, T, channel, C, float("-inf"), GROUP)
        values = _tokens(v, start, row, v_row, T, channel, C, 0.0, GROUP)
        grads = _tokens(dy, start, row, dy_row, T, channel, C, 0.0, GROUP)
        mean, weight = _state(starts, batch * groups + group, C, channel, inside)
        means, weights = (mean,), (weight,)
        for i in tl.static_range(GROUP - 1):
            mean, weight = _after(mean, weight, keys[i], values[i], rate)
            means, weights = means + (mean,), weights + (weight,)
        for i in tl.static_range(GROUP - 1, -1, -1):
            apart, exists = values[i] - means[i], _there(channel, C, start + i, T)
            share, kept, _ = _shares(keys[i] - (weights[i] - rate))
            newest, older, _ = _shares(own + keys[i] - weights[i])
            through_newest = grads[i] * newest * older * apart
            through_share = dmean * share * kept * apart
            dkey, dvalue = through_newest + through_share + share * dweight, share * dmean + newest * grads[i]
            place = (row + start + i) * C + channel
            tl.store(dk + place, dkey.to(dk.dtype.element_ty), mask=exists)
            tl.store(dv + place, dvalue.to(dv.dtype.element_ty), mask=exists)
            drate += tl.where(exists, through_share - kept * dweight, 0.0)
            down += tl.where(exists, through_newest, 0.0)
            dweight = tl.where(exists, kept * dweight - (through_newest + through_share), dweight)
            dmean = tl.where(exists, kept * dmean + older * grads[i], dmean)
    tl.store(ddecay + batch * C + channel, drate * rate, mask=inside)
    tl.store(dbonus + batch * C + channel, down, mask=inside)
    _keep(dfirst, batch, C, channel, inside, dmean, dweight)


def _tile(kernel: str) -> dict[str, Any]:
    """A channel for each thread, and few threads in a program: a card is filled by batch x channels alone."""
    return {**tuned(f"wkv4-{kernel}", {}, {"CHANNELS": 32, "num_warps": 1}), "GROUP": GROUP}


def _grid(k: Tensor, tile: dict[str, Any]) -> tuple[int, int]:
    return k.shape[0], triton.cdiv(k.shape[2], tile["CHANNELS"])


@custom_op("wkv4_walk")
def _wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs in v's dtype, the last state, and the states before the groups `[B,groups,2,C]` in float32."""
    (_, length, channels), keys, values = k.shape, as_rows(k), as_rows(v)
    y, last, starts = _room(k, v)
    tile = _tile("forward")
    with on_device_of(k):
        _forward[_grid(k, tile)](
            keys, values, decay.contiguous(), bonus.contiguous(), last if state is None else state.contiguous(),
            y, last, starts, length, channels, keys.stride(0), values.stride(0), FIRST=state is not None, **tile,
        )  # fmt: skip
    return y, last, starts


@_wkv.register_fake
def _room(k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, channels = k.shape
    last = k.new_empty((batch, 2, channels), dtype=torch.float32)
    return like(v), last, k.new_empty((batch, -(-length // GROUP), 2, channels), dtype=torch.float32)


@custom_op("wkv4_walk_backward")
def _wkv_backward(
    dy: Tensor, dlast: Tensor, dstarts: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor,
    state: Tensor | None, starts: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of k, v, decay and bonus in their dtypes, and of the first state in float32."""
    (batch, length, channels), keys, values, grads = k.shape, as_rows(k), as_rows(v), as_rows(dy)
    dk, dv = like(k), like(v)
    ddecay, dbonus = (k.new_empty((batch, channels), dtype=torch.float32) for _ in range(2))
    dfirst = k.new_empty((batch, 2, channels), dtype=torch.float32)
    tile = _tile("backward")
    with on_device_of(k):
        _backward[_grid(k, tile)](
            grads, dlast.contiguous(), keys, values, decay.contiguous(), bonus.contiguous(), starts,
            dk, dv, ddecay, dbonus, dfirst, length, channels, grads.stride(0), keys.stride(0), values.stride(0), **tile,
        )  # fmt: skip
    return dk, dv, ddecay.sum(0).to(decay.dtype), dbonus.sum(0).to(bonus.dtype), dfirst


_wkv_backward.register_fake(lambda dy, dlast, _, *given: (*map(like, given[:4]), like(dlast, torch.float32)))


differentiable(_wkv, _wkv_backward, 5, kept=slice(2, 3))


def wkv4(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Arguments and results are the reference's."""
    checked(k, v, decay, bonus, state)
    y, last, _ = _wkv(k, v, decay, bonus, state)
    return y, last


def builds() -> Iterator[Build]:
    """Keys and values of 16 bits, parameters in float32, as under autocast."""
    x, wide, sizes = torch.bfloat16, torch.float32, (4096, 2048)
    forward = (x, x, wide, wide, wide, x, wide, wide, *sizes, 2048, 2048)
    yield Build("wkv4-forward", _forward, forward, {"FIRST": True, **_tile("forward")})
    backward = (x, wide, x, x, wide, wide, wide, x, x, wide, wide, wide, *sizes, 2048, 2048, 2048)
    yield Build("wkv4-backward", _backward, backward, _tile("backward"))
