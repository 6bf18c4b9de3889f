"""The verb `bench`: how fast the ops are on this machine, and `--tune`, which finds the tiles of its card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from archlab.cli.kit import INVALID, JSON, fail, verb


@click.command()
@click.option("--op", "ops", multiple=True, metavar="OP", help="One op; may be repeated. By default all.")
@click.option("--tune", "asked", is_flag=True, help="Find the fastest tiles of each Triton kernel on this card.")
@JSON
@verb
def bench(ops: tuple[str, ...], asked: bool, as_json: bool) -> None:
    """Time each op as models get it on this machine, forward and with its gradients, beside its plain formula.

    With --tune the winners are written to kernels/tuned/<card>.json, which every later model on such a card uses.
    """
    from archlab import kernels

    if unknown := [name for name in ops if name not in kernels.OPS]:
        fail(f"there is no op {', '.join(unknown)}; there are {', '.join(kernels.OPS)}", INVALID)
    if asked:
        _tune(ops)
        return
    for row in _rows(ops):
        if as_json:
            click.echo(json.dumps(row))
            continue
        name = f"{row['op']} {row['case']} {row['dtype']}"
        took = "  ".join(f"{row[mode] * 1e3:9.2f} ms" for mode in ("forward_s", "full_s"))
        click.echo(f"{name:38} {took}  {row['formula']:5.2f}x the formula  {row['implementation']}")


def _rows(ops: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A row per op, case and dtype: seconds of the forward pass and with gradients, the formula's against these."""
    import torch

    from archlab.kernels import Device
    from archlab.kernels import bench as measured

    torch.set_num_threads(1)  # as each trial has on a CPU
    device = Device.current()
    for op, case in measured.workloads(device):
        for dtype in (torch.float32, torch.bfloat16):
            if ops and op.name not in ops:
                continue
            name = measured.chosen(op, case, device, dtype)
            if name != "reference" and (wrong := measured.trusted(op, name, device, dtype)):
                fail(f"{op.name} by {name} is wrong here, so nothing of it is timed: {wrong}", INVALID)
            calls = {
                "forward_s": measured.call(op, name, case, device, dtype),
                "full_s": measured.call(op, name, case, device, dtype, gradients=True),
                "formula_s": measured.call(op, "reference", case, device, dtype, gradients=True),
            }
            took = measured.in_turns(calls, device, 5)
            row: dict[str, Any] = {"op": op.name, "case": case.name, "dtype": str(dtype)[6:], "implementation": name}
            yield row | took | {"formula": took["formula_s"] / took["full_s"]}


def _tune(ops: tuple[str, ...]) -> None:
    """The fastest tiles of all kernels that the workloads launch, with gradients, in bfloat16."""
    import torch

    from archlab.kernels import Device, launch, tune
    from archlab.kernels import bench as measured

    device = Device.current()
    if device.kind != "cuda":
        fail("there is no CUDA device here: tiles are tuned on the card that they are for", INVALID)
    for op, case in measured.workloads(device):
        name = measured.chosen(op, case, device, torch.bfloat16)
        if name != "triton" or (ops and op.name not in ops):
            continue
        call = measured.call(op, name, case, device, torch.bfloat16, gradients=True)
        seconds = lambda timed: measured.in_turns({"it": timed}, device, 3)["it"]  # noqa: E731
        winners = tune.tune(call, seconds, op.tolerances[torch.bfloat16], click.echo)
        click.echo(f"{op.name} {case.name}: written to {tune.write(launch.card(), winners)}")


VERBS = (bench,)
