"""What a checkpoint costs the training: written as before by who trains, or beside training from a copy.

    python benchmarks/checkpoints.py             # two cores, one of which trains
    python benchmarks/checkpoints.py --cores 1   # the writer shares the core of the training

A model of 30M parameters with AdamW trains on one thread, float32. In each round the contestants take turns; each
trains the same number of steps, enough for a checkpoint to be written meanwhile:

* bare: without a checkpoint;
* before: the training thread writes one before the steps: serialised, hashed and synced. archlab did so until it wrote
  beside training, and does where there is no memory for a copy;
* beside: the training thread copies the state, and a thread writes the copy.

`waited_s` is what the training thread waits for, `cost_s` how much longer than `bare` the steps took with all of it,
and `cpu_s` the processor time that all threads spent more, the figure to trust on a busy machine. `written_s` is the
time of the write. `interval_s` is what archlab makes of `waited_s`, and on one core of `cpu_s`; `share` is that cost's
of the time, and `share_at_20s` what it would be with the shortest interval. Figures are medians over the rounds, ratios
the medians of each round's. Memory is the heap's, as in a trial.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from archlab.arch_dsl import compile, load, resolve
from archlab.search.executors.forkserver import HEAP
from archlab.search.trial import checkpoint
from archlab.search.trial.pace import LEAST_S, SHARE
from archlab.search.trial.writer import FILE, Writer

MODEL = {
    "d_model": 512,
    "n_layers": 8,
    "vocab": 8192,
    "block": {"norm": "rmsnorm", "attention": {"heads": 8, "positional": "rope"}, "ffn": {"type": "glu"}},
}
ROWS, CONTEXT = 2, 64


class Training:
    """A model on its way, and its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        self.model: Any = compile(resolve(load(MODEL), max_positions=CONTEXT))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(MODEL["vocab"], (ROWS, CONTEXT))

    def steps(self, count: int) -> None:
        """So many optimizer steps."""
        for _ in range(count):
            self.model.loss(self.tokens, self.tokens).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def measured(self, begin: Callable[[], None], steps: int) -> tuple[float, float, float]:
        """Seconds of `begin`; seconds, and the processor's, of it and the steps after it."""
        started, computed = time.perf_counter(), time.process_time()
        begin()
        waited = time.perf_counter() - started
        self.steps(steps)
        return waited, time.perf_counter() - started, time.process_time() - computed

    def round(self, steps: int) -> dict[str, float]:
        """One turn of each contestant."""
        writer = Writer(self.folder, 1)
        _, bare, bare_cpu = self.measured(lambda: None, steps)
        before_waited, before, before_cpu = self.measured(self.save, steps)
        beside_waited, beside, beside_cpu = self.measured(
            lambda: writer.put(self.folder, self.step, self.state(), lambda: None, began=time.perf_counter()), steps
        )
        late = time.perf_counter()
        writer.finish()
        line = json.loads((self.folder / FILE).read_text().splitlines()[-1])
        return {
            "bare_s": bare,
            "before_waited_s": before_waited,
            "beside_waited_s": beside_waited,
            "before_cost_s": before - bare,
            "beside_cost_s": beside - bare,
            "before_cpu_s": before_cpu - bare_cpu,
            "beside_cpu_s": beside_cpu - bare_cpu,
            "written_s": line["writing_s"],
            "late_s": time.perf_counter() - late,
            "mb": line["bytes"] / 1e6,
        }

    def save(self) -> None:
        checkpoint.save(self.folder, self.step, self.state())


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="so that a checkpoint is written meanwhile (late_s is 0)")
    parser.add_argument("--cores", type=int, choices=(1, 2), default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; else that of temporary files")
    asked = parser.parse_args()
    if not HEAP.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **HEAP})
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked.cores])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        training = Training(Path(folder))
        training.steps(2)
        training.round(asked.steps)
        rounds = [training.round(asked.steps) for _ in range(asked.rounds)]
    found = {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}
    found["waited_ratio"] = round(statistics.median(r["before_waited_s"] / r["beside_waited_s"] for r in rounds), 1)
    for name in ("before", "beside"):
        on_one_core = name == "beside" and asked.cores == 1
        cost = found["beside_cpu_s"] if on_one_core else found[f"{name}_waited_s"]
        interval = max(LEAST_S, cost / SHARE)
        found[f"{name}_share_at_20s"] = round(cost / (cost + LEAST_S), 4)
        found[f"{name}_share"] = round(cost / (cost + interval), 4)
        found[f"{name}_interval_s"] = round(interval, 1)
    parameters = sum(each.numel() for each in training.model.parameters())
    print(json.dumps({"parameters": parameters, "cores": asked.cores, "load": os.getloadavg()[0], **found}))


if __name__ == "__main__":
    main()
