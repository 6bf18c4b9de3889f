"""What each Triton kernel reads, writes and computes at the size of a training step, and what follows for an H100.

    python benchmarks/kernel_counts.py            # a quarter of an hour; writes results/kernel_counts.json and the page
    python benchmarks/kernel_counts.py --op wkv7  # one op, printed only
    python benchmarks/kernel_counts.py --table    # docs/performance/kernels.md from the JSON, without counting

Sizes are those of a model of a billion parameters, 4 sequences of 4,096 tokens (archlab.kernels.bench.workloads), in
bfloat16; of 512 tokens for the selective scan and WKV-4, whose programs walk through time. Four programs of each launch
run in Triton's interpreter, and stand for all. Registers, spills and shared memory are those of the code
that is compiled for sm_90 with the same arguments. No GPU is needed.

The model: a launch takes as long as the slowest of its parts would alone, at the rates of an H100 SXM (`RATES`):
tensors that are moved once from and to memory, bytes that programs ask the caches for, products on tensor cores, other
arithmetic, functions such as exponentials. A grid with fewer programs than the card has multiprocessors leaves some
idle. A launch itself takes `LAUNCH_S`. Nothing of this was timed.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from archlab.kernels import Device, bench, interpret
from archlab.kernels.launch import Build, compiling_for

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/kernel_counts.json", ROOT / "docs/performance/kernels.md"
OPEN, CLOSE = "<!-- counts: written by `python benchmarks/kernel_counts.py` -->\n", "<!-- /counts -->\n"
WALKS, SHORT = ("selective_scan", "wkv4"), 512  # ops whose programs walk through time, in the interpreter for hours
MOSTLY_TORCH = "linear_cross_entropy"  # whose products are torch's
CARD, PROGRAMS = Device("cuda", (9, 0)), 4
# Of an H100 SXM: bytes, FLOPs of products by how they are computed, results of other arithmetic and of functions, each
# per second. Memory, products and arithmetic are the datasheet's; the cache's is what is commonly measured.
RATES = {
    "memory": 3.35e12,
    "cache": 5.5e12,
    "half": 989e12,
    "tf32": 494e12,
    "tf32x3": 165e12,
    "ieee": 67e12,
    "elements": 33.5e12,
    "functions": 4.2e12,
}
LITTLE_LEFT = 0.9  # a share from which on a pass is not in the page
PROCESSORS, LAUNCH_S = 132, 2e-6
REGISTERS, SHARED_BYTES, THREADS, BLOCKS = 65_536, 228 * 1024, 2048, 32  # of a multiprocessor


def count(only: str | None) -> list[dict[str, Any]]:
    """Counts the passes of all cases; in a process with the interpreter."""
    interpret.counting = True
    from archlab.kernels.counts import counted

    rows: list[dict[str, Any]] = []
    long, short = (bench.workloads(CARD, tokens) for tokens in (None, SHORT))
    for (op, case), (_, shorter) in zip(long, short, strict=True):
        case = shorter if op.name in WALKS else case
        name = next((name for name, each in op.implementations.items() if each.family == "triton"), None)
        if name is None or op.name == MOSTLY_TORCH or only not in (None, op.name):
            continue
        tensors, fixed = bench.inputs(op, case, Device("cpu"), torch.bfloat16), case.fixed()
        with counted(PROGRAMS) as forward:
            found = bench.outputs(op.implementations[name].load(), tensors, fixed)
        kept = [x for x in found if x.requires_grad]
        with counted(PROGRAMS) as backward:
            torch.autograd.grad(kept, [*tensors.values()], [torch.ones_like(x) for x in kept], allow_unused=True)
        own, given = sum(x.nbytes for x in tensors.values()), sum(x.nbytes for x in kept)
        flops = op.flops(**tensors, **fixed)
        least = {"forward": (op.bytes(**tensors, **fixed), flops), "backward": (2 * own + given, 2 * flops)}
        for turn, launches in (("forward", forward), ("backward", backward)):
            row = {"op": op.name, "case": case.name, "pass": turn, "least": least[turn]}
            if launches:
                rows.append({**row, "launches": [said(launch) for launch in launches]})
        print(op.name, case.name, file=sys.stderr, flush=True)
    return rows


def said(launch: Any) -> dict[str, Any]:
    """A launch without its tensors: how it is compiled, and its counts."""
    return {
        "module": launch.kernel.__module__,
        "kernel": launch.name,
        "arguments": emptied(launch.arguments),
        "meta": emptied(launch.meta),
        "programs": launch.programs,
        "touched": launch.touched_bytes,
        "asked": launch.read_bytes + launch.written_bytes,
        "products": launch.products,
        "elements": launch.elements,
        "functions": launch.functions,
    }


def emptied(given: Any) -> Any:
    """Arguments with one number of each tensor."""
    if isinstance(given, Tensor):
        return torch.empty(1, dtype=given.dtype)
    if isinstance(given, dict):
        return {name: emptied(value) for name, value in given.items()}
    if isinstance(given, tuple):
        parts = [emptied(each) for each in given]
        return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
    return given


def compiled(launch: dict[str, Any]) -> dict[str, int]:
    """What the kernel of a launch takes on sm_90, and how many of its warps a multiprocessor holds."""
    from archlab.kernels.aot import compile_for

    kernel = getattr(import_module(launch["module"]), launch["kernel"])
    with compiling_for(90):
        found = compile_for(Build(launch["kernel"], kernel, launch["arguments"], launch["meta"]), 90)
    warps = launch["meta"].get("num_warps", 4)
    per_block = -(-found["registers"] // 8) * 8 * 32 * warps
    limits = [BLOCKS, THREADS // (32 * warps), REGISTERS // per_block, SHARED_BYTES // (found["shared_bytes"] + 1024)]
    resources = {name: found[name] for name in ("registers", "stack_bytes", "shared_bytes")}
    return {**resources, "warps": warps * min(limits)}


def seconds(launch: dict[str, Any]) -> tuple[float, str]:
    """What a launch takes by the model, and which part bounds it."""
    parts = {"memory": launch["touched"], "cache": launch["asked"], **launch["products"]}
    parts |= {name: launch[name] for name in ("elements", "functions")}
    took = {name: amount / RATES[name] for name, amount in parts.items()}
    took["products"] = sum(took.pop(how) for how in launch["products"])
    slowest = max(took, key=took.__getitem__)
    return LAUNCH_S + took[slowest] / min(1.0, launch["programs"] / PROCESSORS), slowest


def modelled(row: dict[str, Any]) -> dict[str, Any]:
    """A pass in figures: its launches together, and its share of the least time that any implementation would take."""
    launches = row["launches"]
    took = [seconds(each) for each in launches]
    total, (_, bound) = sum(each for each, _ in took), max(took)
    least_bytes, least_flops = row["least"]
    least = max(least_bytes / RATES["memory"], least_flops / RATES["half"])
    moved = sum(each["touched"] for each in launches)
    products = sum(sum(each["products"].values()) for each in launches)
    return {
        **{name: row[name] for name in ("op", "case", "pass")},
        "launches": len(launches),
        "megabytes": round(moved / 1e6, 1),
        "of_least_bytes": round(moved / least_bytes, 2),
        "asked_of_moved": round(sum(each["asked"] for each in launches) / moved, 2),
        "product_gflop": round(products / 1e9, 1),
        "registers": max(each["registers"] for each in launches),
        "spilled_bytes": max(each["stack_bytes"] for each in launches),
        "warps": min(each["warps"] for each in launches),
        "model_us": round(1e6 * total, 1),
        "bound": bound,
        "share": round(least / total, 2),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The page's table: the smallest share first, without those that leave little to gain."""
    head = ["op", "case", "pass", "launches", "MB", "of the least", "asked", "GFLOP in products", "registers", "warps"]
    lines = [[*head, "µs", "bound by", "share"], ["---"] * (len(head) + 3)]
    for row in sorted((each for each in rows if each["share"] < LITTLE_LEFT), key=lambda each: each["share"]):
        registers = f"{row['registers']}" + (f", spills {row['spilled_bytes']} B" if row["spilled_bytes"] else "")
        cells = [
            row["op"],
            row["case"],
            row["pass"],
            row["launches"],
            f"{row['megabytes']:,.0f}",
            row["of_least_bytes"],
        ]
        cells += [row["asked_of_moved"], f"{row['product_gflop']:,.0f}", registers, row["warps"]]
        lines.append([*cells, f"{row['model_us']:,.0f}", row["bound"], f"{row['share']:.0%}"])
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def write_page(rows: list[dict[str, Any]]) -> None:
    """Puts the table into the page."""
    before, rest = PAGE.read_text().split(OPEN)
    PAGE.write_text(before + OPEN + table(rows) + CLOSE + rest.split(CLOSE)[1])


def main() -> None:
    """Counts, compiles and writes, or only writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="this one alone; printed, not written")
    parser.add_argument("--table", action="store_true", help="the page from what was counted")
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.table:
        return write_page(json.loads(RESULTS.read_text())["passes"])
    if given.count:
        sys.stdout.buffer.write(pickle.dumps(count(given.op)))
        return None
    words = [sys.executable, __file__, "--count", *(["--op", given.op] if given.op else [])]
    told = subprocess.run(words, env={**os.environ, "TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, check=True)
    rows = pickle.loads(told.stdout)
    for row in rows:
        row["launches"] = [{**each, **compiled(each)} for each in row["launches"]]
    passes = [modelled(row) for row in rows]
    if given.op:
        print(table(passes))
        return None
    import triton

    lines = ",\n  ".join(json.dumps(row) for row in passes)
    head = json.dumps({"triton": triton.__version__, "capability": 90, "programs": PROGRAMS, "rates": RATES})
    RESULTS.write_text(f'{head[:-1]}, "passes": [\n  {lines}\n]}}\n')
    write_page(passes)
    return None


if __name__ == "__main__":
    main()
