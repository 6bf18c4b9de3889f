"""WKV of RWKV-4 with all chunks of a sequence at once, from the first token of each to its last, and then joined.

The state is a weighted mean m and the log of its weight L, so that nothing can overflow. With f_t = exp(k_t - L_t), the
share of the newest value,

    L_t = log(exp(L_{t-1} - w) + exp(k_t)),    m_t = m_{t-1} + f_t (v_t - m_{t-1}),
    y_t = m_{t-1} + q_t (v_t - m_{t-1})  with  q_t = sigmoid(u + k_t - L_{t-1}).

The gradients of m and L are linear recurrences with the factors 1 - f_t, from the last token to the first.
"""

import math
from typing import Any

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.custom_op import custom_op
from archlab.kernels.gradients import differentiable
from archlab.kernels.launch import like
from archlab.kernels.wkv4.reference import EMPTY, checked, first_state


def wkv4(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Arguments and results are the reference's. `chunk` is by default the root of the length."""
    checked(k, v, decay, bonus, state)
    held = first_state(k) if state is None else state
    y, means, weights = _wkv(k, v, decay, bonus, held, chunk or math.isqrt(k.shape[1] - 1) + 1)
    return y, torch.stack([means[:, -1], weights[:, -1]], 1)


@custom_op("wkv4")
def _wkv(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs, and of the states after each token the means and the logs of the weights, `[B,T,C]` each."""
    with torch.autocast(k.device.type, enabled=False):
        keys, values, first, rate = (at_least_float32(x) for x in (k, v, bonus, decay))
        mean, weight = at_least_float32(state).unbind(1)
        weights = _log_sums(keys, rate.exp(), weight, chunk)
        share = (keys - weights).exp_()
        means = _recurrence(1 - share, share * values, mean, chunk)
        old = _before(means, mean)
        y = old + (first + keys - _before(weights, weight)).sigmoid_() * (values - old)
        return y.to(v.dtype), means, weights


@_wkv.register_fake
def _(k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(k.dtype, torch.float32)
    return like(k, v.dtype), like(k, wide), like(k, wide)


@custom_op("wkv4_backward")
def _wkv_backward(
    dy: Tensor, dmeans: Tensor, dweights: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor,
    means: Tensor, weights: Tensor, chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of k, v, decay, bonus and the first state."""
    with torch.autocast(k.device.type, enabled=False):
        keys, values, first, rate, grad = (at_least_float32(x) for x in (k, v, bonus, decay, dy))
        mean, weight = at_least_float32(state).unbind(1)
        old = _before(means, mean)
        apart = values - old
        share = (keys - weights).exp_()
        kept = 1 - share
        own = (first + keys - _before(weights, weight)).sigmoid_()
        # What reaches the state before token t from y_t, and then what reaches the state after it.
        into = (1 - own) * grad
        dm, dm_first = _reversed(kept, into, dmeans, chunk)
        through_own = grad * own * (1 - own) * apart
        through_share = dm * share * kept * apart
        dw, dw_first = _reversed(kept, -(through_own + through_share), dweights, chunk)
        dk = through_own + through_share + share * dw
        dv = share * dm + own * grad
        drate = (through_share - kept * dw).sum((0, 1)) * rate.exp()
        first_states = torch.stack([dm_first, dw_first], 1)
        return (
            dk.to(k.dtype),
            dv.to(v.dtype),
            drate.to(decay.dtype),
            through_own.sum((0, 1)).to(bonus.dtype),
            first_states.to(state.dtype),
        )


_wkv_backward.register_fake(lambda dy, dmeans, dweights, *given: tuple(map(like, given[:5])))


differentiable(_wkv, _wkv_backward, 5, kept=slice(1, 3))


def _before(states: Tensor, first: Tensor) -> Tensor:
    """The state before each token, from those after each `[B,T,C]` and the first `[B,C]`."""
    return torch.cat([first[:, None], states[:, :-1]], 1)


def _split(x: Tensor, chunk: int, filler: float) -> Tensor:
    """`[B,T,C]` as `[B,chunks,chunk,C]`; what is missing at the end is filled."""
    missing = -x.shape[1] % chunk
    if missing:
        x = torch.cat([x, x.new_full((x.shape[0], missing, x.shape[2]), filler)], 1)
    parts: Tensor = x.unflatten(1, (-1, chunk))
    return parts


def _joined(parts: Tensor, length: int) -> Tensor:
    """`[B,chunks,chunk,C]` as `[B,T,C]`, contiguous and with memory of its own."""
    whole = parts.flatten(1, 2)
    return whole if whole.shape[1] == length else whole[:, :length].clone(memory_format=torch.contiguous_format)


def _log_sums(keys: Tensor, rate: Tensor, first: Tensor, chunk: int) -> Tensor:
    """L_t = log(exp(L_{t-1} - rate) + exp(k_t)) `[B,T,C]` with L_0 = `first` `[B,C]`."""
    parts = _split(keys, chunk, EMPTY)
    local = torch.empty_like(parts)
    local[:, :, 0] = parts[:, :, 0]
    for t in range(1, chunk):
        torch.logaddexp(local[:, :, t - 1] - rate, parts[:, :, t], out=local[:, :, t])
    starts = torch.empty_like(parts[:, :, 0])
    held = first
    for index in range(parts.shape[1]):
        starts[:, index] = held
        held = torch.logaddexp(held - chunk * rate, local[:, index, -1])
    faded = starts[:, :, None] - torch.arange(1, chunk + 1, device=keys.device)[:, None] * rate
    return _joined(torch.logaddexp(local, faded), keys.shape[1])


def _recurrence(factors: Tensor, added: Tensor, first: Tensor, chunk: int) -> Tensor:
    """x_t = factors_t x_{t-1} + added_t `[B,T,C]` with x_0 = `first` `[B,C]`; factors are between 0 and 1."""
    products, local = _split(factors, chunk, 1.0).clone(), _split(added, chunk, 0.0).clone()
    for t in range(1, chunk):
        local[:, :, t].addcmul_(products[:, :, t], local[:, :, t - 1])
        products[:, :, t] *= products[:, :, t - 1]
    starts = torch.empty_like(local[:, :, :1])
    held = first
    for index in range(local.shape[1]):
        starts[:, index, 0] = held
        held = torch.addcmul(local[:, index, -1], products[:, index, -1], held)
    return _joined(local.addcmul_(products, starts), factors.shape[1])


def _reversed(factors: Tensor, added: Tensor, given: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """x_{t-1} = factors_t x_t + added_t, and in x_t also what is given at t: all x_t `[B,T,C]`, and x_0 `[B,C]`."""
    last = given[:, -1]
    steps = added.clone()
    steps[:, 1:] += given[:, :-1]
    earlier = _recurrence(factors.flip(1), steps.flip(1), last, chunk).flip(1)  # x_0 to x_{T-1}
    return torch.cat([earlier[:, 1:], last[:, None]], 1), earlier[:, 0]
