"""What the journal of a trial says against its recipe: spikes, gradients cut short, a loss that still falls at the end.

A difference between two such trials may be the recipe's: one of the two may only bear a rough start better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from archlab.search.trial.metrics import read_metrics
from archlab.search.utils.files import read_json
from archlab.search.utils.shapes import Check, anything, mapping, mapping_of, maybe, number

FIRST = 0.1  # of the steps
RISE = 1.0  # nats per token of one line of the journal above the lowest mean of three lines before it
SPIKE = 10.0  # times the median gradient norm of the whole trial
CLIPPED = 4.0  # times the norm to which gradients are clipped; up to that good recipes of small models clip most steps
FALL = 0.05  # nats per token, over the last tenth of the steps
_RECIPE: Check = mapping({}, {"clip": maybe(number), "schedule": maybe(mapping_of(anything))})
_FEWEST = 10  # lines in the first tenth, below which nothing is said of them


def signs(lines: Sequence[dict[str, Any]], clip: float | None, cools: bool = False) -> Iterator[str]:
    """What there is to say, as parts of a sentence; `lines` are those of the journal, `clip` the recipe's norm.

    Where the schedule `cools` at the end, the loss falls because of that, however long the trial is.
    """
    logged = [line for line in lines if line.get("loss") is not None and line.get("grad_norm") is not None]
    last = lines[-1]["step"] if lines else 0
    first = [line for line in logged if line["step"] <= FIRST * last]
    if len(first) >= _FEWEST:
        losses, norms = (np.array([line[name] for line in first]) for name in ("loss", "grad_norm"))
        means = np.convolve(losses, np.ones(3) / 3, "valid")[:-1]
        if (losses[3:] > np.minimum.accumulate(means) + RISE).any():
            yield "the loss jumped up in the first tenth of the steps"
        if norms.max() > SPIKE * float(np.median([line["grad_norm"] for line in logged])):
            yield "the gradient norm spiked in the first tenth of the steps"
        if clip is not None and (norms > CLIPPED * clip).mean() > 0.5:
            yield f"most gradients of the first tenth were clipped to less than a {CLIPPED:g}th of their norm"
    curve = {line["step"]: line["validation_loss"] for line in lines if line.get("validation_loss") is not None}
    before = [step for step in curve if step <= (1 - FIRST) * last + 1]
    if before and last in curve and not cools and (fall := curve[max(before)] - curve[last]) > FALL:
        yield f"the validation loss still fell by {fall:.2f} in the last tenth of the steps"


def signs_of(folder: Path, result: dict[str, Any]) -> tuple[str, ...]:
    """The signs of a trial that has ended with a result, in a folder."""
    return tuple(result["signs"]) if "signs" in result else read_signs(folder)  # results of before did not have them


@lru_cache(maxsize=4096)
def read_signs(folder: Path) -> tuple[str, ...]:
    """The signs of a trial that has ended, from the files in its folder; none where these are gone."""
    recipe = (read_json(folder / "trial.json") or {}).get("recipe")
    if recipe is None or _RECIPE(recipe):
        return ()
    cools = (recipe.get("schedule") or {}).get("type") == "wsd"
    return tuple(signs(read_metrics(folder), recipe.get("clip"), cools))
