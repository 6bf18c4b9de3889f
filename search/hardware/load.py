"""How busy a trial and its machine are while it trains: a line of JSON every few seconds, beside its metrics."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil

FILE = "load.jsonl"
"""Its name in a trial's folder."""
_CLOSE, _CLOSE_S, _USUAL_S, _EACH = 10, 1.0, 5.0, 500

Sample = dict[str, Any]
Device = Mapping[str, Callable[[], float]]
"""What is asked of a device for each sample, by the name that the sample has for it."""


@contextmanager
def sampled(path: Path, device: Device | None = None) -> Iterator[None]:
    """Appends samples to a file while the body runs, by a thread that touches nothing else.

    A sample has time (unix s), host, cores (how many this process and its children kept busy since the last one),
    memory_bytes (resident, of all of them), machine_cpu and machine_memory (shares of the machine's, 0 to 1), and the
    fields of `device`. One of those that fails is left out from then on. Whatever else goes wrong ends the samples.
    The trial's output tells either once, and the trial goes on.
    """
    done = threading.Event()
    thread = threading.Thread(target=_write, args=(path, device, done.wait), name="load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def of_gpu() -> Device | None:
    """Samples the current CUDA device: gpu (the share of time in which it computes, 0 to 1) and gpu_memory_bytes (of
    all that use it), as NVML says them. None without a device or the extra `gpu`."""
    import torch

    if not torch.cuda.is_available() or find_spec("pynvml") is None:
        return None
    device = torch.cuda.current_device()
    # NVML asks the driver, so that a stream which is being captured as a graph is left alone
    return {
        "gpu": lambda: torch.cuda.utilization(device) / 100,
        "gpu_memory_bytes": lambda: torch.cuda.device_memory_used(device),
    }


def gaps() -> Iterator[float]:
    """Seconds before each sample: few at first, for trials of seconds, and more and more, for those of days."""
    yield from repeat(_CLOSE_S, _CLOSE)
    gap = _USUAL_S
    while True:
        yield from repeat(gap, _EACH)
        gap *= 2


def _write(path: Path, device: Device | None, wait: Callable[[float], bool]) -> None:
    try:
        look = Load(device)
        for gap in gaps():
            if wait(gap):
                return
            line = json.dumps(look.sample()) + "\n"
            with path.open("a") as file:
                file.write(line)
    except Exception as error:
        print(f"the load of the machine is told no longer: {type(error).__name__}: {error}", file=sys.stderr)


class Load:
    """What this process and its machine have done since it was asked last, by the thread that made it."""

    def __init__(self, device: Device | None = None) -> None:
        self._process, self._device, self._host = psutil.Process(), dict(device or {}), socket.gethostname()
        self._time, self._cpu_s = time.monotonic(), self._used()[0]
        psutil.cpu_percent()  # from now on

    def sample(self) -> Sample:
        """One sample, as `sampled` says."""
        now, (cpu_s, memory) = time.monotonic(), self._used()
        cores = max(0.0, cpu_s - self._cpu_s) / max(now - self._time, 1e-3)
        self._time, self._cpu_s = now, cpu_s
        return {
            "time": round(time.time(), 2),
            "host": self._host,
            "cores": round(cores, 3),
            "memory_bytes": memory,
            "machine_cpu": round(psutil.cpu_percent() / 100, 3),
            "machine_memory": round(psutil.virtual_memory().percent / 100, 3),
            **self._of_device(),
        }

    def _of_device(self) -> Sample:
        """What the device answers. A part of a GPU, for one, has memory of its own and no utilisation."""
        found = {}
        for name, ask in [*self._device.items()]:
            try:
                found[name] = ask()
            except Exception as error:  # of torch or NVML, which are not imported here
                del self._device[name]
                print(f"samples go on without {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return found

    def _used(self) -> tuple[float, int]:
        """(processor seconds so far, resident bytes) of the process and its children; those that have ended count with
        what they had used."""
        own = self._process.cpu_times()
        seconds, memory = (
            own.user + own.system + own.children_user + own.children_system,
            self._process.memory_info().rss,
        )
        for child in self._process.children(recursive=True):
            try:
                spent, held = child.cpu_times(), child.memory_info().rss
            except psutil.NoSuchProcess:  # it has just ended, and counts as such
                continue
            seconds, memory = seconds + spent.user + spent.system, memory + held
        return seconds, memory
