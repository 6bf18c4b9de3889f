"""What the Triton kernels share: tensors as rows, tiles for the card, and what is compiled ahead of time."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archlab.kernels import interpret, verdicts
from archlab.kernels.device import Device
from archlab.kernels.op import Ask, Call, Implementation

OLDEST = (8, 0)
WINNERS = Path(__file__).with_name("tuned")  # <card>.json: what `archlab bench --tune` found to be fastest there
# Triton 3.10 turns fused multiply-add off by default: every launch says it, so that versions agree.
OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Build:
    """One kernel with one set of flags: tensors as they are or by dtype, numbers by value, constexprs in `meta`."""

    name: str
    kernel: Any
    arguments: tuple[Any, ...]
    meta: Mapping[str, Any]


_tried: dict[str, Mapping[str, int]] = {}
_looked: list[dict[str, tuple[Mapping[str, int | bool], Mapping[str, int]]]] = []
_target: list[int] = []


def capability() -> int:
    """The compute capability that kernels are built for, as 90: of the card here, or the one compiled for; else 90."""
    if _target:
        return _target[-1]
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def generation() -> int:
    """The capability whose tiles the card of `capability()` takes: 80, 86, 89 or 90.

    A B200 (100) takes those of an H100 (90); an RTX 50 (120) those of an RTX 40 (89), as it has no more shared memory,
    and no other instructions for products.
    """
    found = capability()
    return 89 if found >= 120 else min(found, 90)


def tuned(kernel: str, key: Mapping[str, int | bool], default: Mapping[str, int]) -> dict[str, Any]:
    """The tiles, `num_warps` and `num_stages` of a kernel: the committed winner on this card for the key, or `default`.

    Nothing is measured here: a model's first step takes no longer for it.
    """
    for seen in _looked:
        seen[kernel] = key, default
    won: Mapping[str, int] = {} if _target else _winners(card()).get(kernel, {}).get(label(key), {})
    return {**(_tried.get(kernel) or won or default), **OPTIONS}


def label(key: Mapping[str, int | bool]) -> str:
    """A key as it stands in the tables of winners: `D=64 decay=1`."""
    return " ".join(f"{name}={int(value)}" for name, value in sorted(key.items()))


def card() -> str:
    """The name of the CUDA device here as a file's name, such as `nvidia-h200`; empty where there is none."""
    return _card(torch.cuda.current_device()) if torch.cuda.is_available() else ""


@cache
def _card(index: int) -> str:
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(index).lower()).strip("-")


@cache
def _winners(name: str) -> dict[str, dict[str, dict[str, int]]]:
    file = WINNERS / f"{name}.json"
    return json.loads(file.read_text())["winners"] if name and file.exists() else {}


@contextmanager
def trying(kernel: str, tiles: Mapping[str, int]) -> Iterator[None]:
    """Inside it one kernel has these tiles, whatever the tables say."""
    _tried[kernel] = tiles
    try:
        yield
    finally:
        del _tried[kernel]


@contextmanager
def looking() -> Iterator[dict[str, tuple[Mapping[str, int | bool], Mapping[str, int]]]]:
    """What is looked up inside it: the key and the default tiles of each kernel."""
    _looked.append({})
    try:
        yield _looked[-1]
    finally:
        _looked.pop()


@contextmanager
def compiling_for(target: int) -> Iterator[None]:
    """Inside it kernels choose their tiles for a card of this capability, which need not be here."""
    _target.append(target)
    try:
        yield
    finally:
        _target.pop()


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


def in_triton(
    place: str,
    why: str,
    supports: Callable[[Ask], str | None] = unsupported,
    declines: Callable[[Ask], str | None] = slow,
) -> Implementation:
    """The kernels of an op, in `archlab.kernels.NAME.triton` or, with a `place` of `FOLDER.NAME`, that of the folder,
    which is imported where they are chosen."""
    folder, _, name = place.rpartition(".")

    def load() -> Call:
        found: Call = getattr(import_module(f"archlab.kernels.{folder or name}.triton"), name)
        return found

    return Implementation(
        "triton",
        load,
        why,
        lambda ask: supports(ask) or _verdict(name, ask, wrong=True),
        lambda ask: declines(ask) or _verdict(name, ask, wrong=False),
        missing,
    )


def verdicts_of(card: str) -> Path:
    """Where what a card found wrong or slow stands."""
    return WINNERS / f"{card}.verdicts.json"


def _verdict(op: str, ask: Ask, wrong: bool) -> str | None:
    """What the card here has against the kernels of an op, where it is the card that is asked about."""
    if ask.device.kind != "cuda" or not card() or ask.device != Device.current():
        return None
    return verdicts.objection(verdicts_of(card()), op, ask, wrong)


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised memory of x's shape, contiguous, in a dtype that is by default x's."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def side_by_side(x: Tensor) -> Tensor:
    """x with the elements of its last dimension side by side."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """x `[..., D]` as `[M, D]` whose rows are contiguous and equally far apart: a view where strides allow it."""
    return side_by_side(x.reshape(-1, x.shape[-1]))


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Launches inside it go to x's device; kernels would go to the current one, which it mostly is."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else nullcontext()


def power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
