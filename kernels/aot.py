"""Compiles every Triton kernel with the sets of its flags for four generations of cards on a machine without a GPU.

`python -m kernels.aot [file]` writes the report: registers per thread, stack (what did not fit into registers), shared
memory, and instructions on tensor cores of each. Run it in a process without TRITON_INTERPRET, under which kernels are
not compiled at all.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from archlab.kernels import interpret
from archlab.kernels.launch import Build, compiling_for
from archlab.kernels.op import OPS

REPORT = Path(__file__).with_name("aot_report.json")
# Of each capability (A100; RTX 30; L4, RTX 40; H100, H200) the shared memory that one block can have, in bytes.
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
CAPABILITIES = tuple(SHARED_BYTES)


@dataclass(frozen=True)
class Compiled:
    """What one kernel takes on one architecture: 32-bit registers per thread, bytes of stack per thread and of shared
    memory per block, and how many instructions it has for tensor cores: `hgmma` for those of sm_90, `hmma` for older.
    """

    name: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    hgmma: int
    hmma: int


class _Driver:
    """Enough of Triton's driver to compile for a device that is not there; each has its own cache of kernels."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def builds() -> Iterator[Build]:
    """The builds of all ops that have Triton kernels of their own."""
    for op in OPS.values():
        if "triton" in op.implementations:
            yield from getattr(import_module(f"archlab.kernels.{op.name}.triton"), "builds", tuple)()


def compile_for(build: Build, capability: int) -> Compiled:
    """Compile one kernel. Raises Triton's own errors where it does not compile."""
    from triton.runtime import driver

    driver.set_active(_Driver(capability))
    arguments = [torch.empty(1, dtype=a) if isinstance(a, torch.dtype) else a for a in build.arguments]
    kernel = build.kernel.warmup(*arguments, grid=(1,), **build.meta)
    found = _resources(kernel.asm["cubin"])
    return Compiled(build.name, capability, shared_bytes=int(kernel.metadata.shared), **found)


def _resources(cubin: bytes) -> dict[str, int]:
    """What the bundled cuobjdump reads from the binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout
            for what in ("-res-usage", "-sass")
        )
    found = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    products = {name.lower(): len(re.findall(rf"\b{name}\b", code)) for name in ("HGMMA", "HMMA")}
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"]), **products}


def report(capabilities: Sequence[int]) -> dict[str, Any]:
    """All builds compiled for these capabilities, and Triton's version, on which the numbers depend."""
    import triton

    if interpret.active():
        raise RuntimeError("TRITON_INTERPRET=1 is set: kernels are not compiled in this process")
    rows = []
    for capability in capabilities:
        with compiling_for(capability):
            rows += [compile_for(build, capability) for build in builds()]
    rows.sort(key=lambda row: (row.name, row.capability))
    return {"triton": triton.__version__, "kernels": [asdict(row) for row in rows]}


def main(arguments: Sequence[str]) -> None:
    """Write the report to a file, by default the one that is committed beside this module."""
    parser = argparse.ArgumentParser(prog="python -m archlab.kernels.aot", description=main.__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=REPORT)
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, action="append", help="by default all")
    options = parser.parse_args(arguments)
    result = report(options.capability or CAPABILITIES)
    lines = ",\n  ".join(json.dumps(row) for row in result["kernels"])
    options.file.write_text(f'{{"triton": {json.dumps(result["triton"])}, "kernels": [\n  {lines}\n]}}\n')
    print(f"{len(result['kernels'])} kernels compiled, report in {options.file}")


if __name__ == "__main__":
    main(sys.argv[1:])
