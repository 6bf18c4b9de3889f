"""WKV of RWKV-4 by its definition, token by token, in at least float32."""

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.op import check_shapes

EMPTY = -1e38  # the log of the weight of a state that has seen nothing


def checked(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor | None) -> None:
    """Raises ValueError if the shapes do not fit each other."""
    batch, _, channels = k.shape
    wanted = {
        "v": (v, tuple(k.shape)),
        "decay": (decay, (channels,)),
        "bonus": (bonus, (channels,)),
        "state": (state, (batch, 2, channels)),
    }
    check_shapes("k", k, wanted)


def first_state(k: Tensor) -> Tensor:
    """The state `[B,2,C]` before any token, in at least float32: the mean of nothing, with no weight."""
    empty = k.new_zeros(k.shape[0], 2, k.shape[2], dtype=torch.promote_types(k.dtype, torch.float32))
    return empty.index_fill(1, torch.ones(1, dtype=torch.long, device=k.device), EMPTY)


def wkv4(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """k, v `[B,T,C]` give wkv `[B,T,C]` in v's dtype and the last state `[B,2,C]` (arXiv:2305.13048, eq. 16).

    Every channel is a mean of what it has seen, weighted by exp(k) and by how long ago it was; the newest value counts
    exp(u) times:

        y_t = (sum of exp(k_i - (t - 1 - i) w) v_i over i < t, and exp(u + k_t) v_t)
              / (sum of exp(k_i - (t - 1 - i) w) over i < t, and exp(u + k_t))

    with w = exp(decay) > 0 and u = bonus, both `[C]`. The sums a and b are held divided by exp(p) with p the largest
    exponent that they hold (appendix D). A state is the mean a / b and the log of the weight, p + log b; it is in at
    least float32, by default of no weight.
    """
    checked(k, v, decay, bonus, state)
    with torch.autocast(k.device.type, enabled=False):
        keys, values, first, last = (at_least_float32(x) for x in (k, v, bonus, decay))
        a, p = (first_state(k) if state is None else at_least_float32(state)).unbind(1)
        b = torch.ones_like(a)
        outputs = []
        for t in range(k.shape[1]):
            new = first + keys[:, t]
            top = torch.maximum(p, new).detach()
            old, own = (p - top).exp(), (new - top).exp()
            outputs.append((old * a + own * values[:, t]) / (old * b + own))
            faded = p - last.exp()
            top = torch.maximum(faded, keys[:, t]).detach()
            old, own = (faded - top).exp(), (keys[:, t] - top).exp()
            a, b, p = old * a + own * values[:, t], old * b + own, top
        return torch.stack(outputs, 1).to(v.dtype), torch.stack([a / b, p + b.log()], 1)
