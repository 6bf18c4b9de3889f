"""The rows of a chunk by torch: their losses from logits in memory, which become their gradients in place."""

from functools import partial

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.linear_cross_entropy.chunks import Form, Rows, run
from archlab.kernels.linear_cross_entropy.reference import IGNORED


def measure(logits: Tensor, targets: Tensor, form: Form, gradient: bool) -> tuple[Tensor, Tensor]:
    """As `Rows` says. log Z = l - log softmax(l) for the largest logit l, whose share is at least 1 / V."""
    wide, slope = _mapped(logits, form)
    index = targets.masked_fill(targets == IGNORED, 0)
    own = wide.gather(-1, index[:, None])[:, 0]
    largest = wide.amax(-1)
    shares = torch.softmax(wide, -1, out=wide)
    log_z = largest - shares.amax(-1).log()
    if gradient:
        scored = (targets != IGNORED).to(wide.dtype)
        _differentiate(shares, slope, index, scored * (1 + 2 * form.z * log_z), scored)
        if wide is not logits:
            logits.copy_(wide)
    return log_z - own, log_z


def differentiate(logits: Tensor, targets: Tensor, log_z: Tensor, push: Tensor, pull: Tensor, form: Form) -> None:
    """As `Rows` says."""
    wide, slope = _mapped(logits, form)
    shares = wide.sub_(log_z[:, None]).exp_()
    _differentiate(shares, slope, targets.masked_fill(targets == IGNORED, 0), push, pull)
    if wide is not logits:
        logits.copy_(wide)


def _mapped(logits: Tensor, form: Form) -> tuple[Tensor, Tensor | None]:
    """The logits scaled and capped, in place where they are wide, and the slope of the cap."""
    wide = at_least_float32(logits)
    if form.scale != 1:
        wide.mul_(form.scale)
    if form.softcap is None:
        return wide, None
    slope = wide.div_(form.softcap).tanh_().square().neg_().add_(1)
    return wide.mul_(form.softcap), slope


def _differentiate(shares: Tensor, slope: Tensor | None, index: Tensor, push: Tensor, pull: Tensor) -> None:
    shares.mul_(push[:, None])
    shares[torch.arange(len(index), device=index.device), index] -= pull
    if slope is not None:
        shares.mul_(slope)


ROWS = Rows(measure, differentiate)
linear_cross_entropy = partial(run, "torch")
