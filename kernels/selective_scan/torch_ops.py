"""The selective scan chunk by chunk: all of a chunk is computed at once but one multiplication and addition per token.

Only the states between chunks are kept; those within are computed again for the gradient, in chunks as well, so that no
more than one chunk's `[chunk,B,N,C]` lives at a time. All exponents are negative.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.custom_op import custom_op
from archlab.kernels.launch import like
from archlab.kernels.selective_scan.reference import checked

CHUNK = 16  # tokens whose states are held at a time: more leave the caches


def selective_scan(
    x: Tensor, delta: Tensor, log_a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None,
    state: Tensor | None = None, chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments and results are the reference's."""
    checked(x, delta, log_a, b, c, d, state)
    wide = torch.promote_types(x.dtype, torch.float32)
    held = x.new_zeros(x.shape[0], *log_a.shape, dtype=wide) if state is None else state
    y, last, _ = _scan(x, delta, log_a, b, c, held, chunk)
    if d is not None:
        with torch.autocast(x.device.type, enabled=False):
            y = y + at_least_float32(d) * x
    return y.to(x.dtype), last


@custom_op("selective_scan")
def _scan(
    x: Tensor, delta: Tensor, log_a: Tensor, b: Tensor, c: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs without d, the last state, and the states before each chunk `[chunks,B,N,C]`."""
    with torch.autocast(x.device.type, enabled=False):
        inputs, steps, writes, reads = _by_time(x, F.softplus(at_least_float32(delta)), b, c)
        rates = -at_least_float32(log_a).exp().t().contiguous()
        held = at_least_float32(state).transpose(1, 2).contiguous()
        y = torch.empty_like(inputs)
        starts = held.new_empty(-(-x.shape[1] // chunk), *held.shape)
        for index, part in enumerate(_chunks(x.shape[1], chunk)):
            starts[index] = held
            _, states = _states(inputs[part], steps[part], rates, writes[part], held)
            torch.matmul(reads[part][:, :, None], states, out=y[part][:, :, None])
            held = states[-1].clone()
        return y.transpose(0, 1).contiguous(), held.transpose(1, 2).contiguous(), starts


@_scan.register_fake
def _(x: Tensor, delta: Tensor, log_a: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide, chunk = torch.promote_types(x.dtype, torch.float32), rest[-1]
    (batch, length, channels), size = x.shape, log_a.shape[1]
    last = x.new_empty(batch, channels, size, dtype=wide)
    return like(x, wide), last, x.new_empty(-(-length // chunk), batch, size, channels, dtype=wide)


@custom_op("selective_scan_backward")
def _scan_backward(
    dy: Tensor, dlast: Tensor, x: Tensor, delta: Tensor, log_a: Tensor, b: Tensor, c: Tensor, starts: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, delta, log_a, b, c and the first state.

    The gradient g_t of the state h_t is g_t = dy_t c_t + exp(D_{t+1} A) g_{t+1}.
    """
    with torch.autocast(x.device.type, enabled=False):
        inputs, steps, writes, reads, grads = _by_time(x, F.softplus(at_least_float32(delta)), b, c, dy)
        rates = -at_least_float32(log_a).exp().t().contiguous()
        dinputs, dsteps, dwrites, dreads = (torch.empty_like(item) for item in (inputs, steps, writes, reads))
        drates = torch.zeros_like(rates)
        carried = at_least_float32(dlast).transpose(1, 2).contiguous()
        for index, part in reversed(list(enumerate(_chunks(x.shape[1], chunk)))):
            step, before = steps[part], starts[index]
            decays, states = _states(inputs[part], step, rates, writes[part], before)
            dreads[part] = (states * grads[part][:, :, None]).sum(-1)  # faster than a product of matrices
            dstates = reads[part][..., None] * grads[part][:, :, None]
            dstates[-1] += carried
            for t in range(len(states) - 2, -1, -1):
                dstates[t].addcmul_(decays[t + 1], dstates[t + 1])
            carried = decays[0] * dstates[0]
            written = (writes[part][:, :, None] @ dstates).squeeze(2)  # the gradient of D x
            dwrites[part] = (dstates * (step * inputs[part])[:, :, None]).sum(-1)
            dinputs[part] = written * step
            exponents = decays.mul_(dstates)  # the gradient of D A
            exponents[1:] *= states[:-1]
            exponents[0] *= before
            dsteps[part] = (exponents * rates).sum(2).addcmul_(written, inputs[part])
            drates += exponents.mul_(step[:, :, None]).sum((0, 1))
        dsteps *= at_least_float32(delta).sigmoid().transpose(0, 1)
        drates *= rates
        return (
            _as_given(dinputs, x),
            _as_given(dsteps, delta),
            drates.t().to(log_a.dtype).contiguous(),
            _as_given(dwrites, b),
            _as_given(dreads, c),
            carried.transpose(1, 2).contiguous(),
        )


_scan_backward.register_fake(lambda dy, dlast, *given: tuple(map(like, (*given[:5], dlast))))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, state, ctx.chunk = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.dtype = state.dtype


def _gradients(ctx: Any, dy: Tensor, dlast: Tensor, dstarts: Tensor) -> tuple[Tensor | None, ...]:
    *found, dstate = _scan_backward(dy, dlast, *ctx.saved_tensors, ctx.chunk)
    return (*found, dstate.to(ctx.dtype), None)


_scan.register_autograd(_gradients, setup_context=_keep)


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]


def _by_time(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`[B,T,...]` as `[T,B,...]`, contiguous, in at least float32."""
    return tuple(at_least_float32(x).transpose(0, 1).contiguous() for x in tensors)


def _as_given(gradient: Tensor, x: Tensor) -> Tensor:
    """`[T,B,...]` as `[B,T,...]`, contiguous, in the dtype of x."""
    return gradient.transpose(0, 1).to(x.dtype).contiguous()


def _states(inputs: Tensor, steps: Tensor, rates: Tensor, writes: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The decays and the states `[chunk,B,N,C]` of a chunk that starts from the state `before` `[B,N,C]`."""
    decays = (steps[:, :, None] * rates).exp_()
    states = (steps * inputs)[:, :, None] * writes[..., None]
    states[0].addcmul_(decays[0], before)
    for t in range(1, len(states)):
        states[t].addcmul_(decays[t], states[t - 1])
    return decays, states
