"""sLSTM by its definition, token by token, in at least float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.op import check_shapes

EMPTY = -1e30  # the stabilizer of a state that has read nothing: stands for -inf, which has no differences


def checked(gates: Tensor, weights: Tensor, state: Tensor | None) -> None:
    """Raises ValueError if the shapes do not fit each other."""
    if gates.ndim != 5 or gates.shape[2] != 4:
        raise ValueError(f"gates must be [B,T,4,H,D]; received {tuple(gates.shape)}")
    batch, _, _, heads, width = gates.shape
    wanted = {
        "weights": (weights, (4, heads, width, width)),
        "state": (state, (batch, 4, heads, width)),
    }
    check_shapes("gates", gates, wanted)


def first_state(gates: Tensor) -> Tensor:
    """The state before the first token `[B,4,H,D]`."""
    zeros = at_least_float32(gates.new_zeros(gates.shape[0], *gates.shape[2:]))
    return torch.cat([zeros[:, :3], zeros[:, 3:] + EMPTY], 1)


def slstm(gates: Tensor, weights: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gates `[B,T,4,H,D]` and recurrent weights `[4,H,D,D]` give outputs h `[B,T,H,D]` in the gates' dtype and the last
    state `[B,4,H,D]` (arXiv:2405.04517, eq. 8 to 17). What `gates` has of the cell input z and of the input, forget and
    output gates, in this order, is W x_t + b. In each head, with R the `weights`,

        z_t = tanh(z' + R_z h_(t-1))                f_t = sigmoid(f' + R_f h_(t-1))
        i_t = exp(i' + R_i h_(t-1))                 o_t = sigmoid(o' + R_o h_(t-1))
        c_t = f_t c_(t-1) + i_t z_t                 n_t = f_t n_(t-1) + i_t
        h_t = o_t c_t / n_t

    The state is c, n, h and m. c and n are held divided by exp(m_t) with m_t = max(log f_t + m_(t-1), log i_t) (eq. 15
    to 17), and so n is at least 1. Where the input gate is -inf, the state, h with it, stays as it is. States are in at
    least float32.
    """
    checked(gates, weights, state)
    with torch.autocast(gates.device.type, enabled=False):
        own, mixing = at_least_float32(gates), at_least_float32(weights)
        held = first_state(gates) if state is None else at_least_float32(state)
        outputs = []
        for t in range(gates.shape[1]):
            held = step(own[:, t], mixing, held)
            outputs.append(held[:, 2])
        return torch.stack(outputs, 1).to(gates.dtype), held


def step(gates: Tensor, weights: Tensor, held: Tensor) -> Tensor:
    """The state `[B,4,H,D]` after one token."""
    c, n, h, m = held.unbind(1)
    cell, write, forget, read = (gates + mixed(weights, h)).unbind(1)
    faded = F.logsigmoid(forget) + m
    newest = torch.maximum(faded, write)
    kept, share = (faded - newest).exp(), (write - newest).exp()
    c, n = kept * c + share * cell.tanh(), kept * n + share
    h = read.sigmoid() * c / n.clamp(min=1)  # which is 0 before anything is written
    return torch.where(write.isneginf()[:, None], held, torch.stack([c, n, h, newest], 1))


def mixed(weights: Tensor, h: Tensor) -> Tensor:
    """R h for all gates `[...,4,H,D]` from the outputs of the token before `[...,H,D]`."""
    return torch.einsum("ghji,...hi->...ghj", weights, h)
