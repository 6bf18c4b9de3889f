"""What scheduling, tracking and checkpoints cost: a study beside a bare loop that trains the same trials.

    python benchmarks/overhead.py            # trials of about 5 s, a minute or two in all
    python benchmarks/overhead.py --full     # trials of about 20 s

The contestants take turns within one run and train the same trials, one per core at a time with one thread each:

* bare: plain processes, one pinned to each core, with the trials dealt out beforehand. A hand-written loop over the
  same module, batches, optimizer, schedule, clipping and evaluation (ten points of the validation curve, then the whole
  of validation and test). It writes nothing, looks for nothing, and leaves torch's deterministic algorithms off.
* archlab: `archlab run` with everything on: Ray, a process per trial, the trial table, metrics, checkpoints, result
  files, MLflow and Optuna.
* untracked (with --parts): the same with --no-track, to tell what tracking costs.

The clock runs from the first steps of the first trial (a four hundredth of them, the first line of metrics.jsonl) to
the last result. In: building the models of later trials, forking and pinning, deterministic algorithms, checkpoints,
synced files, the table, Ray's messages, tracking with its imports. Out, for both: the way to the first step (imports,
Ray, plan, data). `exit_s` is from there to the end of the process: the last results sent to the trackers, Ray's end.
`cpu_s` is the processor time of all processes while the clock runs, and `cpu_ratio` its ratio: on Linux, and the figure
to trust where other work shares the machine.
All must give the same test losses to the last digit; otherwise they did not do the same work, and that is an error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STUDY = """\
study: overhead
model:
  d_model: 64
  n_layers: 2
  block:
    norm: rmsnorm
    attention: {{heads: 4, kv_heads: 2, positional: rope}}
    ffn: {{type: glu, activation: silu}}
variants:
  baseline: {{}}
train:
  data: {{type: stdlib, validation_bytes: 64k, test_bytes: 128k}}
  tokenizer: bytes
  tokens: {tokens}
  context: 128
  batch: 8
  lr: 5e-3
