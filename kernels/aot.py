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
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from archlab.kernels import interpret
from archlab.kernels.launch import Build, compiling_for

REPORT = Path(__file__).with_name("aot_report.json")
# Of each capability (A100; RTX 30; L4, RTX 40; H100, H200; B200; RTX 50) the shared memory that one block can have, in
# bytes.
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
CAPABILITIES = 80, 86, 89, 90  # those of the committed report


def _driver(capability: int) -> SimpleNamespace:
    """Enough of Triton's driver to compile for a device that is not there; each has its own cache of kernels."""
    from triton.backends.compiler import GPUTarget

    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
    )


def builds() -> Iterator[Build]:
    """The builds of all folders that have Triton kernels of their own."""
    for file in sorted(Path(__file__).parent.glob("*/triton.py")):
        yield from getattr(import_module(f"archlab.kernels.{file.parent.name}.triton"), "builds", tuple)()


def compile_for(build: Build, capability: int) -> dict[str, Any]:
    """Compile one kernel, and say what it takes: 32-bit registers per thread, bytes of stack per thread and of shared
    memory per block, and how many instructions it has for tensor cores: `hgmma` for those of sm_90, `hmma` for older.
    Raises Triton's own errors where it does not compile."""
    from triton.runtime import driver

    driver.set_active(_driver(capability))
    arguments = [torch.empty(1, dtype=a) if isinstance(a, torch.dtype) else a for a in build.arguments]
    kernel = build.kernel.warmup(*arguments, grid=(1,), **build.meta)
    resources = _resources(kernel.asm["cubin"], int(kernel.metadata.shared))
    return {"name": build.name, "capability": capability, **resources}


def _resources(cubin: bytes, shared_bytes: int) -> dict[str, int]:
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
    memory = {"stack_bytes": int(found["STACK"]), "shared_bytes": shared_bytes}
    return {"registers": int(found["REG"]), **memory, **products}


def report(capabilities: Sequence[int]) -> dict[str, Any]:
    """All builds compiled for these capabilities, and Triton's version, on which the numbers depend."""
    import triton

    if interpret.active():
        raise RuntimeError("TRITON_INTERPRET=1 is set: kernels are not compiled in this process")
    rows: list[dict[str, Any]] = []
    for capability in capabilities:
        with compiling_for(capability):
            rows += [compile_for(build, capability) for build in builds()]
    rows.sort(key=lambda row: (row["name"], row["capability"]))
    return {"triton": triton.__version__, "kernels": rows}


def main(arguments: Sequence[str]) -> None:
    """Write the report to a file, by default the one that is committed beside this module."""
    parser = argparse.ArgumentParser(prog="python -m archlab.kernels.aot", description=main.__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=REPORT)
    which = "by default those of the committed report"
    parser.add_argument("--capability", type=int, choices=SHARED_BYTES, action="append", help=which)
    options = parser.parse_args(arguments)
    result = report(options.capability or CAPABILITIES)
    lines = ",\n  ".join(json.dumps(row) for row in result["kernels"])
    options.file.write_text(f'{{"triton": {json.dumps(result["triton"])}, "kernels": [\n  {lines}\n]}}\n')
    print(f"{len(result['kernels'])} kernels compiled, report in {options.file}")


if __name__ == "__main__":
    main(sys.argv[1:])
