"""An H100 that is not there: in a process that pretends, tensors on `cuda` have shapes and no values.

What a card would say of itself is said here; what it would compute is not computed. `watch.py` looks at what is asked
of it.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("guard.cpp")
NAME = "NVIDIA H100 80GB HBM3"


class Properties(NamedTuple):
    """What is read of a device's properties."""

    name: str = NAME
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = 80 * 2**30
    uuid: str = "none"


# What functions of torch.cuda answer.
SAID = {
    "is_available": True,
    "is_initialized": True,
    "is_bf16_supported": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_capability": (9, 0),
    "get_device_name": NAME,
    "get_device_properties": Properties(),
    "is_current_stream_capturing": False,
    "get_sync_debug_mode": 0,
    "set_sync_debug_mode": None,
    "synchronize": None,
    "empty_cache": None,
    "reset_peak_memory_stats": None,
    "max_memory_allocated": 0,
    "manual_seed_all": None,
    "set_rng_state": None,
    "_lazy_init": None,
    "_is_in_bad_fork": False,
}


def build_guard(compiler: str, folder: Path) -> Path:
    """The library of guard.cpp for the torch that is installed. Raises CalledProcessError where it does not compile."""
    spec = find_spec("torch")
    assert spec and spec.origin
    root, out = Path(spec.origin).parent, folder / "guard.so"
    headers = [f"-I{root / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    flags = ["-O0", "-shared", "-fPIC", "-std=c++20", *headers]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(out), *libraries], check=True)
    return out


def pretend(guard: Path) -> None:
    """Has torch, which nobody has imported yet, believe in the card, in this process from now on."""
    assert "torch" not in sys.modules, "torch asked for its devices already"
    ctypes.CDLL(str(guard), mode=os.RTLD_GLOBAL)
    import torch
    from torch._subclasses import fake_impls, fake_tensor

    for name, said in SAID.items():
        setattr(torch.cuda, name, lambda *_, said=said, **__: said)
    torch.cuda._initialized = True
    torch.cuda.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    for module in (fake_tensor, fake_impls):
        if hasattr(module, "init_gpu_context"):
            module.init_gpu_context = lambda *_, **__: None
