"""The gated linear recurrence by its definition, step by step, in at least float32."""

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32


def checked_groups(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None
) -> int:
    """How many heads of v share a head of q and k. Raises ValueError if the shapes do not fit each other."""
    (batch, length, groups, width), heads = q.shape, v.shape[2]
    per_token = (batch, length, heads)
    if k.shape != q.shape or v.shape[:2] != q.shape[:2] or heads % groups:
        raise ValueError(
            "q and k must be [B,T,G,Dk] and v [B,T,H,Dv] with G dividing H; "
            f"received {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if log_decay is not None and log_decay.shape not in ((heads,), per_token, (*per_token, width)):
        raise ValueError(
            f"log_decay must be [H], [B,T,H] or [B,T,H,Dk], here with H = {heads} and Dk = {width}; "
            f"received {tuple(log_decay.shape)}"
        )
    if beta is not None and beta.shape != per_token:
        raise ValueError(f"beta must be [B,T,H], here {per_token}; received {tuple(beta.shape)}")
    if state is not None and state.shape != (batch, heads, width, v.shape[-1]):
        raise ValueError(
            f"state must be [B,H,Dk,Dv], here {(batch, heads, width, v.shape[-1])}; received {tuple(state.shape)}"
        )
    return heads // groups


def linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    state: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q, k `[B,T,G,Dk]` and v `[B,T,H,Dv]` give outputs `[B,T,H,Dv]` in v's dtype and the last state `[B,H,Dk,Dv]`.

    With S' = exp(g_t) S_{t-1}, g being `log_decay`, every head has a state S_t `[Dk,Dv]`:

        S_t = S' + k_t v_t^T                                     without beta
        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T                 with beta: the delta rule
        o_t = scale S_t^T q_t

    H is a multiple of G; consecutive heads of v share a head of q and k. `log_decay` <= 0 is None (no decay), `[H]`
    (the same at all times), `[B,T,H]`, or `[B,T,H,Dk]` (one per channel of the key, a row of the state); -inf forgets
    all that was before. `beta` is `[B,T,H]`, `state` S_0 `[B,H,Dk,Dv]`, by default 0. States are in at least float32.
    """
    shared = checked_groups(q, k, v, log_decay, beta, state)
    with torch.autocast(q.device.type, enabled=False):
        queries, keys = (at_least_float32(x).repeat_interleave(shared, 2)[..., None] for x in (q, k))  # [B,T,H,Dk,1]
        values = at_least_float32(v)[..., None, :]  # [B,T,H,1,Dv]
        factors = None if log_decay is None else at_least_float32(log_decay).exp()
        if factors is not None and factors.ndim == 1:
            factors = factors.expand(v.shape[:3])
        batch, length, heads, _, width = values.shape
        held = values.new_zeros(batch, heads, q.shape[-1], width) if state is None else at_least_float32(state)
        outputs = []
        for t in range(length):
            if factors is not None:
                held = factors[:, t].reshape(batch, heads, -1, 1) * held
            written = values[:, t]
            if beta is not None:
                erased = keys[:, t].transpose(-2, -1) @ held
                written = at_least_float32(beta)[:, t, :, None, None] * (written - erased)
            held = held + keys[:, t] @ written
            outputs.append((queries[:, t].transpose(-2, -1) @ held).squeeze(-2))
        return (scale * torch.stack(outputs, 1)).to(v.dtype), held
