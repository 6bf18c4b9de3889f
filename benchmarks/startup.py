"""How long one waits for archlab: for help, status, a plan of 1,000 variants, and the first training step.

    python benchmarks/startup.py                # some minutes
    python benchmarks/startup.py --rounds 1 --only help status

Each command is a fresh process that takes turns with its floor, the least that any tool of its kind would have to do,
in another fresh process. Figures are medians over the rounds, ratios the medians of each round's ratio.

* help: `archlab --help` beside importing click.
* status: `archlab status` of a store with one study, beside importing click and sqlite3.
* plan: `archlab plan` of a grid of 1,000 different models, to the last line, beside importing torch.
* first step: from the start of `archlab run` to the time of the first line in a metrics.jsonl, beside importing torch
  and starting Ray in one process. `cold`: into a new store, whose corpus is prepared first; `warm`: it has its corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "studies" / "quickstart.yaml"
THOUSAND = """\
study: thousand
model:
  d_model: 64
  n_layers: 2
  block:
    norm: rmsnorm
    attention: {heads: 4, positional: rope}
    ffn: {type: glu, activation: silu}
variants: {baseline: {}}
grid:
  n_layers: [1, 2, 3, 4, 5, 6, 7, 8]
  block.attention.heads: [1, 2, 4, 8, 16]
  block.ffn.width: WIDTHS
train:
  data: {type: stdlib, validation_bytes: 64k, test_bytes: 128k}
  tokens: 100k
  lr: 1e-3
""".replace("WIDTHS", str([64 + 8 * step for step in range(25)]))
START_RAY = "import torch, ray; ray.init(include_dashboard=False, log_to_driver=False, logging_level='ERROR')"
GOALS = {"help": 0.5, "status": 0.5, "plan": 5.0, "first step, warm": 10.0, "first step, cold": 10.0}
LIMIT_S = 120

Run = Callable[[], float]


def archlab(*arguments: object) -> list[str]:
    """The command line of this checkout."""
    return [sys.executable, "-c", "from archlab.cli.main import main; main()", *map(str, arguments)]


def environment() -> dict[str, str]:
    """This checkout first on the path."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}


def seconds(command: list[str]) -> float:
    """How long a command takes from start to end."""
    started = time.perf_counter()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stderr}")
    return time.perf_counter() - started


def seconds_to_print(code: str) -> float:
    """How long a fresh Python takes to run some code, without what it takes to end."""
    started = time.perf_counter()
    command = [sys.executable, "-c", f"{code}; print('done', flush=True)"]
    with subprocess.Popen(command, env=environment(), stdout=-1, stderr=subprocess.DEVNULL, text=True) as process:
        process.stdout.readline()
        return time.perf_counter() - started


def seconds_to_first_step(folder: Path, data: Path | None = None) -> float:
    """From the start of a run of the quickstart study in a new store to its first step, after which it is stopped."""
    store = Path(tempfile.mkdtemp(dir=folder))
    if data:
        shutil.copytree(data, store / "data")
    command = archlab("run", QUICKSTART, "--store", store, "--set", "train.tokens=100k")
    with (folder / "output.txt").open("w+") as output:
        started = time.time()
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        try:
            while (first := first_step(store)) is None:
                if process.poll() is not None or time.time() - started > LIMIT_S:
                    output.seek(0)
                    raise SystemExit(f"no training step within {LIMIT_S} s:\n{output.read()}")
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT_S)
    return first - started


def first_step(store: Path) -> float | None:
    """When (unix s) the first step of any trial ended, None before that is written down."""
    lines = [path.read_text().partition("\n") for path in store.glob("trials/*/*/metrics.jsonl")]
    return min((json.loads(line)["time"] for line, end, _ in lines if end), default=None)


def contests(folder: Path) -> dict[str, tuple[Run, str, Run]]:
    """Per measure: ours, the floor in words, the floor."""
    study, store, warm = folder / "thousand.yaml", folder / "store", folder / "warm"
    study.write_text(THOUSAND)
    one = folder / "one.yaml"
    one.write_text(THOUSAND[: THOUSAND.index("grid:")] + THOUSAND[THOUSAND.index("train:") :])
    few = ("--set", "train.tokens=4k", "--set", "seeds=1", "--inline", "--no-track")
    seconds(archlab("run", one, "--store", store, *few))
    seconds(archlab("plan", QUICKSTART, "--store", warm))
    ray = "import torch, ray; ray.init()", lambda: seconds_to_print(START_RAY)
    return {
        "help": (lambda: seconds(archlab("--help")), "import click", lambda: seconds_to_print("import click")),
        "status": (
            lambda: seconds(archlab("status", "--store", store)),
            "import click, sqlite3",
            lambda: seconds_to_print("import click, sqlite3"),
        ),
        "plan": (
            lambda: seconds(archlab("plan", study, "--store", store)),
            "import torch",
            lambda: seconds_to_print("import torch"),
        ),
        "first step, warm": (lambda: seconds_to_first_step(folder, warm / "data"), *ray),
        "first step, cold": (lambda: seconds_to_first_step(folder), *ray),
    }


def main() -> None:
    """Prints a line of JSON per measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=("help", "status", "plan", "first step"), metavar="MEASURE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, (ours, words, floor) in contests(Path(folder)).items():
            if options.only and name.split(",")[0] not in options.only:
                continue
            rounds = [(ours(), floor()) for _ in range(options.rounds)]
            row = {
                "measure": name,
                "archlab_s": round(statistics.median(mine for mine, _ in rounds), 3),
                "floor": words,
                "floor_s": round(statistics.median(least for _, least in rounds), 3),
                "ratio": round(statistics.median(mine / least for mine, least in rounds), 2),
                "goal_s": GOALS[name],
                "all_s": [round(mine, 2) for mine, _ in rounds],
                "load": round(os.getloadavg()[0], 1),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
