"""Where and with what a trial was computed: what may change its bits without being part of its identity."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

COMMIT = "ARCHLAB_COMMIT"


def fingerprint(device: str = "cpu") -> dict[str, str]:
    """Versions, processor, threads and device as strings, for `result.json` and for reuse elsewhere.

    `device` is a torch device such as "cpu" or "cuda:0". A field that this machine does not have is left out.
    """
    import torch

    from archlab.kernels.op import forced

    found = {
        "archlab": version_of("archlab") or "not installed",
        "commit": commit(Path(__file__).resolve().parents[2]),
        "torch": str(torch.__version__),
        "triton": version_of("triton"),
        "numpy": version_of("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "device": torch.device(device).type,
        "kernels": forced(),
    }
    if found["device"] == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "gpu_capability": f"sm_{major}{minor}",
            "cuda": str(torch.version.cuda),
        }
    return {name: value for name, value in found.items() if value}


def differences(before: dict[str, str], now: dict[str, str]) -> dict[str, list[str]]:
    """Field to [before, now] for what may change a trial's bits; commit and archlab version are told elsewhere."""
    names = sorted((before.keys() | now.keys()) - {"archlab", "commit", "platform"})
    return {
        name: [before.get(name, ""), now.get(name, "")] for name in names if before.get(name, "") != now.get(name, "")
    }


@cache
def cpu_model() -> str:
    """The processor's name as the system gives it."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def cpu_info(field: str) -> str:
    """What Linux says of the first processor under a field; "" where nothing is said."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


@cache
def commit(folder: Path) -> str:
    """The git commit that a folder is a checkout of, with `+changes` where tracked files differ; '' if it is none.

    For code that was sent to another machine it is that of the checkout that it came from.
    """
    if not (folder / ".git").exists():
        return os.environ.get(COMMIT, "")
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return f"{head}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


@cache
def version_of(package: str) -> str:
    """The version of an installed package; "" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
