"""Finds the fastest tiles of each kernel on the card of this machine, for `kernels/tuned/<card>.json`.

The file is committed and read when a kernel is launched (`launch.tuned`), so that nobody tunes while a model starts.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kernels import launch
from kernels.launch import Tunable
from kernels.op import OPS

Timer = Callable[[Callable[[], object]], float]


def tunables() -> Iterator[Tunable]:
    """The kernels of all ops that have tiles worth measuring."""
    for op in OPS.values():
        if "triton" in op.implementations:
            yield from getattr(import_module(f"kernels.{op.name}.triton"), "tunables", tuple)()


def fastest(tunable: Tunable, seconds: Timer) -> tuple[dict[str, int], float]:
    """The candidate whose call takes the fewest seconds, and these; one that does not fit the card is passed over.

    Raises RuntimeError if none fits.
    """
    took: list[tuple[float, dict[str, int]]] = []
    failed = ""
    for candidate in tunable.candidates:
        with launch.trying(tunable.kernel, candidate):
            try:
                took.append((seconds(tunable.call), dict(candidate)))
            except RuntimeError as error:  # Triton's OutOfResources, and what the driver says of a bad launch
                failed = str(error).splitlines()[0]
    if not took:
        raise RuntimeError(f"no tiles of {tunable.kernel} ({launch.label(tunable.key)}) fit this card: {failed}")
    best = min(took, key=lambda each: each[0])
    return best[1], best[0]


def tune(found: Iterable[Tunable], seconds: Timer, told: Callable[[str], None]) -> dict[str, dict[str, dict[str, int]]]:
    """The winners by kernel and key."""
    winners: dict[str, dict[str, dict[str, int]]] = {}
    for tunable in found:
        tiles, took = fastest(tunable, seconds)
        winners.setdefault(tunable.kernel, {})[launch.label(tunable.key)] = tiles
        told(f"{tunable.kernel} {launch.label(tunable.key)}: {tiles} {took * 1e6:.1f} us")
    return winners


def write(card: str, winners: dict[str, dict[str, dict[str, int]]], folder: Path = launch.WINNERS) -> Path:
    """The table of a card, with the versions that it was measured with; what it knew of other kernels stays."""
    import triton

    file = folder / f"{card}.json"
    before: dict[str, Any] = json.loads(file.read_text())["winners"] if file.exists() else {}
    merged = {name: before.get(name, {}) | winners.get(name, {}) for name in sorted({*before, *winners})}
    folder.mkdir(exist_ok=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    file.write_text(json.dumps({"versions": versions, "winners": merged}, indent=1, sort_keys=True) + "\n")
    return file
