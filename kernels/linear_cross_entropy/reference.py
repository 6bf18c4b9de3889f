"""The loss of a table of logits by its formula, all logits at once, in at least float32."""

import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.activations import at_least_float32

IGNORED = -100


def linear_cross_entropy(
    hidden: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None = None, scale: float = 1.0,
    softcap: float | None = None, z: float = 0.0, reduction: str = "none", rows: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """log Z - l_t and log^2 Z with Z = sum_v exp(l_v), the latter for a z-loss (arXiv:2204.02311, section 5).

    l = softcap(scale (hidden table^T + bias)), softcap(x) = c tanh(x / c) (arXiv:2408.00118, section 2). hidden is
    `[N, D]`, table `[V, D]`, targets `[N]`, of which -100 is ignored (both results are 0), bias `[V]`.

    Both are `[N]`. With the reduction `sum` the first is the sum of losses + z squares, and the second that of squares,
    without a gradient. `rows` of logits are held at a time by implementations that can do so.
    """
    logits = scale * F.linear(*(None if x is None else at_least_float32(x) for x in (hidden, table, bias)))  # type: ignore[arg-type]
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    ignored = targets == IGNORED
    own = logits.gather(-1, targets.masked_fill(ignored, 0)[:, None])[:, 0]
    log_z = logits.logsumexp(-1)
    losses, squares = (log_z - own).masked_fill(ignored, 0), log_z.square().masked_fill(ignored, 0)
    if reduction == "none":
        return losses, squares
    return (losses + z * squares).sum(), squares.sum().detach()
