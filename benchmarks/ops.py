"""The ops at sizes of a training step: the implementation that models get against what a user could pick instead.

    python benchmarks/ops.py                 # this machine's device; rows are appended to benchmarks/results
    python benchmarks/ops.py --op attention  # one op
    python benchmarks/ops.py --quick         # forward alone in few rounds, nothing is written

Ceilings come first (a large copy, a large product), then each op is held to its cases in float64, and only one that
passes is timed. Ours and the rivals take turns; a ratio above 1 says that ours is faster. Rivals: the formula as torch
computes it (eager), `torch.compile` of the formula, PyTorch's own function where there is one, FlexAttention and
flash-linear-attention on a card that has them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import Case, Device, Op, bench

RESULTS = Path(__file__).parent / "results" / "ops.jsonl"
Function = Callable[..., Any]


def rivals(op: Op, case: Case, ours: str, device: Device, dtype: torch.dtype) -> dict[str, Function]:
    """What else computes the case here, by name."""
    found: dict[str, Function] = {"eager": op.reference, "compiled": torch.compile(op.reference, dynamic=False)}
    for name, implementation in op.implementations.items():
        if name != ours and not bench.serves(op, name, case, device, dtype) and implementation.family == "torch":
            found[name] = implementation.load()
    if device.kind == "cuda" and op.name == "attention":
        found |= {"flex": flex(case)}
    if device.kind == "cuda" and op.name == "linear_recurrence":
        found |= flash_linear_attention(case)
    return found


def flex(case: Case) -> Function:
    """FlexAttention, compiled, with the biases as captured tensors."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    window = getattr(case.arguments.get("pattern"), "window", None) or 2**31
    masks: dict[int, Any] = {}

    def call(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, **given: Any) -> Tensor:
        length, relative = q.shape[-2], given.get("relative")
        if length not in masks:
            masks[length] = create_block_mask(
                lambda b, h, i, j: (j <= i) & (i - j < window), None, None, length, length, device=str(q.device)
            )

        def score(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if decay is not None:
                logit = logit + decay[b, h, i] - decay[b, h, j]
            return logit if relative is None else logit + relative[h, i - j + length - 1]

        if given.get("sinks") is not None:
            raise NotImplementedError("has no sinks")
        out: Tensor = compiled(q, k, v, score_mod=score, block_mask=masks[length])
        return out

    return call


def flash_linear_attention(case: Case) -> dict[str, Function]:
    """fla-core's kernel for the case, where it is installed."""
    try:
        from fla.ops import gated_delta_rule, gla, simple_gla
    except ImportError:
        return {}
    if case.name == "scalar":
        return {"fla": lambda q, k, v, log_decay: simple_gla.chunk_simple_gla(q, k, v, log_decay, scale=1.0)[0]}
    if case.name == "channel":
        return {"fla": lambda q, k, v, log_decay: gla.chunk_gla(q, k, v, log_decay, scale=1.0)[0]}
    return {
        "fla": lambda q, k, v, log_decay, beta: gated_delta_rule.chunk_gated_delta_rule(
            q, k, v, log_decay, beta, scale=1.0
        )[0]
    }


def able(calls: Mapping[str, Function], tensors: dict[str, Tensor], fixed: dict[str, Any]) -> dict[str, Function]:
    """Those that compute it at all; others are named with their reason."""
    kept = {}
    for name, call in calls.items():
        try:
            bench.with_gradients(call, tensors, fixed)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            print(f"  {name} cannot: {str(error).splitlines()[0][:100]}")
        else:
            kept[name] = call
    return kept


def measure(
    op: Op, case: Case, device: Device, dtype: torch.dtype, top: bench.Ceilings, rounds: int, both: bool
) -> Any:
    """One row: milliseconds of ours, its share of the ceiling, and how much longer each rival takes."""
    ours = bench.chosen(op, case, device, dtype)
    wrong = None if ours == "reference" else bench.trusted(op, ours, device, dtype)
    if wrong:
        print(f"{op.name} {case.name}: {ours} is wrong, so nothing is timed: {wrong}")
        return None
    own = op.reference if ours == "reference" else op.implementations[ours].load()
    tensors, fixed = bench.inputs(op, case, device, dtype), case.fixed(device.kind)
    calls = able({"ours": own, **rivals(op, case, ours, device, dtype)}, tensors, fixed)
    row: dict[str, Any] = {"op": op.name, "case": case.name, "dtype": str(dtype)[6:], "implementation": ours}
    least = max(op.bytes(**tensors, **fixed) / top.bytes_per_s, op.flops(**tensors, **fixed) / top.flops_per_s[dtype])
    douts = bench.given(bench.outputs(own, tensors, fixed))
    modes: dict[str, Function] = {
        "forward": lambda call: bench.outputs(call, tensors, fixed),
        "full": lambda call: bench.with_gradients(call, tensors, fixed, douts),
    }
    for mode, run in modes.items():
        if mode == "full" and not both:
            continue
        timed = {name: (lambda f=f, run=run: run(f)) for name, f in calls.items()}
        took = bench.in_turns(timed, device, rounds)
        row[f"{mode}_ms"] = round(took["ours"] * 1e3, 4)
        row[f"{mode}_rivals"] = {name: round(s / took["ours"], 3) for name, s in took.items() if name != "ours"}
        if mode == "forward":
            row["share_of_ceiling"] = round(least / took["ours"], 3)
    return row


def main(arguments: list[str]) -> None:
    """Measure, print a row per op and case, append them to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", help="by default all")
    parser.add_argument("--quick", action="store_true", help="forward alone, 3 rounds, nothing is written")
    options = parser.parse_args(arguments)
    device = Device.current()
    if device.kind == "cpu":
        torch.set_num_threads(1)
    top = bench.ceilings(device)
    name = torch.cuda.get_device_name() if device.kind == "cuda" else "CPU, one thread"
    print(f"{name}, torch {torch.__version__}: copy {top.bytes_per_s / 1e9:.0f} GB/s", end="")
    print("".join(f", {str(dtype)[6:]} {flops / 1e12:.3f} TFLOP/s" for dtype, flops in top.flops_per_s.items()))
    for op, case in bench.workloads(device):
        if options.op and op.name not in options.op:
            continue
        for dtype in (torch.bfloat16,) if device.kind == "cuda" else (torch.float32, torch.bfloat16):
            torch.compiler.reset()
            row = measure(op, case, device, dtype, top, 3 if options.quick else 10, not options.quick)
            if row is None:
                continue
            print(json.dumps(row))
            if not options.quick:
                with RESULTS.open("a") as file:
                    file.write(json.dumps({**row, "device": name, "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
