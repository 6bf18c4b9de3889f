"""The same bits on every run, whatever the settings of the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """The settings and the random state of the process are put back afterwards."""
    memory: Any = torch.utils.deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling = memory.fill_uninitialized_memory
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.use_deterministic_algorithms(True)
            # Else every new tensor is filled with NaN first, which takes time and changes no result.
            memory.fill_uninitialized_memory = False
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filling
