"""What a device can do at most: FLOP/s of its products of matrices, by its name; and the joules that it has used."""

from __future__ import annotations

import ctypes
import re
import time
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

# Dense TFLOP/s without sparsity: products of bfloat16 matrices that are summed in float32, and float32 outside of the
# tensor cores, which is how torch multiplies float32 by default. From the makers' data sheets, by the whole name that
# the driver tells: a part of a card (MIG, vGPU) and its siblings (NVL, Ti, D, Laptop) have other peaks.
PEAKS: tuple[tuple[str, float, float], ...] = (
    (r"NVIDIA B200", 2250.0, 75.0),
    (r"NVIDIA H200", 989.0, 67.0),
    (r"NVIDIA H100 80GB HBM3", 989.0, 67.0),
    (r"NVIDIA H100 PCIe", 756.0, 51.0),
    (r"(NVIDIA )?A100(-SXM4?-[48]0GB|-PCIE-[48]0GB| 80GB PCIe)", 312.0, 19.5),
    (r"NVIDIA A40", 149.7, 37.4),
    (r"NVIDIA A10", 125.0, 31.2),
    (r"NVIDIA L40S", 362.05, 91.6),
    (r"NVIDIA L40", 181.05, 90.5),
    (r"NVIDIA L4", 121.0, 30.3),
    (r"(NVIDIA )?GeForce RTX 4090", 165.2, 82.6),
    (r"(NVIDIA )?GeForce RTX 3090", 71.0, 35.6),
    (r"AMD Instinct MI300X( OAM)?", 1307.4, 163.4),
)
_SIDE, _ROUNDS = 1024, 8


def known_peak(name: str, precision: Precision) -> float | None:
    """FLOP/s of a device with this name, or None."""
    for pattern, half, full in PEAKS:
        if re.fullmatch(pattern, name):
            return 1e12 * (half if precision == "bf16" else full)
    return None


def measured_peak(device: torch.device, precision: Precision) -> float:
    """FLOP/s of the fastest of some products of square matrices timed now, with this process's threads."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    side = 8 * _SIDE if device.type == "cuda" else _SIDE
    a = torch.ones(side, side, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best


def joules(device: torch.device) -> float | None:
    """Joules used until now: of a CUDA device since its driver was loaded, else of all processors of this machine since
    some moment. None where the machine does not tell; only differences mean something."""
    return _nvml_joules(device) if device.type == "cuda" else rapl_joules()


def rapl_joules(root: Path = Path("/sys/class/powercap")) -> float | None:
    """Joules of the processor packages (running average power limit), which many systems let only root read."""
    try:
        files = [each / "energy_uj" for each in root.iterdir() if re.fullmatch(r"intel-rapl:\d+", each.name)]
        return sum(int(file.read_text()) for file in files) / 1e6 if files else None
    except OSError:
        return None


@lru_cache(maxsize=1)
def _nvml() -> ctypes.CDLL | None:
    """NVIDIA's management library, if it is here and can be used."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _nvml_joules(device: torch.device) -> float | None:
    library = _nvml()
    if library is None:
        return None
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    handle, used = ctypes.c_void_p(), ctypes.c_ulonglong()
    if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
        return None
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used)) != 0:
        return None
    return used.value / 1e3


Precision = Literal["auto", "fp32", "bf16"]  # left open: as the weights are
