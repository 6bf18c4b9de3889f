"""Which keys a forget gate has closed for a query: what adaptive computation pruning leaves out."""

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.activations import at_least_float32


def reach(q: Tensor, k: Tensor, decay: Tensor, scale: float, lost: float, window: int | None = None) -> Tensor:
    """For each query `[B,Hq,T]` the largest decay of a key that it reads, so that the weights of all others together
    are less than `lost`, whatever else lowers their logits (arXiv:2504.06949, section 3.2).

    q `[B,Hq,T,D]`, k `[B,Hkv,S,D]` and decay c `[B or 1,Hq,S]` are the reference's. As query i reads its own key, key j
    has at most the weight exp(2 U + c_i - c_j) where |scale q_i k_j| <= U, so that of n keys those are closed that have
    c_j > c_i + 2 U + log(n / lost). The paper takes U and n of the whole sequence; here U is |scale| |q_i| times the
    largest norm of a key up to i (among the last `window`), and n their number, so that no later token matters.
    """
    length, total, groups = q.shape[-2], k.shape[-2], q.shape[1] // k.shape[1]
    norms = at_least_float32(k.detach()).norm(dim=-1)
    count = torch.arange(total - length + 1, total + 1, device=q.device)
    if window is None:
        largest = norms.cummax(-1).values
    else:
        most = min(window, total)
        largest, count = F.max_pool1d(F.pad(norms, (most - 1, 0)), most, 1), count.clamp(max=window)
    largest = largest[..., total - length :].repeat_interleave(groups, 1)
    bound = abs(scale) * at_least_float32(q.detach()).norm(dim=-1) * largest
    found: Tensor = decay.detach()[..., total - length :] + 2 * bound + (count / lost).log()
    return found
