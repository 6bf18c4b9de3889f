"""The selective scan by its definition, token by token, in at least float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.op import check_shapes

STATES = (64, 128)  # numbers in the state of a channel: at most 64, and more


def checked(
    x: Tensor, delta: Tensor, log_a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor | None
) -> None:
    """Raises ValueError if the shapes do not fit each other."""
    batch, length, channels = x.shape
    size = log_a.shape[-1]
    wanted = {
        "delta": (delta, (batch, length, channels)),
        "log_a": (log_a, (channels, size)),
        "b": (b, (batch, length, size)),
        "c": (c, (batch, length, size)),
        "d": (d, (channels,)),
        "state": (state, (batch, channels, size)),
    }
    check_shapes("x", x, wanted)


def selective_scan(
    x: Tensor, delta: Tensor, log_a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x `[B,T,C]` gives y `[B,T,C]` in its dtype and the last state `[B,C,N]` (arXiv:2312.00752, algorithm 2).

    Every channel has a state h of N numbers, which decay at rates A of their own, all in steps of a length that depends
    on the token:

        h_t = exp(D_t A) h_{t-1} + D_t x_t b_t        with D_t = softplus(delta_t) and A = -exp(log_a) < 0
        y_t = <c_t, h_t> + d x_t

    `delta` is `[B,T,C]`, `log_a` `[C,N]`, `b` and `c` `[B,T,N]`, `d` `[C]`. `state` `[B,C,N]` is h_0, by default 0.
    States are in at least float32.
    """
    checked(x, delta, log_a, b, c, d, state)
    with torch.autocast(x.device.type, enabled=False):
        inputs, steps = at_least_float32(x), F.softplus(at_least_float32(delta))
        rates = -at_least_float32(log_a).exp()
        writes, reads = (at_least_float32(item) for item in (b, c))
        held = inputs.new_zeros(x.shape[0], *log_a.shape) if state is None else at_least_float32(state)
        outputs = []
        for t in range(x.shape[1]):
            step = steps[:, t, :, None]
            held = (step * rates).exp() * held + step * inputs[:, t, :, None] * writes[:, t, None, :]
            outputs.append((held @ reads[:, t, :, None]).squeeze(-1))
        y = torch.stack(outputs, 1)
        return (y if d is None else y + at_least_float32(d) * inputs).to(x.dtype), held
