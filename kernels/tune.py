"""Finds the fastest tiles of each kernel on the card of this machine, for `kernels/tuned/<card>.json`.

The file is committed and read when a kernel is launched (`launch.tuned`), so that nobody tunes while a model starts.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from archlab.kernels import launch, verdicts

Call = Callable[[], list[Tensor]]
Timer = Callable[[Call], float]
Tiles = dict[str, int]
Winners = dict[str, dict[str, Tiles]]
_LEAST = {"num_warps": 1, "num_stages": 1}
_MOST = {"num_warps": 16, "num_stages": 5}


def neighbours(tiles: Mapping[str, int]) -> Iterator[Tiles]:
    """The tiles with one number halved or doubled, or with a stage more or less."""
    for name, value in tiles.items():
        for other in (value - 1, value + 1) if name == "num_stages" else (value // 2, value * 2):
            if _LEAST.get(name, 16) <= other <= _MOST.get(name, 256):
                yield {**tiles, name: other}


def fastest(
    kernel: str, default: Mapping[str, int], call: Call, seconds: Timer, tolerance: float
) -> tuple[Tiles, float]:
    """From the default step by step to faster neighbours, until none is: the tiles and the seconds of `call` with them.

    Tiles that do not fit the card, or with which `call` gives other values than with the default, are passed over.
    """
    want = call()
    best, least, tried = dict(default), seconds(call), [dict(default)]
    while True:
        before = least
        for tiles in neighbours(best):
            if tiles in tried:
                continue
            tried.append(tiles)
            with launch.trying(kernel, tiles):
                try:
                    took = seconds(call) if _agree(call(), want, tolerance) else before
                except RuntimeError:  # Triton's OutOfResources, and what the driver says of a launch that does not fit
                    continue
            if took < least:
                best, least = tiles, took
        if least == before:
            return best, least


def _agree(got: list[Tensor], want: list[Tensor], tolerance: float) -> bool:
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(got, want, strict=True) if b is not None]
    return all(float((a - b).norm()) <= tolerance * float(b.norm()) for a, b in pairs)


def tune(call: Call, seconds: Timer, tolerance: float, told: Callable[[str], None]) -> Winners:
    """The winners by kernel and key for all kernels with tiles that a call launches."""
    with launch.looking() as found:
        call()
    winners: Winners = {}
    for kernel, (key, default) in found.items():
        tiles, took = fastest(kernel, default, call, seconds, tolerance)
        winners.setdefault(kernel, {})[launch.label(key)] = tiles
        told(f"{kernel} {launch.label(key)}: {tiles}, the call takes {took * 1e6:.1f} us")
    return winners


def write(card: str, winners: Winners, folder: Path = launch.WINNERS) -> Path:
    """The table of a card, with the versions that it was measured with; what it knew of others stays."""
    file = folder / f"{card}.json"
    before: dict[str, Any] = json.loads(file.read_text())["winners"] if file.exists() else {}
    merged = {name: before.get(name, {}) | winners.get(name, {}) for name in sorted({*before, *winners})}
    folder.mkdir(exist_ok=True)
    file.write_text(json.dumps({"versions": verdicts.versions(), "winners": merged}, indent=1, sort_keys=True) + "\n")
    return file
