"""sLSTM token by token with its gradients written out: one operator, which torch.compile does not unroll."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.custom_op import custom_op
from archlab.kernels.gradients import differentiable
from archlab.kernels.slstm.reference import checked, first_state, mixed, step


def slstm(gates: Tensor, weights: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Arguments and results are the reference's. Kept for the backward pass: the gates and states of all tokens."""
    checked(gates, weights, state)
    h, states = _slstm(gates, weights, first_state(gates) if state is None else state)
    return h, states[:, -1].clone()


@custom_op("slstm")
def _slstm(gates: Tensor, weights: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs `[B,T,H,D]`, and the states after each token `[B,T,4,H,D]`."""
    with torch.autocast(gates.device.type, enabled=False):
        own, mixing, held = (at_least_float32(x) for x in (gates, weights, state))
        states = torch.empty_like(own, memory_format=torch.contiguous_format)
        for t in range(gates.shape[1]):
            held = step(own[:, t], mixing, held)
            states[:, t] = held
        return states[:, :, 2].to(gates.dtype, copy=True, memory_format=torch.contiguous_format), states


@_slstm.register_fake
def _(gates: Tensor, weights: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, _, heads, width = gates.shape
    states = gates.new_empty(gates.shape, dtype=torch.promote_types(gates.dtype, torch.float32))
    return gates.new_empty(batch, length, heads, width), states


@custom_op("slstm_backward")
def _slstm_backward(
    dh: Tensor, dstates: Tensor, gates: Tensor, weights: Tensor, state: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gates, weights and the first state.

    The gates of all tokens are computed at once; only the gradients of the state pass from token to token.
    """
    with torch.autocast(gates.device.type, enabled=False):
        own, mixing, first = (at_least_float32(x) for x in (gates, weights, state))
        before = torch.cat([first[:, None], states[:, :-1]], 1)
        c, n, _, m = states.unbind(2)
        last_c, last_n, last_h, last_m = before.unbind(2)
        cell, write, forget, read = (own + mixed(mixing, last_h)).unbind(2)
        faded = F.logsigmoid(forget) + last_m
        kept, share, fades = (faded - m).exp(), (write - m).exp(), faded > write
        cell, read, written = cell.tanh(), read.sigmoid(), n.clamp(min=1)
        stays = write.isneginf()
        kept, read = kept.masked_fill(stays, 1), read.masked_fill(stays, 0)
        to_read = c / written * read * (1 - read)
        to_c, to_n = read / written, -read * c / written.square() * (n >= 1)
        to_cell, to_forget = share * (1 - cell.square()), (-forget).sigmoid().masked_fill(stays, 0)
        draws = torch.empty_like(own)
        dc, dn, back, dm = (torch.zeros_like(m[:, 0]) for _ in range(4))
        for t in reversed(range(gates.shape[1])):
            back = back + dstates[:, t, 2] + dh[:, t]
            dc, dn = dc + dstates[:, t, 0] + back * to_c[:, t], dn + dstates[:, t, 1] + back * to_n[:, t]
            dwrite = (dc * cell[:, t] + dn) * share[:, t]
            dfaded = (dc * last_c[:, t] + dn * last_n[:, t]) * kept[:, t]
            dm = dm + dstates[:, t, 3] - dwrite - dfaded  # which the larger of the two exponents gets
            dwrite, dm = torch.where(fades[:, t], dwrite, dwrite + dm), torch.where(fades[:, t], dfaded + dm, dfaded)
            draws[:, t] = torch.stack([dc * to_cell[:, t], dwrite, dm * to_forget[:, t], back * to_read[:, t]], 1)
            dc, dn = dc * kept[:, t], dn * kept[:, t]
            back = back * stays[:, t] + torch.einsum("ghji,bghj->bhi", mixing, draws[:, t])
        dweights = torch.einsum("btghj,bthi->ghji", draws, last_h)
        return draws, dweights, torch.stack([dc, dn, back, dm], 1)


@_slstm_backward.register_fake
def _(dh: Tensor, dstates: Tensor, gates: Tensor, weights: Tensor, state: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    wide = torch.promote_types(gates.dtype, torch.float32)
    return tuple(x.new_empty(x.shape, dtype=wide) for x in (gates, weights, state))


differentiable(_slstm, _slstm_backward, tensors=3, kept=slice(1, 2))
