"""What this machine computes with, as findings: cores, memory, compiler, torch, GPUs and Triton."""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]

GIB = 2**30
_GROUPS, _GROUPS_OF = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # of control groups, and which are ours
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
    basics = [_python(), _cores(), _memory()]
    try:
        import torch
    except (ImportError, OSError) as error:
        return [*basics, Finding("torch", "fail", str(error), "nothing trains without it")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    trouble = "; ".join(str(warning.message).splitlines()[0] for warning in caught)
    gpus = [_gpu(index, torch.cuda.get_device_properties(index)) for index in range(count)]
    return [
        *basics,
        _compiler(),
        _torch(),
        *(gpus or [_no_gpu(trouble, torch.version.cuda is not None)]),
        _triton(count > 0),
    ]


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
    return max(1, min([allowed, *map(math.floor, _quotas())]))


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
    for limit, used in _memory_limits():
        total, available = min(total, limit), min(available, max(limit - used, 0))
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


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of this process's control groups that limit a resource, from its own up, and the version (1 or 2).

    In a container the path may be that of the machine, where there is none: then the root says what the container has.
    """
    lines = _GROUPS_OF.read_text().splitlines() if _GROUPS_OF.exists() else ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controllers if controllers else _GROUPS
        own = root / path.lstrip("/")
        yield from ((each, 1 if controllers else 2) for each in (own, *own.parents) if each.is_relative_to(root))


def _quotas() -> Iterator[float]:
    """Cores that control groups allow."""
    for group, version in _groups("cpu"):
        quota, *period = _said(group / "cpu.max") if version == 2 else _said(group / "cpu.cfs_quota_us")
        period = period or _said(group / "cpu.cfs_period_us")
        if quota not in ("", "max", "-1") and period[0]:
            yield int(quota) / int(period[0])


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Bytes that control groups allow, and those of them in use that the kernel could not take back."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), 2: ("memory.max", "memory.current", "")}
    for group, version in _groups("memory"):
        limit, used, prefix = names[version]
        (most, *_), (now, *_) = _said(group / limit), _said(group / used)
        if most not in ("", "max"):
            words = _said(group / "memory.stat")
            stat = dict(zip(words[::2], words[1::2], strict=False))
            cached = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))
            yield int(most), max(int(now or 0) - cached, 0)


def _said(path: Path) -> list[str]:
    """The words of a file; one empty word where it is not there or may not be read."""
    try:
        return path.read_text().split() or [""]
    except OSError:
        return [""]


def _compiler() -> Finding:
    """What torch.compile and Triton need on the host: the C++ compiler that training takes, and Python's headers."""
    from archlab.search.hardware.compiler import cannot_compile, compiler

    if missing := cannot_compile():
        meaning = "torch.compile and Triton cannot build here: `compile: blocks` trains uncompiled, and slower"
        return Finding("compiler", "warn", missing, meaning)
    return Finding("compiler", "ok", str(shutil.which(compiler())), "torch.compile can build for this CPU")


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
