"""The parts of the report: what each measures, a row at a time, so that one that is ended early leaves what it found.

Each runs in a process of its own: a kernel that breaks the card's context breaks no other part.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from archlab.cli.gpu_report.steps import steps
from archlab.kernels import OPS, Device, bench, launch, tune
from archlab.kernels.op import Op
from archlab.search.utils.children import die_with

Row = dict[str, Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STUDY = """\
study: gpu-report
model: {d_model: 64, n_layers: 4, block: {norm: rmsnorm, attention: {heads: 4, positional: rope}, ffn: swiglu}}
variants: {baseline: {}, gate: {block.attention.gate: sdpa}}
train: {data: {type: stdlib, validation_bytes: 64k, test_bytes: 64k}, tokenizer: bytes, tokens: 100k, context: 128,
        batch: 8, lr: 4e-3}
seeds: 2
"""


@dataclass(frozen=True)
class Section:
    """A part of the report. After `minutes` it is ended, with the rows that it has."""

    title: str
    minutes: float
    rows: Callable[[Device], Iterator[Row]]


def machine(device: Device) -> Iterator[Row]:
    """What the card and its surroundings are, and what they do at best."""
    from archlab.search.hardware.facts import machine as facts

    row: Row = {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
    if device.kind == "cuda":
        seen = torch.cuda.get_device_properties(0)
        row |= {"card": seen.name, "memory_gb": round(seen.total_memory / 1e9, 1), "cards": torch.cuda.device_count()}
        row |= {"compute_capability": ".".join(map(str, torch.cuda.get_device_capability()))}
    if launch.missing() is None:
        import triton

        row["triton"] = triton.__version__
    top = bench.ceilings(device)
    row |= {"copy_gb_per_s": round(top.bytes_per_s / 1e9, 1)}
    row |= {f"{str(dtype)[6:]}_tflop_per_s": round(flops / 1e12, 3) for dtype, flops in top.flops_per_s.items()}
    yield row | {"doctor": [asdict(each) for each in facts()]}


def right(device: Device) -> Iterator[Row]:
    """Every implementation that serves here, forward and backward against float64, at odd sizes and length 1 too."""
    for op in OPS.values():
        for name, implementation in op.implementations.items():
            for dtype in DTYPES:
                if dtype not in op.tolerances or not _serves(op, name, device, dtype):
                    continue
                row: Row = {"op": op.name, "implementation": name, "family": implementation.family}
                try:
                    wrong = bench.trusted(op, name, device, dtype)
                except Exception as error:  # whatever a compiler raises: the report tells it
                    wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                yield row | {"dtype": str(dtype)[6:], "wrong": wrong}


def _serves(op: Op, name: str, device: Device, dtype: torch.dtype) -> bool:
    return any(bench.serves(op, name, case, device, dtype) is None for case in op.cases)


def tiles(device: Device, names: Collection[str] = ()) -> Iterator[Row]:
    """The fastest tiles of each Triton kernel of these ops, by default all, written for every later model on this card:
    of what the workloads launch, with gradients, in bfloat16."""
    for op, case in bench.workloads(device):
        if bench.chosen(op, case, device, torch.bfloat16) != "triton" or (names and op.name not in names):
            continue
        call = bench.call(op, "triton", case, device, torch.bfloat16, gradients=True)
        said: list[str] = []
        winners = tune.tune(
            call,
            lambda timed: bench.in_turns({"it": timed}, device, 3)["it"],
            op.tolerances[torch.bfloat16],
            said.append,
        )
        file = tune.write(launch.card(), winners)
        said.append(f"{op.name} {case.name}: written to {file}")
        yield from ({"op": op.name, "case": case.name, "tiles": line} for line in said)


def ops(device: Device) -> Iterator[Row]:
    """Each op as models get it, beside what they would get without its kernel, and its share of the ceiling."""
    dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
    top = bench.ceilings(device)
    for op, case in bench.workloads(device):
        ours = bench.chosen(op, case, device, dtype)
        if ours == "reference":
            continue
        names = [*op.implementations]
        others = [name for name in names[names.index(ours) + 1 :] if not bench.serves(op, name, case, device, dtype)]
        other = others[0] if others else "reference"
        calls = {
            (name, both): bench.call(op, name, case, device, dtype, gradients=both)
            for name in (ours, other)
            for both in (False, True)
        }
        took = bench.in_turns({f"{name} {both}": call for (name, both), call in calls.items()}, device, 5)
        forward, full = (took[f"{ours} {both}"] for both in (False, True))
        least = bench.least_seconds(op, case, device, dtype, top)
        yield {
            "op": op.name,
            "case": case.name,
            "dtype": str(dtype)[6:],
            "implementation": ours,
            "options": bench.asked(op, case),
            "forward_ms": round(forward * 1e3, 4),
            "full_ms": round(full * 1e3, 4),
            "share_of_ceiling": round(least / forward, 3),
            "other": other,
            "other_forward": round(took[f"{other} False"] / forward, 3),
            "other_full": round(took[f"{other} True"] / full, 3),
        }


def study(device: Device) -> Iterator[Row]:
    """A small study, as a user runs it."""
    yield _study(STUDY)


def cards(device: Device) -> Iterator[Row]:
    """The same with each trial on two cards, where there are two."""
    if device.kind == "cuda" and torch.cuda.device_count() > 1:
        yield _study(STUDY.replace("seeds: 2\n", "seeds: 1\nresources: {parallel: {data: 2}}\n"))


def _study(text: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        file, store = Path(folder) / "gpu-report.yaml", Path(folder) / "store"
        file.write_text(text)
        begun = time.monotonic()
        command = [sys.executable, "-m", "archlab", "run", str(file), "--store", str(store)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = round(time.monotonic() - begun, 1)
        results = [json.loads(path.read_text()) for path in store.glob("trials/*/*/result.json")]
    row: Row = {"exit": ended.returncode, "seconds": seconds, "trials": len(results)}
    if results:
        row["tokens_per_s"] = round(fmean(result["tokens_per_s"] for result in results))
    return row if ended.returncode == 0 else row | {"said": (ended.stdout + ended.stderr)[-2000:]}


SECTIONS = {
    "machine": Section("The machine", 1, machine),
    "right": Section("Kernels against float64", 6, right),
    "tiles": Section("Tiles", 4, tiles),
    "ops": Section("Ops beside what models would get without their kernels", 2, ops),
    "steps": Section("Training steps", 3, steps),
    "study": Section("A study", 3, study),
    "cards": Section("A study on two cards", 3, cards),
}


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    here = Device.current()
    if here.kind == "cpu":
        torch.set_num_threads(1)  # as each trial has there
    for found in SECTIONS[sys.argv[1]].rows(here):
        print(json.dumps(found), flush=True)