seeds: {trials}
"""
GOAL = 1.05  # archlab over bare
LIMIT_S = 1800
READ_S = 0.5  # between two looks at /proc

Times = dict[str, float]
Losses = dict[int, float]  # test loss by seed


def archlab(study: Path, *options: str) -> tuple[Times, Losses]:
    """A whole `archlab run` into a new store."""
    from search.store import Store
    from search.watch import read_metrics

    with tempfile.TemporaryDirectory(dir=study.parent) as root:
        command = [sys.executable, "-c", "from search.cli import main; main()", "run", str(study), "--store", root]
        with Path(root, "output.txt").open("w+") as output:
            process = subprocess.Popen([*command, *options], env=environment(), stdout=output, stderr=output)
            meter = Meter(process.pid)
            while process.poll() is None:
                meter.read()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(READ_S)
            ended = time.time()
            if process.returncode:
                raise SystemExit(Path(root, "output.txt").read_text())
        with Store.open(root) as store:
            last = max(event["time"] for event in store.events("overhead") if event["kind"] == "complete")
            rows = store.study_trials("overhead")
        first = min(read_metrics(Path(row["folder"]))[0]["time"] for row in rows)
    losses = {row["seed"]: row["result"]["test"]["loss"] for row in rows}
    return {"s": last - first, "exit_s": ended - last, "cpu_s": meter.at(last) - meter.at(first)}, losses


def bare(study: Path, trials: int) -> tuple[Times, Losses]:
    """The trials dealt out over the cores, all of which start at one time, when all have imported what they need."""
    cores = sorted(os.sched_getaffinity(0))
    workers = []
    for index, core in enumerate(cores):
        seeds = [str(seed) for seed in range(index, trials, len(cores))]
        command = [sys.executable, __file__, "--worker", str(study), str(core), *seeds]
        workers.append(subprocess.Popen(command, env=environment(), stdin=-1, stdout=-1, text=True))
    for worker in workers:
        worker.stdout.readline()
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    found = [json.loads(worker.communicate(timeout=LIMIT_S)[0]) for worker in workers]
    first = min(each["first"] for each in found if each["losses"])
    losses = {int(seed): loss for each in found for seed, loss in each["losses"].items()}
    return {"s": max(each["last"] for each in found) - first, "cpu_s": sum(each["cpu_s"] for each in found)}, losses


class Meter:
    """Processor seconds of a process and all below it, those that ended among them, over time."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.readings: list[tuple[float, float]] = []

    def read(self) -> None:
        """Adds a reading."""
        parents, spent = {}, {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                parents[int(process.name)] = int(fields[1])
                spent[int(process.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        found, frontier = {self.root}, {self.root}
        while frontier:
            frontier = {pid for pid, parent in parents.items() if parent in frontier}
            found |= frontier
        self.readings.append((time.time(), sum(spent.get(pid, 0.0) for pid in found)))

    def at(self, when: float) -> float:
        """Processor seconds at a time, linear between readings."""
        index = min(max(bisect(self.readings, (when,)), 1), len(self.readings) - 1)
        (before, low), (after, high) = self.readings[index - 1 : index + 1]
        return low + (high - low) * (when - before) / (after - before)


def environment() -> dict[str, str]:
    """This checkout first, one thread per process."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def worker(study: str, core: str, *seeds: str) -> None:
    """One process of the bare contestant."""
    os.sched_setaffinity(0, {int(core)})
    import torch

    from search.planning import plan
    from search.study import load_study

    torch.set_num_threads(1)
    variant = plan(load_study(study), Path(study).parent / "data").variants[0]
    print("ready", flush=True)
    sys.stdin.readline()
    firsts: list[tuple[float, float]] = []
    losses = {seed: train(variant, int(seed), firsts) for seed in seeds}
    first, cpu_s = min(firsts, default=(math.inf, time.process_time()))
    print(json.dumps({"first": first, "last": time.time(), "cpu_s": time.process_time() - cpu_s, "losses": losses}))


def train(variant: Any, seed: int, firsts: list[tuple[float, float]]) -> float:
    """A trial as one writes it by hand; returns its test loss in nats per token."""
    import torch

    from search.data import batch
    from search.evaluate import evaluate, held_out, losses
    from search.loop import LOG_LINES, curve_points, curve_windows
    from search.train import build_model, split_seed

    recipe, data, seeds = variant.recipe, variant.dataset, split_seed(seed)
    model = build_model(variant.trial(seed), recipe, torch.device("cpu"))
    optimizer = recipe.optimizer.build(model.named_parameters(), recipe.lr)
    tokens, points = data.split("train"), curve_points(recipe.steps)
    curve = held_out(data, "validation", recipe.context, recipe.objective, False, curve_windows(recipe))
    for step in range(recipe.steps):
        rows = batch(tokens, seeds.data, step * recipe.batch, recipe.batch, recipe.context)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr_at(step)
        inputs, targets = (torch.from_numpy(part.copy()) for part in (rows[:, :-1], rows[:, 1:]))
        model.loss(inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == max(1, recipe.steps // LOG_LINES):
            firsts.append((time.time(), time.process_time()))
        if step + 1 in points:
            losses(model, curve, recipe.batch)
    evaluate(model, data, "validation", recipe.context, recipe.batch)
    return float(evaluate(model, data, "test", recipe.context, recipe.batch)[0]["loss"])


def main() -> None:
    """Prints a line of JSON per round, and one of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="trials four times as long")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--tokens", type=int, help="of one trial")
    parser.add_argument("--parts", action="store_true", help="a third contestant, without tracking")
    options = parser.parse_args()
    tokens = options.tokens or (800_000 if options.full else 200_000)
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder, "overhead.yaml")
        study.write_text(STUDY.format(tokens=tokens, trials=options.trials))
        contestants: dict[str, Callable[[], tuple[Times, Losses]]] = {
            "bare": lambda: bare(study, options.trials),
            "archlab": lambda: archlab(study),
        }
        if options.parts:
            contestants["untracked"] = lambda: archlab(study, "--no-track")
        rounds = [turn(number, contestants) for number in range(options.rounds)]
    medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0] if key.endswith("ratio")}
    print(json.dumps({**{f"median_{key}": value for key, value in medians.items()}, "goal": GOAL, "tokens": tokens}))


def turn(number: int, contestants: dict[str, Callable[[], tuple[Times, Losses]]]) -> dict[str, Any]:
    """A round: each contestant once, in turning order."""
    row: dict[str, Any] = {"round": number + 1, "load": round(os.getloadavg()[0], 1)}
    results: dict[str, Losses] = {}
    order = list(contestants)[:: -1 if number % 2 else 1]
    for name in order:
        times, results[name] = contestants[name]()
        row |= {f"{name}_{key}": round(value, 2) for key, value in times.items()}
    if any(losses != results["bare"] for losses in results.values()):
        raise SystemExit(f"the contestants did not do the same work; test losses by seed: {results}")
    for key in ("", "cpu_"):
        ours = [name for name in order if name != "bare"]
        row |= {f"{name}_{key}ratio": round(row[f"{name}_{key}s"] / row[f"bare_{key}s"], 3) for name in ours}
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
