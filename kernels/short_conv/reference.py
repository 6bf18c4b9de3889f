"""The short convolution by its formula, in at least float32."""

import torch.nn.functional as F
from torch import Tensor

from archlab.kernels.activations import Activation, activation_of, at_least_float32


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, documents: Tensor | None = None,
    activation: str | Activation = "identity", residual: bool = False, time: int | None = None,
) -> Tensor:  # fmt: skip
    """y_t = act(sum over i < W of w_i x_(t-W+1+i) + b), channel by channel, for the last `time` tokens of x.

    The depthwise causal convolution of H3 (arXiv:2212.14052, section 3.1). x is `[B, S, D]`, `weight` `[D, W]`, `bias`
    `[D]`; the result is `[B, time, D]` in x's dtype, by default for all of x. Before the first token stands zero, and,
    with the numbers of `documents` `[B, S]`, before the first one of each document. With `residual` x_t + y_t.
    """
    wide, width = at_least_float32(x), weight.shape[1]
    before = F.pad(wide, (0, 0, width - 1, 0)).unfold(1, width, 1)  # [B, S, D, W]
    if documents is not None:
        numbers = F.pad(documents, (width - 1, 0), value=-1).unfold(1, width, 1)
        before = before.masked_fill((numbers != documents[..., None])[:, :, None], 0)
    mixed = (before * at_least_float32(weight)).sum(-1)
    y = activation_of(activation)(mixed if bias is None else mixed + at_least_float32(bias))
    y = (wide + y if residual else y).to(x.dtype)
    return y if time is None else y[:, x.shape[1] - time :]
