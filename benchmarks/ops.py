"""The ops at sizes of a training step: the implementation that models get against what a user could pick instead.

    python benchmarks/ops.py                 # this machine's device; rows are appended to benchmarks/results
    python benchmarks/ops.py --op attention  # one op
    python benchmarks/ops.py --quick         # forward alone in few rounds, nothing is written
    python benchmarks/ops.py --table         # measures nothing: docs/performance/ops.md gets its table from the rows

Ceilings come first (a large copy, a large product), then each op is held to its cases in float64, and only one that
passes is timed: of another the row and the table say what is wrong, and show no time. Ours and the rivals take turns; a
ratio above 1 says that ours is faster. On a card times are the device's, and `host_us` is what launching ours takes.
Rivals: the formula as torch computes it (eager), `torch.compile` of the formula (recurrences in stretches,
`formulas.py`), PyTorch's own function where there is one, FlexAttention and flash-linear-attention on a card that has
them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import formulas
import torch
from torch import Tensor

from archlab.kernels import Case, Device, Op, bench

RESULTS = Path(__file__).parent / "results" / "ops.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "performance" / "ops.md"
OPEN, CLOSE = "<!-- ops: written by `python benchmarks/ops.py` -->\n", "<!-- /ops -->\n"
Function = Callable[..., Any]


def rivals(op: Op, case: Case, ours: str, device: Device, dtype: torch.dtype) -> dict[str, Function]:
    """What else computes the case here, by name."""
    found: dict[str, Function] = {"eager": op.reference, "compiled": formulas.compiled(op)}
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
    """One row: milliseconds of ours, its share of the ceiling, and how much longer each rival takes; of an
    implementation that is wrong, what is."""
    ours = bench.chosen(op, case, device, dtype)
    row: dict[str, Any] = {"op": op.name, "case": case.name, "dtype": str(dtype)[6:], "implementation": ours}
    if ours != "reference" and (wrong := bench.trusted(op, ours, device, dtype)):
        return row | {"wrong": wrong}
    own = op.reference if ours == "reference" else op.implementations[ours].load()
    tensors, fixed = bench.inputs(op, case, device, dtype), case.fixed(device.kind)
    calls = able({"ours": own, **rivals(op, case, ours, device, dtype)}, tensors, fixed)
    least = bench.least_seconds(op, case, device, dtype, top)
    douts = bench.given(bench.outputs(own, tensors, fixed))
    modes: dict[str, Function] = {
        "forward": lambda call: bench.outputs(call, tensors, fixed),
        "full": lambda call: bench.with_gradients(call, tensors, fixed, douts),
    }
    for mode, run in modes.items():
        if mode == "full" and not both:
            continue
        if device.kind == "cuda":
            row[f"{mode}_host_us"] = round(bench.host_seconds(lambda run=run: run(own)) * 1e6, 1)
        timed = {name: (lambda f=f, run=run: run(f)) for name, f in calls.items()}
        took = bench.in_turns(timed, device, rounds)
        row[f"{mode}_ms"] = round(took["ours"] * 1e3, 4)
        row[f"{mode}_rivals"] = {name: round(s / took["ours"], 3) for name, s in took.items() if name != "ours"}
        if mode == "forward":
            row["share_of_ceiling"] = round(least / took["ours"], 3)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The newest row of each op, case, dtype and device that has all figures, as one table of Markdown a device."""
    newest = {
        (row["device"], row["op"], row["case"], row["dtype"]): row for row in rows if "full_ms" in row or "wrong" in row
    }
    lines: list[str] = []
    for device in dict.fromkeys(key[0] for key in newest):
        lines += ["", f"{device}, torch {next(r['torch'] for k, r in newest.items() if k[0] == device)}:", ""]
        lines += ["| op | case | dtype | ours | ms | eager | compiled | other | forward: eager | compiled |"]
        lines += ["|---|---|---|---|---|---|---|---|---|---|"]
        lines += [_line(row) for key, row in newest.items() if key[0] == device]
    return "\n".join([*lines[1:], ""])


def _line(row: dict[str, Any]) -> str:
    named = [row["op"], row["case"], row["dtype"], row["implementation"]]
    if wrong := row.get("wrong"):
        return f"| {' | '.join(named)} | wrong: {wrong.replace('|', '/')} | | | | | |"
    full, forward = dict(row["full_rivals"]), row["forward_rivals"]
    shown = [f"{full.pop(name):.2f}" if name in full else "" for name in ("eager", "compiled")]
    other = ", ".join(f"{name} {ratio:.2f}" for name, ratio in full.items())
    before = [f"{forward[name]:.2f}" if name in forward else "" for name in ("eager", "compiled")]
    return f"| {' | '.join([*named, format(row['full_ms'], '.2f'), *shown, other, *before])} |"


def write_table() -> None:
    """Puts the table of all rows between its markers in docs/performance/ops.md."""
    before, rest = PAGE.read_text().split(OPEN)
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    PAGE.write_text(before + OPEN + table(rows) + CLOSE + rest.split(CLOSE)[1])


def main(arguments: list[str]) -> None:
    """Measure, print a row per op and case, append them to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", help="by default all")
    parser.add_argument("--quick", action="store_true", help="forward alone, 3 rounds, nothing is written")
    parser.add_argument("--table", action="store_true", help="write the table from the rows, and measure nothing")
    options = parser.parse_args(arguments)
    if options.table:
        write_table()
        return
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
            print(json.dumps(row), flush=True)
            if not options.quick:
                with RESULTS.open("a") as file:
                    file.write(json.dumps({**row, "device": name, "torch": torch.__version__}) + "\n")
                write_table()


if __name__ == "__main__":
    main(sys.argv[1:])
