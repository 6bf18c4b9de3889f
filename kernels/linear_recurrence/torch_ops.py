"""The linear recurrence in parallel: over the whole length at once, or chunk by chunk."""

import torch
from torch import Tensor

from kernels.activations import at_least_float32
from kernels.linear_recurrence.reference import checked_groups
from kernels.linear_recurrence.reference import linear_recurrence as step

RESET = -1e4  # exp of it is 0 in any dtype: stands for -inf, whose differences are not defined
__all__ = ["chunked", "parallel", "step"]


def parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The whole length as one chunk: quadratic in T. Arguments and results are the reference's."""
    return chunked(q, k, v, log_decay, beta, state, scale, chunk=q.shape[1])


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    scale: float = 1.0,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Chunks of `chunk` tokens are computed in parallel, and only the states between them one after another.

    Arguments and results are the reference's. The delta rule is in its WY form (arXiv:2406.06484, arXiv:2412.06464).
    """
    shared = checked_groups(q, k, v, log_decay, beta, state)
    with torch.autocast(q.device.type, enabled=False):
        batch, length, heads, width = v.shape
        size = min(chunk, length)
        tail = -length % size

        def split(x: Tensor) -> Tensor:
            """[B,T,H,...] as [B,H,N,C,...]"""
            x = at_least_float32(x)
            if tail:
                x = torch.cat([x, x.new_zeros(batch, tail, *x.shape[2:])], 1)
            return x.reshape(batch, -1, size, *x.shape[2:]).movedim(3, 1)

        queries, keys = (split(x.repeat_interleave(shared, 2)) for x in (q, k))
        values = split(v)
        if log_decay is None:
            log_decay = queries.new_zeros(heads)
        log_decay = at_least_float32(log_decay)
        if log_decay.ndim == 1:
            log_decay = log_decay.expand(batch, length, heads)
        if log_decay.ndim == 3:
            log_decay = log_decay[..., None]
        sums = split(log_decay.clamp(min=RESET)).double().cumsum(3)  # [B,H,N,C,1 or Dk]
        seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        decays = (sums[..., :, None, :] - sums[..., None, :, :]).masked_fill(~seen[..., None], float("-inf"))
        decays = decays.to(queries.dtype).exp()  # [B,H,N,C,C,1 or Dk]

        def products(x: Tensor, y: Tensor) -> Tensor:
            if decays.shape[-1] == 1:
                return x @ y.transpose(-2, -1) * decays[..., 0]
            return torch.einsum("...id,...jd,...ijd->...ij", x, y, decays)

        into = sums.to(queries.dtype).exp()
        rest = (sums[..., -1:, :] - sums).to(queries.dtype).exp()
        weights = products(queries, keys)
        if beta is not None:
            betas = split(beta)[..., None]
            system = (betas * products(keys, keys)).tril(-1) + torch.eye(size, dtype=keys.dtype, device=q.device)
            right = torch.cat([betas * values, betas * keys * into], -1)
            solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
            values, erasers = solved.split([width, keys.shape[-1]], -1)
        held = values.new_zeros(batch, heads, keys.shape[-1], width) if state is None else at_least_float32(state)
        outputs = []
        for n in range(values.shape[2]):
            written = values[:, :, n]
            if beta is not None:
                written = written - erasers[:, :, n] @ held
            outputs.append((queries * into)[:, :, n] @ held + weights[:, :, n] @ written)
            held = into[:, :, n, -1, :, None] * held + (keys * rest)[:, :, n].transpose(-2, -1) @ written
        out = torch.stack(outputs, 2).movedim(1, 3).flatten(1, 2)[:, :length]
        return (scale * out).to(v.dtype), held
