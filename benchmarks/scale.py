"""What the engine costs with very many trials: a planned study of 10,000 trials that train nothing.

    python benchmarks/scale.py                   # 10,000 trials: about five minutes
    python benchmarks/scale.py --trials 2000 --ray 200
    python benchmarks/scale.py --parts soak --trials 100000   # half an hour; ARCHLAB_DATABASE names a server

Printed as lines of JSON:

* cli: seconds from `archlab run` to the first trial's first event, of a real study of so many trials (real variants,
  five seeds each) that is then killed, and the resident memory of the driver's process then; seconds of `archlab
  status` on its store.
* inline: driver and store alone. The same study is driven to its end by the inline executor with a trainer that writes
  a line and a result. `per_s` is trials per second over the whole run, `slowest_per_s` over the slowest tenth of it
  (what is sustained), `peak_mb` the peak resident memory.
* ray: the same with Ray, in which each trial has a process of its own, forked, pinned and ended.
* soak: a study of a hundred seeds, driven inline, whose driver is killed every `--kill-s` seconds and started again.
  After `trials` finished trials of the store, `driver_mb` is the driver's resident memory, `per_s` its trials per
  second over the last thousand, `table_mb` the size of the trial table; `report_s` and `report_mb` what a process of
  its own needs to compare and print them all.

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


def soaked(path: Path, root: Path) -> None:
    """Drives a study inline from where it stands, and prints a line for every thousand trials that finish."""
    from archlab.search.executors.inline import InlineExecutor
    from archlab.search.planning.plan import plan
    from archlab.search.running.driver import drive
    from archlab.search.store.store import Store
    from archlab.search.study.load import load_study

    study = load_study(path)
    planned = plan(study, root / "data")
    with Store.open(root) as store:
        store.save_study(study.study, planned.record(), path.read_text())
        done = sum(row["counts"].get("complete", 0) for row in store.studies())
        since = time.monotonic()

        def on_event(event: dict[str, Any]) -> None:
            nonlocal done, since
            if event["event"] != "finished":
                return
            done += 1
            if done % 1000 == 0 and done < planned.trials:
                tell()

        def tell() -> None:
            nonlocal since
            took, since = time.monotonic() - since, time.monotonic()
            told = {"trials": done, "driver_mb": resident_mb(os.getpid()), "per_s": 1000 / took}
            print(json.dumps({name: round(value, 1) for name, value in told.items()}), flush=True)

        drive(store, study.study, planned.rows, InlineExecutor("scale:train", root / "data"), on_event=on_event)
        done = sum(row["counts"].get("complete", 0) for row in store.studies())
        tell()  # a trial that had ended when its driver was killed is no event


def reported(root: Path) -> None:
    """Compares and prints all trials, and says what that took."""
    from archlab.search.comparison.compare import load_comparison
    from archlab.search.reporting.report import report
    from archlab.search.store.store import Store

    began = time.monotonic()
    with Store.open(root, create=False) as store:
        report(load_comparison(store, "scale"), "json")
    table = sum(each.stat().st_size for each in root.glob("trials.db*")) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"report_s": time.monotonic() - began, "report_mb": peak, "table_mb": table}
    print(json.dumps({name: round(value, 1) for name, value in found.items()}), flush=True)


def soak(path: Path, root: Path, trials: int, kill_s: float) -> bool:
    """The part of that name; whether every trial ended once, but for those that a kill hit."""
    kills, told, shown = 0, 0, (1000, 10_000, trials // 2, trials)
    ended = False
    while not ended:
        command = [sys.executable, __file__, "--soaked", str(path), str(root)]
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        began = time.monotonic()
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            told = found["trials"]
            if told in shown:
                asked = [sys.executable, __file__, "--reported", str(root)]
                answer = subprocess.run(asked, env=environment(), check=True, capture_output=True, text=True).stdout
                print(json.dumps({"part": "soak", "kills": kills, **found, **json.loads(answer)}), flush=True)
            if time.monotonic() - began > kill_s and told < trials:
                process.kill()
                kills += 1
                break
        else:
            ended = process.wait() == 0
            if not ended:
                return False
        process.wait()
    from archlab.search.store.store import Store

    with Store.open(root, create=False) as store:
        rows = store.study_trials("scale")
    attempts = sum(row["attempt"] for row in rows)
    return all(row["state"] == "complete" for row in rows) and len(rows) == trials and attempts <= trials + kills


def main() -> None:
    """Prints a line of JSON per part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--ray", type=int, default=500, metavar="TRIALS", help="of the part with Ray; 0: without it")
    parser.add_argument("--parts", nargs="+", default=["cli", "inline", "ray"], help="and soak")
    parser.add_argument("--kill-s", type=float, default=120.0, help="after which the soak's driver is killed")
    options = parser.parse_args()
    failed = False
    for part in options.parts:
        trials = options.ray if part == "ray" else options.trials
        if not trials:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            path = write_study(folder, trials, 100 if part == "soak" else SEEDS)
            if part == "soak":
                failed |= not soak(path, folder / "store", trials, options.kill_s)
                continue
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
    elif sys.argv[1:2] == ["--soaked"]:
        soaked(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["--reported"]:
        reported(Path(sys.argv[2]))
    else:
        main()
