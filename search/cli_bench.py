"""The verb `bench`: how fast the ops are on this machine, and `--tune`, which finds the tiles of its card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from search.cli_kit import INVALID, JSON, fail, verb


@click.command()
@click.option("--op", "ops", multiple=True, metavar="OP", help="One op; may be repeated. By default all.")
@click.option("--tune", "asked", is_flag=True, help="Find the fastest tiles of each Triton kernel on this card.")
@JSON
@verb
def bench(ops: tuple[str, ...], asked: bool, as_json: bool) -> None:
    """Time each op as models get it on this machine, forward and with its gradients, beside its plain formula.

    With --tune the winners are written to kernels/tuned/<card>.json, which every later model on such a card uses.
    """
    import kernels

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

    from kernels import Device
    from kernels import bench as measured

    torch.set_num_threads(1)  # as each trial has on a CPU
    device = Device.current()
    for op, case in measured.workloads(device):
        for dtype in (torch.float32, torch.bfloat16):
            if ops and op.name not in ops:
                continue
            name = measured.chosen(op, case, device, dtype)
            own: Any = op.reference if name == "reference" else op.implementations[name].load()
            tensors, fixed = measured.inputs(op, case, device, dtype), case.fixed(device.kind)
            calls = {
                "forward_s": lambda: measured.outputs(own, tensors, fixed),  # noqa: B023 - called in this round
                "full_s": lambda: measured.with_gradients(own, tensors, fixed),  # noqa: B023
                "formula_s": lambda: measured.with_gradients(op.reference, tensors, fixed),  # noqa: B023
            }
            took = measured.in_turns(calls, device, 5)
            row: dict[str, Any] = {"op": op.name, "case": case.name, "dtype": str(dtype)[6:], "implementation": name}
            yield row | took | {"formula": took["formula_s"] / took["full_s"]}


def _tune(ops: tuple[str, ...]) -> None:
    from kernels import Device, launch, tune
    from kernels import bench as measured

    device = Device.current()
    if device.kind != "cuda":
        fail("there is no CUDA device here: tiles are tuned on the card that they are for", INVALID)
    found = [each for each in tune.tunables() if not ops or each.kernel.split("-")[0] in ops]
    winners = tune.tune(found, lambda call: measured.in_turns({"it": call}, device)["it"], click.echo)
    click.echo(f"written to {tune.write(launch.card(), winners)}")


VERBS = (bench,)
