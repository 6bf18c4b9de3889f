"""The rows of a chunk in Triton: one kernel that reads a row of logits for its loss, and again for its gradient.

A program holds one row and walks over it in blocks. The sum of exponentials grows with the largest logit so far
(arXiv:1805.02867, algorithm 3), in base 2; the second walk writes the gradient over the logits.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from archlab.kernels import interpret
from archlab.kernels.launch import Build, on_device_of, power_of_2, tuned
from archlab.kernels.linear_cross_entropy.chunks import Form, Rows, run

interpret.apply()

BLOCK = 4096


@triton.jit
def _mapped(logits, scale, softcap, CAPPED: tl.constexpr):
    """Scaled and capped logits and the slope of the cap: tanh by exp of a number below 0, and so never of infinity."""
    x = logits.to(tl.float32) * scale
    slope = 1.0
    if CAPPED:
        x = x / softcap
        small = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(x))
        tanh = tl.where(x < 0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)
        slope = 4.0 * small / ((1.0 + small) * (1.0 + small))
        x = softcap * tanh
    return x, slope


@triton.jit
def _rows(
    logits_ptr, targets_ptr, losses_ptr, log_z_ptr, push_ptr, pull_ptr, V, scale, softcap, z,
    MEASURE: tl.constexpr, DIFFERENTIATE: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With MEASURE losses and log Z are written, and the gradient is that of losses + z log^2 Z; else push and pull say
    what of softmax and target it is. The gradient leaves out the factor of the scale."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    target = tl.load(targets_ptr + row)
    scored = target != -100
    if MEASURE:
        inside = (target >= 0) & (target < V)  # read before the reductions: the second walk overwrites it
        own, _ = _mapped(tl.load(logits_ptr + target, mask=inside, other=0.0), scale, softcap, CAPPED)
        largest = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            read = tl.load(logits_ptr + column, mask=column < V, other=0.0)
            x, slope = _mapped(read, scale, softcap, CAPPED)
            x = tl.where(column < V, x, float("-inf")) * 1.4426950408889634
            before = largest
            largest = tl.maximum(largest, tl.max(x, 0))
            safe = tl.where(largest == float("-inf"), 0.0, largest)
            total = total * tl.exp2(before - safe) + tl.sum(tl.exp2(x - safe), 0)
        log2_z = largest + tl.log2(total)
        log_z = log2_z / 1.4426950408889634
        tl.store(log_z_ptr + row, log_z)
        tl.store(losses_ptr + row, tl.where(inside, log_z - own, float("nan")))
        pull = tl.where(scored, 1.0, 0.0)
        push = pull * (1.0 + 2.0 * z * log_z)
    else:
        log2_z = tl.load(log_z_ptr + row) * 1.4426950408889634
        pull = tl.load(pull_ptr + row)
        push = tl.load(push_ptr + row)
    if DIFFERENTIATE:
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            read = tl.load(logits_ptr + column, mask=column < V, other=0.0)
            x, slope = _mapped(read, scale, softcap, CAPPED)
            share = tl.exp2(x * 1.4426950408889634 - log2_z)
            gradient = (push * share - tl.where(column == target, pull, 0.0)) * slope
            gradient = tl.where(scored, gradient, 0.0)
            tl.store(logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=column < V)


def _tile(vocab: int, dtype: torch.dtype) -> dict[str, Any]:
    """Blocks of a row, with 16 elements of it for a thread."""
    block = min(BLOCK, max(128, power_of_2(vocab)))
    default = {"BLOCK": block, "num_warps": max(1, min(8, block // 512))}
    return tuned("linear_cross_entropy", {"vocab": power_of_2(vocab), "float32": dtype == torch.float32}, default)


def measure(logits: Tensor, targets: Tensor, form: Form, gradient: bool) -> tuple[Tensor, Tensor]:
    """As `Rows` says; a target outside the table has the loss NaN."""
    (rows, vocab), tile = logits.shape, _tile(logits.shape[1], logits.dtype)
    losses, log_z = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    capped = form.softcap is not None
    with on_device_of(logits):
        _rows[(rows,)](
            logits, targets, losses, log_z, losses, losses, vocab, form.scale, form.softcap or 1.0, form.z,
            True, gradient, capped, **tile,
        )  # fmt: skip
    return losses, log_z


def differentiate(logits: Tensor, targets: Tensor, log_z: Tensor, push: Tensor, pull: Tensor, form: Form) -> None:
    """As `Rows` says."""
    (rows, vocab), tile = logits.shape, _tile(logits.shape[1], logits.dtype)
    capped = form.softcap is not None
    with on_device_of(logits):
        _rows[(rows,)](
            logits, targets, log_z, log_z, push, pull, vocab, form.scale, form.softcap or 1.0, form.z,
            False, True, capped, **tile,
        )  # fmt: skip


ROWS = Rows(measure, differentiate)


linear_cross_entropy = partial(run, "triton")


def builds() -> Iterator[Build]:
    """What the forward pass, training and the backward pass without a reduction launch, with and without a cap."""
    wide, index = torch.float32, torch.int64
    uses = {"loss": (True, False), "both": (True, True), "gradient": (False, True)}
    for use, (measured, differentiated) in uses.items():
        for capped, dtype, vocab in ((False, torch.bfloat16, 32000), (True, torch.bfloat16, 256), (True, wide, 32000)):
            flags = {"MEASURE": measured, "DIFFERENTIATE": differentiated, "CAPPED": capped, **_tile(vocab, dtype)}
            name = f"linear_cross_entropy-{use}-{'softcap' if capped else 'plain'}-{str(dtype)[6:]}-{vocab}"
            yield Build(name, _rows, (dtype, index, wide, wide, wide, wide, vocab, 1.0, 30.0, 1e-4), flags)
