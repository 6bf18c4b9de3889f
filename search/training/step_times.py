"""Step times of models, measured beside each other once and kept: what depends on them stays as it was decided."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data.dataset import Dataset
from archlab.search.recipe.recipe import Recipe
from archlab.search.store.database import StoreRefused
from archlab.search.store.kept import RATIO
from archlab.search.trial.trial import Trial
from archlab.search.utils import shapes
from archlab.search.utils.canonical import canonical_json
from archlab.search.utils.files import read_json

if TYPE_CHECKING:
    from archlab.search.training.loop import Loop

WARM_UP, _ROUNDS, _FEWEST, _LONGEST_S = 2, 15, 3, 5.0


@dataclass(frozen=True)
class Timed:
    """A model and what it is trained with: what the time of a step depends on."""

    model: Model
    recipe: Recipe
    dataset: Dataset

    def facts(self) -> list[Any]:
        """The same as plain data; the tokens that are read do not matter, how many there are does."""
        recipe = self.recipe
        sizes: list[Any] = [recipe.context, recipe.sequences, recipe.accumulate, recipe.precision, recipe.recompute]
        sizes += ["compiled"] if recipe.compile == "blocks" else []
        return [canonical(self.model), sizes, canonical(recipe.objective), canonical(recipe.optimizer)]


def step_time_key(timed: Timed, cpus: int, parallel: str = "none") -> str:
    """Under what a store remembers the seconds of a step ("step_time"); `parallel` is how processes divide it."""
    facts = [timed.facts(), cpus, *([] if parallel == "none" else [parallel])]
    return hashlib.sha256(canonical_json(facts).encode()).hexdigest()


class Timings:
    """Ratios of step times in a folder, a file each. A machine that finds one does not measure again."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self._folder, self._threads = folder, threads

    def ratio(self, ours: Timed, other: Timed) -> float:
        """How many times as long a training step of `ours` takes as one of `other`; 1 for the same."""
        facts = [ours.facts(), other.facts()]
        if facts[0] == facts[1]:
            return 1.0
        name = hashlib.sha256(canonical_json(facts).encode()).hexdigest()
        path = self._folder / f"{name}.json"
        if not path.exists():
            from archlab.search.training.compiling import compiling  # which imports torch

            with compiling({"compile": ours.recipe.compile}, self._folder.parent):
                self._keep(path, measure(ours, other, self._threads))
        kept = read_json(path)
        if fault := shapes.fault_of(kept, RATIO):
            told = f"{path} is damaged: {fault}; what was matched by it stays as it is only with this ratio: "
            raise StoreRefused(f"{told}restore it from a copy, or remove it, and it is measured anew")
        assert kept is not None
        return float(kept["ratio"])

    def _keep(self, path: Path, measured: dict[str, Any]) -> None:
        """Of two that measure at the same time the first stands."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{secrets.token_hex(4)}.tmp")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(measured, file)
            os.link(temporary, path)
        except FileExistsError:
            return
        finally:
            temporary.unlink(missing_ok=True)


def measure(ours: Timed, other: Timed, threads: int = 1) -> dict[str, Any]:
    """{"ratio", "seconds" of a step of ours, "of": those of the other one, "fingerprint" of the machine}.

    Steps of the two alternate, so that whatever else the machine does meets both; the ratio is the median of pairs.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
            one, two = (_loop(each, Path(folder)) for each in (ours, other))
            pairs: list[tuple[float, float]] = []
            started = time.perf_counter()
            while len(pairs) < WARM_UP + _ROUNDS:
                pairs.append((_step(one, len(pairs)), _step(two, len(pairs))))
                if len(pairs) >= WARM_UP + _FEWEST and time.perf_counter() - started > _LONGEST_S:
                    break
    finally:
        torch.set_num_threads(before)
    pairs = pairs[WARM_UP:]
    return {
        "ratio": statistics.median(a / b for a, b in pairs),
        "seconds": statistics.median(a for a, _ in pairs),
        "of": statistics.median(b for _, b in pairs),
        "fingerprint": one.fingerprint,
    }


def _loop(timed: Timed, folder: Path) -> Loop:
    """A loop at its first step, which writes nothing."""
    import torch

    from archlab.search.hardware.compiler import cannot_compile
    from archlab.search.training.compiling import compile_blocks
    from archlab.search.training.loop import Loop
    from archlab.search.training.module import build_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = timed.recipe.replace(stages=())
    model = build_model(Trial(canonical(timed.model), {}, timed.dataset.identity, 0), recipe, device)
    model.separator = timed.dataset.eod  # type: ignore[assignment]
    if recipe.compile == "blocks" and not cannot_compile():
        compile_blocks(model, recipe.micro_batch)
    return Loop(folder, "", 0, recipe, timed.dataset, model, 0)


def _step(loop: Loop, step: int) -> float:
    """Seconds of one optimizer step; the same few steps again where a trial is shorter."""
    import torch

    started = time.perf_counter()
    loop.update(step % loop.recipe.steps)
    if loop.device.type == "cuda":
        torch.cuda.synchronize(loop.device)
    return time.perf_counter() - started


def steps_of(timed: Timed, count: int, tick: Callable[[], None]) -> Iterator[float]:
    """Seconds of each of `count` steps after some that warm up, in one process; `tick` is called before each."""
    import torch

    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        loop = _loop(timed, Path(folder))
        for step in range(WARM_UP + count):
            tick()
            took = _step(loop, step)
            if step >= WARM_UP:
                yield took
