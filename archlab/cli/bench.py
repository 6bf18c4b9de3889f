"""The verb `bench`: how fast the ops are here; the tiles of its card (`--tune`), and all of the card (`--gpu`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from archlab.cli.kit import INVALID, JSON, fail, verb

FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.option("--op", "ops", multiple=True, metavar="OP", help="One op; may be repeated. By default all.")
@click.option("--tune", "asked", is_flag=True, help="Find the fastest tiles of each Triton kernel on this card.")
@click.option(
    "--gpu", "whole", is_flag=True, help="Check and measure all of this card, in 22 minutes at most, and report it."
)
@click.option("--to", "folder", type=FOLDER, help="Where --gpu writes its report. By default here.")
@JSON
@verb
def bench(ops: tuple[str, ...], asked: bool, whole: bool, folder: Path | None, as_json: bool) -> None:
    """Time each op as models get it on this machine, forward and with its gradients, beside its plain formula.

    With --tune the winners are written to kernels/tuned/<card>.json, which every later model on such a card uses.
    With --gpu kernels are checked and tuned, ops and training steps timed, and a study is run. The report says what
    fell short. Kernels that are wrong there, or slower than what models would get without them, are not used there any
    more.
    """
    from archlab import kernels

    if unknown := [name for name in ops if name not in kernels.OPS]:
        fail(f"there is no op {', '.join(unknown)}; there are {', '.join(kernels.OPS)}", INVALID)
    if whole and (ops or asked or as_json):
        fail("--gpu measures everything, and writes JSON beside its page: leave --op, --tune and --json out", INVALID)
    if folder is not None and not whole:
        fail("--to says where --gpu writes its report: add --gpu, or leave it out", INVALID)
    if whole:
        _report(folder or Path())
        return
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
    """The fastest tiles of all kernels that the workloads launch."""
    from archlab.cli.gpu_report.sections import tiles
    from archlab.kernels import Device

    _needs_card("tiles are tuned on the card that they are for")
    for row in tiles(Device.current(), ops):
        click.echo(row["tiles"])


def _report(folder: Path) -> None:
    """The report of this card, and its verdicts."""
    from archlab.cli.gpu_report.report import written

    _needs_card("the report is of one")
    file, fell_short = written(folder, click.echo)
    click.echo(
        "\n".join(
            ["", *(f"fell short: {each}" for each in fell_short), f"written to {file} and {file.with_suffix('.json')}"]
        )
    )


def _needs_card(why: str) -> None:
    from archlab.kernels import Device

    if Device.current().kind != "cuda":
        fail(f"there is no CUDA device here: {why}", INVALID)


VERBS = (bench,)
