"""A device as kernels see it: its kind and its compute capability, whether or not this machine has one."""

import re
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Device:
    """`capability` is (major, minor) of a CUDA device: (9, 0) for an H100 or H200; None where it is unknown."""

    kind: Literal["cpu", "cuda"]
    capability: tuple[int, int] | None = None

    @staticmethod
    def parse(text: str) -> "Device":
        """`cpu`, `cuda` (this machine's, or one of unknown capability) or `sm_90`. Raises ValueError for others."""
        if text == "cpu":
            return Device("cpu")
        if text == "cuda":
            return Device.current() if torch.cuda.is_available() else Device("cuda")
        match = re.fullmatch(r"sm_(\d+)(\d)", text)
        if match is None:
            raise ValueError(f"a device must be cpu, cuda or sm_<capability> such as sm_90; received {text!r}")
        return Device("cuda", (int(match[1]), int(match[2])))

    @staticmethod
    def current() -> "Device":
        """The device that this process computes on: its first CUDA device if it has one, else the CPU."""
        if torch.cuda.is_available():
            return Device("cuda", torch.cuda.get_device_capability())
        return Device("cpu")

    def __str__(self) -> str:
        if self.kind == "cpu" or self.capability is None:
            return self.kind
        return "sm_{}{}".format(*self.capability)
