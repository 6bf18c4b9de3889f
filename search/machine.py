"""What this machine computes with, as findings: cores, memory, compiler, torch, GPUs and Triton."""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]

GIB = 2**30
# A trial's process holds torch and a small model (0.5 to 0.8 GiB measured); below this per core, trials may be killed.
MEMORY_PER_TRIAL_GIB = 1.0


@dataclass(frozen=True)
class Finding:
    """One fact: `detail` is what was found, `meaning` what follows for a study. Only `fail` stops a study."""

    name: str
    status: Status
    detail: str
    meaning: str


def machine() -> list[Finding]:
    """The findings of this file, in the order in which they are read. Imports torch."""
    basics = [_python(), _cores(), _memory(), _compiler()]
    try:
        import torch
    except (ImportError, OSError) as error:
        return [*basics, Finding("torch", "fail", str(error), "nothing trains without it")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    trouble = "; ".join(str(warning.message).splitlines()[0] for warning in caught)
    gpus = [_gpu(index, torch.cuda.get_device_properties(index)) for index in range(count)]
    return [*basics, _torch(), *(gpus or [_no_gpu(trouble, torch.version.cuda is not None)]), _triton(count > 0)]


def version_of(distribution: str) -> str | None:
    """The installed version, None where there is none. Reads metadata and imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    detail = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    return Finding("python", "ok", detail, f"runs on {platform.system()} {platform.machine()}")


def usable_cores() -> int:
    """The cores that this process may use: the affinity mask, or a container's quota where that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_limit("cpu.max")
    return allowed if quota is None else max(1, min(allowed, math.floor(quota)))


def _cores() -> Finding:
    usable = usable_cores()
    detail = f"{usable} usable of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}"
    trials = "one trial at a time" if usable == 1 else f"up to {usable} trials side by side"
    return Finding("cores", "ok", detail, f"{trials}, one core each unless the study's `resources` says more")


def memory() -> tuple[int, int]:
    """Bytes that are available now, and bytes in all: the machine's, or a container's limit where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.M) if meminfo.exists() else None
    available = int(match[1]) * 1024 if match else total
    limit = _cgroup_limit("memory.max")
    if limit is not None:
        total, available = min(total, int(limit)), min(available, int(limit))
    return available, total


def usable_gpus() -> int:
    """The GPUs that torch can use here. Imports torch, and starts no CUDA."""
    import torch

    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `archlab doctor` tells what torch warns about
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _memory() -> Finding:
    available, total = memory()
    detail = f"{available / GIB:.1f} GiB available of {total / GIB:.1f}"
    fits = int(available / GIB / MEMORY_PER_TRIAL_GIB)
    if fits < usable_cores():
        return Finding("memory", "warn", detail, f"room for about {fits} small trials at once, fewer than cores")
    return Finding("memory", "ok", detail, "enough for one small trial on every core")


def _cgroup_limit(name: str) -> float | None:
    """A limit of the container, None where there is none: cores for `cpu.max`, bytes for `memory.max` (cgroup v2)."""
    path = Path("/sys/fs/cgroup") / name
    if not path.exists():
        return None
    value, *period = path.read_text().split()
    return None if value == "max" else float(value) / (float(period[0]) if period else 1.0)


def compiler() -> tuple[str | None, list[str]]:
    """The C++ compiler that torch.compile takes, None where it cannot build; what it misses."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    found, header = shutil.which(name), Path(sysconfig.get_paths()["include"]) / "Python.h"
    wanted = f"{name} (or a C++ compiler that CXX names)"
    missing = [what for what, there in ((wanted, found), (str(header), header.exists())) if not there]
    return (None if missing else found), missing


def _compiler() -> Finding:
    """What torch.compile and Triton need on the host: a C++ compiler and Python's headers."""
    found, missing = compiler()
    if missing:
        detail = f"{' and '.join(missing)} not found"
        meaning = "torch.compile and Triton cannot build here: `compile: blocks` trains uncompiled, and slower"
        return Finding("compiler", "warn", detail, meaning)
    return Finding("compiler", "ok", str(found), "torch.compile can build for this CPU")


def _torch() -> Finding:
    import torch

    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    capability = torch.backends.cpu.get_cpu_capability()
    detail = f"{torch.__version__}, built for {build}, {torch.get_num_threads()} threads, {capability}"
    return Finding("torch", "ok", detail, "each trial is given as many threads as it has cores")


def _gpu(index: int, properties: Any) -> Finding:
    """`properties` is what `torch.cuda.get_device_properties` gives."""
    capability = f"sm_{properties.major}{properties.minor}"
    detail = f"{properties.name}, {capability}, {properties.total_memory / GIB:.0f} GiB"
    if properties.major < 8:
        return Finding(f"gpu {index}", "warn", detail, "older than sm_80: bf16 is slow, the Triton kernels untested")
    return Finding(f"gpu {index}", "ok", detail, "bf16 and the Triton kernels run natively")


def _no_gpu(trouble: str, cuda_build: bool) -> Finding:
    """`trouble` is what torch warned about when asked for devices."""
    if trouble:
        return Finding("gpu", "warn", trouble, "trials train on the CPU until torch can use the device")
    if shutil.which("nvidia-smi") and not cuda_build:
        detail = "nvidia-smi is here, but torch is built without CUDA"
        return Finding("gpu", "warn", detail, "trials train on the CPU; a CUDA build of torch would use the GPU")
    return Finding("gpu", "ok", "none", "trials train on the CPU")


def _triton(gpu: bool) -> Finding:
    version = version_of("triton")
    if version is None:
        return Finding("triton", "ok", "not installed", "every op takes its torch path; Triton exists for Linux only")
    if os.environ.get("TRITON_INTERPRET") == "1":
        meaning = "kernels are interpreted, hundreds of times slower: for tests, not for studies"
        return Finding("triton", "warn", f"{version}, interpreter (TRITON_INTERPRET=1)", meaning)
    if gpu:
        return Finding("triton", "ok", f"{version}, native", "ops with a Triton kernel use it on the GPU")
    meaning = "trials take the torch path; tests interpret the kernels and compile them ahead of time"
    return Finding("triton", "ok", f"{version}, no GPU", meaning)
