"""What scheduling, tracking and checkpoints cost: a study beside a bare loop that trains the same trials.

    python benchmarks/overhead.py            # trials of about 5 s, a few minutes in all
    python benchmarks/overhead.py --full     # trials of about 60 s
    python benchmarks/overhead.py --cores    # what a second core brings

The contestants take turns within one run and train the same trials, one per core at a time with one thread each:

* bare: plain processes, one pinned to each core, with the trials dealt out beforehand. A hand-written loop over the
  same module, batches, optimizer, schedule, clipping and evaluation (ten points of the validation curve, then the whole
  of validation and test). It writes nothing, looks for nothing, and leaves torch's deterministic algorithms off.
* archlab: `archlab run` with everything on: Ray, a process per trial, the trial table, metrics, checkpoints, result
  files, MLflow and Optuna.
* untracked (with --parts): the same with --no-track, to tell what tracking costs.
* tune (with --tune): the bare loop as a trainable of Ray Tune, with OptunaSearch over the seeds and MLflow's callback,
  reporting the ten points of the curve and a checkpoint at the end. (Ray's processes leave the tree, so that their
  processor time is not measured.) It needs `pip install "ray[tune]"`. Its overhead
  over the bare loop is what archlab's is held against: `overhead_of_tune` is the quotient.
* one (with --cores): `archlab run` kept to one core; `speed_up` is how much faster all cores are.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
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
TOKENS = {"short": 200_000, "full": 2_400_000}  # of a trial of about 5 s, and of one of about 60 s
GOALS = {"short": 1.10, "full": 1.03}  # archlab over bare
TUNE_GOAL, CORES_GOAL = 0.5, 1.7  # archlab's overhead over Tune's; two cores over one
LIMIT_S = 1800
READ_S = 2.0  # between two looks at /proc, each of which takes 4 ms of a core

Times = dict[str, float]
Losses = dict[int, float]  # test loss by seed


def archlab(study: Path, *options: str, cores: int | None = None) -> tuple[Times, Losses]:
    """A whole `archlab run` into a new store, on so many cores or on all."""
    from archlab.search.store.store import Store
    from archlab.search.trial.metrics import read_metrics

    with tempfile.TemporaryDirectory(dir=study.parent) as root:
        command = [
            sys.executable,
            "-c",
            "from archlab.cli.main import main; main()",
            "run",
            str(study),
            "--store",
            root,
        ]
        with Path(root, "output.txt").open("w+") as output:
            kept = sorted(os.sched_getaffinity(0))[:cores]
            with on_cores(kept):
                process = subprocess.Popen([*command, *options], env=environment(), stdout=output, stderr=output)
            meter, ended = watched(process)
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


def tune(study: Path, trials: int) -> tuple[Times, Losses]:
    """The trials by Ray Tune in a process of its own."""
    with tempfile.TemporaryDirectory(dir=study.parent) as root, Path(root, "output.txt").open("w+") as output:
        command = [sys.executable, __file__, "--tuner", str(study), root, str(trials)]
        quiet = {
            "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
            "RAY_AIR_NEW_OUTPUT": "0",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        process = subprocess.Popen(command, env=environment() | quiet, stdout=output, stderr=output)
        _, ended = watched(process)
        if process.returncode:
            raise SystemExit(Path(root, "output.txt").read_text())
        last = json.loads(Path(root, "last.json").read_text())
        found = [json.loads(path.read_text()) for path in Path(root, "trials").iterdir()]
    first = min(each["first"] for each in found)
    return {"s": last - first, "exit_s": ended - last}, {each["seed"]: each["loss"] for each in found}


def tuner(study: str, root: str, trials: str) -> None:
    """Drives Ray Tune as its documentation shows it: a trainable function, a searcher, a callback."""
    import ray
    from ray import tune as ray_tune
    from ray.air.integrations.mlflow import MLflowLoggerCallback
    from ray.tune.search.optuna import OptunaSearch

    from archlab.search.planning.plan import plan
    from archlab.search.study.load import load_study

    class Last(ray_tune.Callback):
        """When the last trial's end was known."""

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            Path(root, "last.json").write_text(str(time.time()))

    cores, count = len(os.sched_getaffinity(0)), int(trials)
    Path(root, "trials").mkdir()
    ray.init(num_cpus=cores, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    data_root = Path(study).parent / "data"
    trial = plan(load_study(study), data_root).variants[0].trial(0).to_json()
    searcher = OptunaSearch(points_to_evaluate=[{"seed": seed} for seed in range(count)])
    ray_tune.Tuner(
        ray_tune.with_resources(ray_tune.with_parameters(trainable, trial=trial, root=root), {"cpu": 1}),
        param_space={"seed": ray_tune.choice(list(range(count)))},
        tune_config=ray_tune.TuneConfig(
            search_alg=searcher, num_samples=count, metric="loss", mode="min", max_concurrent_trials=cores
        ),
        run_config=ray_tune.RunConfig(
            storage_path=str(Path(root, "tune")),
            verbose=0,
            callbacks=[Last(), MLflowLoggerCallback(f"sqlite:///{root}/mlflow.db", experiment_name="overhead")],
        ),
    ).fit()
    ray.shutdown()


def trainable(config: dict[str, Any], trial: str, root: str) -> None:
    """One of Tune's trials: the bare loop, its points reported, its weights a checkpoint."""
    import torch
    from ray import tune as ray_tune

    from archlab.search.data.dataset import Dataset
    from archlab.search.trial.trial import Trial

    torch.set_num_threads(1)
    base, seed = Trial.from_json(trial), int(config["seed"])
    dataset = Dataset.open(Path(root).parent / "data", base.data)
    firsts: list[tuple[float, float]] = []
    loss, model = train_one(base, dataset, seed, firsts, lambda found: ray_tune.report({"loss": found}))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder, "model.pt"))
        ray_tune.report({"loss": loss}, checkpoint=ray_tune.Checkpoint.from_directory(folder))
    told = {"seed": seed, "loss": loss, "first": firsts[0][0]}
    Path(root, "trials", f"{seed}.json").write_text(json.dumps(told))


