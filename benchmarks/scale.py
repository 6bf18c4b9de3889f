"""What the engine costs with very many trials: a planned study of 10,000 trials that train nothing.

    python benchmarks/scale.py                   # 10,000 trials: about five minutes
    python benchmarks/scale.py --trials 2000 --ray 200

Printed as lines of JSON:

* cli: seconds from `archlab run` to the first trial's first event, of a real study of so many trials (real variants,
  five seeds each) that is then killed, and the resident memory of the driver's process then; seconds of `archlab
  status` on its store.
* inline: driver and store alone. The same study is driven to its end by the inline executor with a trainer that writes
  a line and a result. `per_s` is trials per second over the whole run, `slowest_per_s` over the slowest tenth of it
  (what is sustained), `peak_mb` the peak resident memory.
* ray: the same with Ray, in which each trial has a process of its own, forked, pinned and ended.

Exits with 1 when not every trial has ended exactly once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 5
STUDY = """\
study: scale
model:
  d_model: 64
  n_layers: 4
  block:
    norm: {{type: rmsnorm, placement: pre}}
    attention: {{heads: 4, positional: rope}}
    ffn: {{type: glu, activation: silu}}
variants:
{variants}
report: {{baseline: v0000}}
train: {{data: {{text: corpus.txt}}, tokens: 100k, context: 32, batch: 4, lr: 1e-3}}
seeds: {seeds}
"""
ARCHLAB = [sys.executable, "-c", "from archlab.cli.main import main; main()"]


class Interrupted(Exception):
    """What a trainer raises when it was asked to stop; this one ends before anyone could."""


def train(folder: Path, data_root: Path, attempt: int, should_stop: Any, **_: Any) -> dict[str, Any]:
    """Trains nothing: a line and a result, as small as real ones are."""
    now = time.time()
    line = {"step": 1, "time": now, "attempt": attempt, "tokens": 128, "loss": 5.5, "lr": 1e-3, "grad_norm": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line | {"tokens_per_s": None}) + "\n")
    losses = {"loss": 5.5, "perplexity": 244.7, "bits_per_byte": 7.9}
    result = {"state": "complete", "reason": None, "step": 1, "tokens": 128, "validation": losses, "test": losses}
    result["signs"] = []
    (folder / "result.json").write_text(json.dumps(result))
    return result


def write_study(folder: Path, trials: int, seeds: int = SEEDS) -> Path:
    """A study of variants that differ in the base frequency of their rotation."""
    corpus = "\n\n".join(f"document {number} " + "of some words " * 20 for number in range(600))
    (folder / "corpus.txt").write_text(corpus)
    lines = ["  v0000: {}"]
    lines += [
        f"  v{number:04d}: {{block.attention.positional.theta: {10_000 + number}.0}}"
        for number in range(1, max(1, trials // seeds))
    ]
    path = folder / "study.yaml"
    path.write_text(STUDY.format(variants="\n".join(lines), seeds=seeds))
    return path


def environment() -> dict[str, str]:
    """This checkout and this folder first, one thread per process."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def cli(path: Path, root: Path) -> dict[str, Any]:
    """`archlab run` until its first trial has begun, then `archlab status`."""
    began = time.monotonic()
    process = subprocess.Popen(
        [*ARCHLAB, "run", str(path), "--store", str(root), "--json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("{") and json.loads(line).get("event") == "launched":
                break
        else:
            raise SystemExit("archlab run ended before its first trial")
        first_s = time.monotonic() - began
        memory_mb = resident_mb(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    began = time.monotonic()
    subprocess.run([*ARCHLAB, "status", "--store", str(root)], env=environment(), check=True, stdout=subprocess.DEVNULL)
    return {"first_trial_s": first_s, "memory_mb": memory_mb, "status_s": time.monotonic() - began}


def resident_mb(pid: int) -> float:
    """The resident memory of a process, in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def driven(path: Path, root: Path, kind: str) -> None:
    """Drives a study to its end in this process with the trainer above, and prints what it took."""
    from archlab.search.executors.executor import Executor
    from archlab.search.executors.inline import InlineExecutor
    from archlab.search.planning.plan import plan
    from archlab.search.running.driver import drive
    from archlab.search.store.store import Store
    from archlab.search.study.load import load_study

    study = load_study(path)
    planned = plan(study, root / "data")
    executor: Executor = InlineExecutor("scale:train", root / "data")
    if kind == "ray":
        from archlab.search.executors.ray_executor import RayExecutor

        executor = RayExecutor("scale:train", root / "data")
    ended: list[float] = []
    launched: list[str] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "finished":
            ended.append(time.monotonic())
        elif event["event"] == "launched":
            launched.append(event["key"])

    with Store.open(root) as store:
        store.save_study(study.study, planned.record(), path.read_text())
        began = time.monotonic()
        try:
            summary = drive(store, study.study, planned.rows, executor, on_event=on_event)
        finally:
            executor.close()
        rows = store.study_trials(study.study)
    once = len(set(launched)) == len(launched) == len(ended) == len(rows) == planned.trials
    tenth = max(1, len(ended) // 10)
    tenths = [ended[end] - ended[end - tenth] for end in range(tenth, len(ended), tenth)] or [ended[-1] - began]
    print(
        json.dumps(
            {
                "part": kind,
                "trials": len(rows),
                "once": once and summary.exit_code == 0,
                "first_s": round(ended[0] - began, 2),
                "per_s": round(len(ended) / (ended[-1] - began), 1),
                "slowest_per_s": round(tenth / max(tenths), 1),
                "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            }
        ),
        flush=True,
    )
    if not once:
        raise SystemExit(1)


def main() -> None:
    """Prints a line of JSON per part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--ray", type=int, default=500, metavar="TRIALS", help="of the part with Ray; 0: without it")
    parser.add_argument("--parts", nargs="+", default=["cli", "inline", "ray"])
    options = parser.parse_args()
    failed = False
    for part in options.parts:
        trials = options.ray if part == "ray" else options.trials
        if not trials:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            path = write_study(folder, trials)
            if part == "cli":
                found = {key: round(value, 2) for key, value in cli(path, folder / "store").items()}
                print(json.dumps({"part": part, "trials": trials, **found}), flush=True)
                continue
            command = [sys.executable, __file__, "--driven", str(path), str(folder / "store"), part]
            failed |= subprocess.run(command, env=environment(), check=False).returncode != 0
    sys.exit(int(failed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--driven"]:
        driven(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        main()
