"""WKV of RWKV-7 by its definition, token by token, in at least float32."""

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.op import check_shapes


def checked(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, removal: Tensor, rate: Tensor, state: Tensor | None
) -> None:
    """Raises ValueError if the shapes do not fit each other."""
    batch, length, heads, width = r.shape
    wanted = {
        "k": (k, tuple(r.shape)),
        "v": (v, (batch, length, heads, v.shape[-1])),
        "log_decay": (log_decay, tuple(r.shape)),
        "removal": (removal, tuple(r.shape)),
        "rate": (rate, tuple(r.shape)),
        "state": (state, (batch, heads, width, v.shape[-1])),
    }
    check_shapes("r", r, wanted)


def wkv7(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, removal: Tensor, rate: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """r, k, log_decay, removal and rate `[B,T,H,Dk]` and v `[B,T,H,Dv]` give outputs `[B,T,H,Dv]` in v's dtype and the
    last state `[B,H,Dk,Dv]` (arXiv:2503.14456, section 4, with states transposed).

    With w = exp(log_decay), kappa the removal key and a the rate, every head has a state S_t `[Dk,Dv]`:

        S_t = Diag(w_t) S_(t-1) - (a_t * kappa_t) (S_(t-1)^T kappa_t)^T + k_t v_t^T
        o_t = S_t^T r_t

    `log_decay` <= 0; `state` is S_0, by default 0. States are in at least float32.
    """
    checked(r, k, v, log_decay, removal, rate, state)
    with torch.autocast(r.device.type, enabled=False):
        reads, keys, removed, rates = (at_least_float32(x) for x in (r, k, removal, rate))
        values, factors = at_least_float32(v), at_least_float32(log_decay).exp()
        batch, length, heads, width = values.shape
        held = values.new_zeros(batch, heads, r.shape[-1], width) if state is None else at_least_float32(state)
        written = torch.stack([keys, -rates * removed], -1)  # [B,T,H,Dk,2]
        outputs = []
        for t in range(length):
            erased = removed[:, t, :, None, :] @ held  # [B,H,1,Dv]
            news = torch.cat([values[:, t, :, None, :], erased], -2)
            held = factors[:, t, :, :, None] * held + written[:, t] @ news
            outputs.append((reads[:, t, :, None, :] @ held).squeeze(-2))
        return torch.stack(outputs, 1).to(v.dtype), held