@contextmanager
def on_cores(cores: list[int]) -> Iterator[None]:
    """What is started meanwhile has these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def watched(process: subprocess.Popen[Any]) -> tuple[Meter, float]:
    """Waits for a process; what it and its children took, and when it ended (unix s)."""
    meter = Meter(process.pid)
    while process.poll() is None:
        meter.read()
        with suppress(subprocess.TimeoutExpired):
            process.wait(READ_S)
    return meter, time.time()


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

    from archlab.search.planning.plan import plan
    from archlab.search.study.load import load_study

    torch.set_num_threads(1)
    variant = plan(load_study(study), Path(study).parent / "data").variants[0]
    print("ready", flush=True)
    sys.stdin.readline()
    firsts: list[tuple[float, float]] = []
    trial, dataset = variant.trial(0), variant.dataset
    losses = {seed: train_one(trial, dataset, int(seed), firsts)[0] for seed in seeds}
    first, cpu_s = min(firsts, default=(math.inf, time.process_time()))
    print(json.dumps({"first": first, "last": time.time(), "cpu_s": time.process_time() - cpu_s, "losses": losses}))


def train_one(
    trial: Any,
    data: Any,
    seed: int,
    firsts: list[tuple[float, float]],
    report: Callable[[float], None] = lambda loss: None,
) -> tuple[float, Any]:
    """A trial as one writes it by hand, under another seed; returns its test loss in nats per token and its model."""
    import torch

    from archlab.search.data import batch
    from archlab.search.recipe.curve import curve_points, curve_windows
    from archlab.search.recipe.recipe import load_recipe
    from archlab.search.training.held_out import evaluate, held_out, losses
    from archlab.search.training.loop import LOG_LINES
    from archlab.search.training.module import build_model, split_seed

    recipe, seeds = load_recipe(trial.recipe), split_seed(seed)
    model = build_model(replace(trial, seed=seed), recipe, torch.device("cpu"))
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
            report(float(losses(model, curve, recipe.batch).sum() / curve.scored))
    evaluate(model, data, "validation", recipe.context, recipe.batch)
    return float(evaluate(model, data, "test", recipe.context, recipe.batch)[0]["loss"]), model


def main() -> None:
    """Prints a line of JSON per round, and one of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="trials twelve times as long")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--tokens", type=int, help="of one trial")
    parser.add_argument("--parts", action="store_true", help="a third contestant, without tracking")
    parser.add_argument("--tune", action="store_true", help="another one, Ray Tune with OptunaSearch and MLflow")
    parser.add_argument("--cores", action="store_true", help="another one, archlab on one core")
    options = parser.parse_args()
    kind = "full" if options.full else "short"
    tokens = options.tokens or TOKENS[kind]
    if options.tune and not (find_spec("ray.tune") and find_spec("pandas") and find_spec("pyarrow")):
        raise SystemExit('Ray Tune is not here: pip install "ray[tune]", or leave out --tune')
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder, "overhead.yaml")
        study.write_text(STUDY.format(tokens=tokens, trials=options.trials))
        contestants: dict[str, Callable[[], tuple[Times, Losses]]] = {
            "bare": lambda: bare(study, options.trials),
            "archlab": lambda: archlab(study),
        }
        if options.parts:
            contestants["untracked"] = lambda: archlab(study, "--no-track")
        if options.tune:
            contestants["tune"] = lambda: tune(study, options.trials)
        if options.cores:
            contestants["one"] = lambda: archlab(study, cores=1)
        rounds = [turn(number, contestants) for number in range(options.rounds)]
    ratios = [key for key in rounds[0] if key.endswith(("ratio", "of_tune", "speed_up"))]
    medians = {f"median_{key}": statistics.median(each[key] for each in rounds) for key in ratios}
    goals = {"archlab_ratio": GOALS[kind], "overhead_of_tune": TUNE_GOAL, "speed_up": CORES_GOAL}
    print(json.dumps({**medians, "goals": {k: goal for k, goal in goals.items() if k in ratios}, "tokens": tokens}))


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
    for key in ("s", "cpu_s"):
        ours = [name for name in order if name != "bare" and f"{name}_{key}" in row]
        row |= {f"{name}_{key[:-1]}ratio": round(row[f"{name}_{key}"] / row[f"bare_{key}"], 3) for name in ours}
    if "tune" in order:
        lost = {name: max(row[f"{name}_s"] - row["bare_s"], 0.0) for name in ("archlab", "tune")}
        row["overhead_of_tune"] = round(lost["archlab"] / max(lost["tune"], 1e-9), 3)
    if "one" in order:
        row["speed_up"] = round(row["one_s"] / row["archlab_s"], 3)
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    elif sys.argv[1:2] == ["--tuner"]:
        tuner(*sys.argv[2:])
    else:
        main()
