"""The grouped product of experts by its formula, in at least float32."""

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32


def experts(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """y_r = W_e x_r for the rows r of expert e: `[rows, outputs]` in x's dtype.

    x is `[rows, inputs]`, sorted by expert; weight `[experts, outputs, inputs]`; ends `[experts]` holds the row after
    each expert's last one, so that the last end is the number of rows. An expert may have none.
    """
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(at_least_float32(x).split(sizes), at_least_float32(weight).unbind(), strict=True)
    return torch.cat([part @ matrix.mT for part, matrix in parts]).to(x.dtype)
