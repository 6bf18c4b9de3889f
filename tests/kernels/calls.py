"""Every way to compute every op on this machine: the table that the tests of the ops run over."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import OPS, Ask, Case, Device, Op

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = (Device("cpu"), *([Device.current()] if torch.cuda.is_available() else []))


@dataclass(frozen=True)
class Call:
    """One case of an op, by one implementation, on one device in one dtype."""

    op: Op
    implementation: str
    case: Case
    device: Device
    dtype: torch.dtype

    @property
    def function(self) -> Any:
        if self.implementation == "reference":
            return self.op.reference
        return self.op.implementations[self.implementation].load()

    @property
    def is_triton(self) -> bool:
        return self.implementation == "triton"

    def tensors(self) -> dict[str, Tensor]:
        return made(self.op, self.case, self.device, self.dtype)


def made(op: Op, case: Case, device: Device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Normal inputs, within the op's domains, that depend on the case's name alone, ready for gradients."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in case.shapes.items()}
    return {
        name: op.domains.get(name, lambda x: x)(x).to(device.kind, dtype).requires_grad_() for name, x in drawn.items()
    }


def _serves(call: Call) -> bool:
    if call.implementation == "reference":
        return True
    implementation = call.op.implementations[call.implementation]
    meta = {name: torch.empty(shape, device="meta") for name, shape in call.case.shapes.items()}
    ask = Ask(call.device, call.dtype, call.op.ask(**meta, **call.case.fixed()))
    return implementation.missing() is None and implementation.supports(ask) is None


def _every() -> Iterator[Call]:
    for op in OPS.values():
        for name in ("reference", *op.implementations):
            for case in op.cases:
                for device in DEVICES:
                    yield from (Call(op, name, case, device, dtype) for dtype in DTYPES)


def calls(dtypes: tuple[torch.dtype, ...] = DTYPES, cases: tuple[str, ...] | None = None) -> list[Any]:
    """pytest parameters for all calls that this machine can serve, those on CUDA marked `gpu`."""
    return [
        pytest.param(
            call,
            id=f"{call.op.name}-{call.implementation}-{call.case.name}-{call.device}-{str(call.dtype)[6:]}",
            marks=[pytest.mark.gpu] if call.device.kind == "cuda" else [],
        )
        for call in _every()
        if call.dtype in dtypes and (cases is None or call.case.name in cases) and _serves(call)
    ]
