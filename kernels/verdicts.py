"""Which of our kernels a card has found wrong or slow: `kernels/tuned/<card>.verdicts.json`, of `archlab bench --gpu`.

A wrong kernel is one that cannot serve, so that whoever would have got it is warned; a slow one is declined. Verdicts
hold for the versions of torch and Triton that they were found with: others may have mended it.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from archlab.kernels.op import Ask


@dataclass(frozen=True)
class Verdict:
    """That the Triton kernels of an op are `wrong` or slow in a dtype; with `options` where these are asked for."""

    op: str
    dtype: str
    wrong: bool
    why: str
    options: dict[str, Any] | None = None


def versions() -> dict[str, str]:
    """Of what compiles the kernels."""
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


def write(file: Path, found: Iterable[Verdict]) -> None:
    """Replaces what a card knew."""
    file.parent.mkdir(exist_ok=True)
    rows = [asdict(each) for each in found]
    file.write_text(json.dumps({"versions": versions(), "kernels": rows}, indent=1) + "\n")
    _read.cache_clear()


def objection(file: Path, op: str, ask: Ask, wrong: bool) -> str | None:
    """What a card has against the kernels of an op for an ask: that they are wrong, or else slow; None if nothing."""
    dtype = str(ask.dtype).removeprefix("torch.")
    for each in _read(file):
        of_these = each.options is None or each.options == dict(ask.options)
        if each.wrong == wrong and (each.op, each.dtype) == (op, dtype) and of_these:
            return f"archlab bench --gpu found it {'wrong' if wrong else 'slower'} on this card: {each.why}"
    return None


@cache
def _read(file: Path) -> tuple[Verdict, ...]:
    held = json.loads(file.read_text()) if file.exists() else {}
    return tuple(Verdict(**row) for row in held["kernels"]) if held.get("versions") == versions() else ()
