"""Trains with each layer as machine code made by torch.compile (inductor), which a store keeps for all its trials."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from archlab.arch_dsl.model.stack import StackModule
from archlab.search.hardware.compiler import cannot_compile, compiler

if TYPE_CHECKING:
    from archlab.arch_dsl.parts.context import Call
    from archlab.search.recipe.recipe import Recipe

FOLDER = "compiled"  # of a store
_DISTINCT = 10_000  # layers that may differ from each other


def compile_blocks(model: nn.Module, rows: int) -> None:
    """Has training run every layer compiled where a micro-batch has `rows` sequences; all else runs as it was.

    So nothing that was compiled before, for a validation or a smaller batch, changes what a step computes, and a trial
    that is continued in another process comes to the same bits. Names of parameters stay.
    """
    for stack in model.modules():
        if isinstance(stack, StackModule):
            for layer in stack.block:
                layer.forward = _compiled(layer, rows)


def _compiled(layer: nn.Module, rows: int) -> Callable[[Tensor, Call], Tensor]:
    """A layer's forward pass, compiled for one number of sequences."""
    plain, fast = layer.forward, torch.compile(layer.forward, dynamic=False, fullgraph=True)

    def forward(stream: Tensor, call: Call) -> Tensor:
        trained = layer.training and torch.is_grad_enabled() and len(stream) == rows
        found: Tensor = (fast if trained else plain)(stream, call)
        return found

    return forward


def compiling(
    recipe: Mapping[str, Any], store: Path, pulse: Callable[[], None] = lambda: None
) -> AbstractContextManager[None]:
    """The context in which a trial of this recipe is trained; says on stderr where it asks for what cannot be done."""
    if recipe.get("compile") != "blocks":
        return nullcontext()
    if missing := cannot_compile():
        print(f"compile: blocks: {missing}; the trial runs uncompiled, which rounds otherwise", file=sys.stderr)
        return nullcontext()
    return compiled_into(store, pulse)


def compiled_with(recipe: Recipe) -> dict[str, str]:
    """What the fingerprint of a trial says of its compilation: by which compiler, or that it had none."""
    if recipe.compile != "blocks":
        return {}
    return {"compiler": "none: uncompiled" if cannot_compile() else _version(compiler())}


@cache
def _version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()[0]


@contextmanager
def compiled_into(store: Path, pulse: Callable[[], None]) -> Iterator[None]:
    """What is compiled meanwhile lies in a folder of the store that is this user's alone; `pulse` is called after each
    piece, as a first step may take minutes. Raises PermissionError where the folder is not private.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor
    from torch._dynamo.callback import callback_handler

    def told(*_: Any) -> None:
        pulse()

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private(store / FOLDER))
    limits: dict[str, Any] = {
        "recompile_limit": _DISTINCT,
        "accumulated_recompile_limit": _DISTINCT,
        "fail_on_recompile_limit_hit": True,
    }
    callback_handler.register_end_callback(told)
    try:
        # one compiling thread: a trial has a core, and leaves no process behind
        with dynamo.patch(limits), inductor.patch({"compile_threads": 1}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # by dynamo's look
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # float32 is what `precision: fp32` means
            yield
    finally:
        callback_handler.remove_end_callback(told)
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def private(folder: Path) -> Path:
    """The part of a folder that is this user's, and nobody else's to write: code that is loaded lies in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = folder / str(os.getuid())
    own.mkdir(mode=0o700, exist_ok=True)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{own} holds code that trials load: it must be a folder of mode 700 that is yours")
    return own
