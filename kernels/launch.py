"""What the Triton kernels share: tensors as rows, tile sizes, and the list of what is compiled ahead of time."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kernels import interpret
from kernels.op import Ask

OLDEST = (8, 0)
# Triton 3.10 turns fused multiply-add off by default: every launch says it, so that versions agree.
OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Build:
    """One kernel with one set of flags: tensors are given by dtype, numbers by value, `meta` are the constexprs."""

    name: str
    kernel: Any
    arguments: tuple[torch.dtype | int | float, ...]
    meta: Mapping[str, Any]


def missing() -> str | None:
    """Why this machine cannot run Triton kernels at all: there are no wheels for macOS."""
    return None if find_spec("triton") else "Triton is not installed"


def unsupported(ask: Ask) -> str | None:
    """Why no Triton kernel of ours serves the ask, whatever the op."""
    if ask.device.kind == "cpu" and not interpret.active():
        return "runs on CUDA; on the CPU only in the interpreter (TRITON_INTERPRET=1)"
    if ask.device.capability is not None and ask.device.capability < OLDEST:
        return f"needs sm_80 or later, not {ask.device}"
    return "computes in float32" if ask.dtype == torch.float64 else None


def slow(ask: Ask) -> str | None:
    """The interpreter is there to check kernels, not to train with."""
    return "its interpreter is a thousand times slower than torch" if ask.device.kind == "cpu" else None


def as_rows(x: Tensor) -> Tensor:
    """x `[..., D]` as `[M, D]` whose rows are contiguous and equally far apart: a view where strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.shape[1] == 1 or rows.stride(1) == 1 else rows.contiguous()


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Launches inside it go to x's device; kernels would go to the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
