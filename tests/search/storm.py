"""Kills whatever runs a study, at random moments, until it is done, and holds the result against an undisturbed run.

`python -m tests.search.storm --seeds 20` prints the table of docs/concepts/storms.md. A fault is SIGKILL of the
driver, of a trial's process, of Ray's raylet or GCS, of MLflow's server, or of PostgreSQL's.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path

from archlab.search.executors.group_end import free_port
from archlab.search.running.retries import RETRIES
from archlab.search.store.store import Store, StoreError
from archlab.search.trial.outcome_files import read_attempt
from tests.search.oracle import assert_sent, assert_whole, journal_points, mlflow_points, whole_of
from tests.search.postgres_kit import Cluster, programs
from tests.search.processes import alive, descendants
from tests.search.study_kit import ROOT, until

KINDS = ("driver", "worker", "raylet", "gcs", "mlflow", "postgres")
NAMES = {
    "driver": "the driver",
    "worker": "a trial's process",
    "raylet": "Ray's raylet",
    "gcs": "Ray's GCS",
    "mlflow": "MLflow's server",
    "postgres": "PostgreSQL's server",
}
EXTRA = 3  # kills per storm beyond one of each kind
END_S = 1800.0  # guard: a run that takes longer hangs
STUDY = """\
study: tiny
model:
  d_model: 32
  n_layers: 1
  block:
    norm: rmsnorm
    attention: {heads: 2, positional: rope}
    ffn: {type: glu, activation: silu}
variants:
  baseline: {}
  gated: {block.attention.gate: {position: sdpa}}
train: {data: {text: corpus.txt}, tokens: 32k, context: 32, batch: 4, lr: 1e-3}
tune: {lr: [1e-3, 4e-3]}
seeds: 2
"""


class Servers:
    """MLflow's server and PostgreSQL's (where it is installed), that can be killed and come back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.mlflow: subprocess.Popen | None = None
        self.postgres = None
        if programs() is not None:
            self.postgres = Cluster(tempfile.mkdtemp(prefix="archlab-storm-pg-"))
            self.postgres.start()
        self.start_mlflow()
        # One that is killed while it makes its tables never starts again: MLflow leaves them half-made.
        until(self.mlflow_answers)

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_mlflow(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        places = ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        with open(self.folder / "mlflow.log", "a") as log:
            self.mlflow = subprocess.Popen(
                [*command, *places, "--artifacts-destination", str(self.folder / "artifacts")],
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def mlflow_answers(self) -> bool:
        with suppress(OSError):
            return urllib.request.urlopen(f"{self.uri}/health", timeout=2).status == 200
        return False

    def kill(self, kind: str) -> None:
        """As if the power had failed."""
        if kind == "postgres":
            self.postgres.stop(signal.SIGKILL)
        else:
            with suppress(ProcessLookupError):
                os.killpg(self.mlflow.pid, signal.SIGKILL)
            self.mlflow.wait()

    def back(self, kind: str) -> None:
        """Starts it again."""
        self.postgres.start() if kind == "postgres" else self.start_mlflow()

    def close(self) -> None:
        self.kill("mlflow")
        if self.postgres is not None:
            self.postgres.stop()
            shutil.rmtree(self.postgres.folder, ignore_errors=True)


class Storm:
    """One study in one store, from its first run to the one that says that everything is done."""

    def __init__(self, seed: int, study: Path, root: Path, servers: Servers, extra: int = EXTRA) -> None:
        self.chance, self.study, self.root, self.servers = random.Random(seed), study, root, servers
        database = servers.postgres.new_database() if servers.postgres else ""
        self.env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            **({"ARCHLAB_DATABASE": database} if database else {}),
            **dict.fromkeys(("ARCHLAB_MLFLOW", "ARCHLAB_MLFLOW_URI"), servers.uri),
        }
        kinds = [kind for kind in KINDS if kind != "postgres" or servers.postgres]
        self.kills = kinds + self.chance.choices(kinds, k=extra)
        self.chance.shuffle(self.kills)
        self.done: list[tuple[float, str, dict[str, int]]] = []  # unix s, kind, attempt by trial complete before
        self.complete: dict[str, int] = {}  # attempt by trial that was seen complete
        self.runs, self.waits = 0, True
        self.hits, self.aimed = Counter(), ""  # kills of a trial's own process, by trial
        self.struck: set[str] = set()  # kinds killed in this run
        self.down: dict[str, float] = {}  # when which server comes back

    def start(self) -> subprocess.Popen:
        self.runs += 1
        command = [
            sys.executable,
            "-m",
            "tests.search.storm_trainer",
            "run",
            self.study,
            "--store",
            self.root,
            "--json",
        ]
        with open(self.root.parent / f"{self.root.name}.log", "a") as log:
            return subprocess.Popen(
                list(map(str, command)), env=self.env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    def run(self) -> None:
        """Runs, kills and runs again until a run ends with 0, and then once more with everything up."""
        deadline = time.monotonic() + END_S
        while True:
            process = self.start()
            self.struck.clear()
            next_kill = time.monotonic() + self.chance.uniform(0.3, 6.0)
            while process.poll() is None:
                assert time.monotonic() < deadline, f"the study is not done after {END_S} s: {self.tail()}"
                self.servers_back()
                if self.kills and time.monotonic() >= next_kill and self.strike(process.pid):
                    next_kill = time.monotonic() + self.chance.uniform(0.3, 6.0)
                time.sleep(0.02)
            without_gcs = (1,) if "gcs" in self.struck else ()  # Ray itself ends a process that lost it, with 1
            assert process.returncode in (0, 75, -signal.SIGKILL, *without_gcs), (process.returncode, self.tail())
            if process.returncode == 0:
                break
            self.servers_back(at_once=process.returncode == 75)
        self.servers_back(at_once=True)
        until(self.servers.mlflow_answers)
        process = self.start()
        assert process.wait(END_S) == 0, self.tail()

    def strike(self, driver: int) -> bool:
        """Makes the next kill if its victim is there by now: in three of four cases when a trial trains."""
        kind = self.kills[-1]
        if self.waits and self.victim("worker", driver) is None:
            return False
        if kind in ("mlflow", "postgres"):
            if kind in self.down:
                return False
            self.see_complete()
            self.servers.kill(kind)
            self.down[kind] = time.monotonic() + self.chance.uniform(0.2, 3.0)
        else:
            victim = driver if kind == "driver" else self.victim(kind, driver)
            if victim is None:
                return False
            self.see_complete()
            self.hits[self.aimed] += kind == "worker"
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        self.struck.add(self.kills.pop())
        self.waits = self.chance.random() < 0.75
        self.done.append((time.time(), kind, dict(self.complete)))
        return True

    def victim(self, kind: str, driver: int) -> int | None:
        """The process of Ray, or one that trains."""
        if kind != "worker":
            named = {"raylet": "/raylet/raylet ", "gcs": "/gcs_server "}[kind]
            return next((pid for pid, command in descendants(driver).items() if named in command), None)
        for path in self.root.glob("trials/*/*/attempt.json"):
            pid, self.aimed = read_attempt(path.parent).get("pid"), path.parent.name
            spared = self.hits[self.aimed] >= RETRIES["crash"]  # one crash more would be its last
            if (
                pid
                and not spared
                and not (path.parent / "result.json").exists()
                and alive(pid)
                and pid in descendants(driver)
            ):
                return int(pid)
        return None

    def servers_back(self, at_once: bool = False) -> None:
        for kind, when in list(self.down.items()):
            if at_once or time.monotonic() >= when:
                self.servers.back(kind)
                del self.down[kind]

    def see_complete(self) -> None:
        """Remembers what has a result by now; it must not be trained again."""
        if "postgres" in self.down or not (self.root / "store.json").exists():
            return
        with suppress(StoreError), self.opened() as store:
            if any(each["name"] == "tiny" for each in store.studies()):
                rows = store.study_trials("tiny")
                self.complete |= {row["key"]: row["attempt"] for row in rows if row["state"] == "complete"}

    def opened(self) -> Store:
        with environment(self.env):
            return Store.open(self.root, create=False)

    def tail(self) -> str:
        return (self.root.parent / f"{self.root.name}.log").read_text()[-3000:]

    def judge(self, calm: dict) -> dict[str, Counter]:
        """Holds the store against the undisturbed one; counts by kind of kill: tried, lost, rerun, interrupted trials,
        repeated steps."""
        with environment(self.env):
            assert_whole(self.root, calm)
            assert_sent(mlflow_points(self.servers.uri), journal_points(self.root))
            with Store.open(self.root) as store:
                rows = {row["key"]: row for row in store.study_trials("tiny")}
        found = {kind: Counter() for kind in KINDS}
        for _, kind, complete in self.done:
            found[kind]["tried"] += 1
            found[kind]["lost"] += sum(rows[key]["state"] != "complete" for key in complete)
            found[kind]["rerun"] += sum(rows[key]["attempt"] != attempt for key, attempt in complete.items())
        for kind, repeated in self.repeated():
            found[kind]["interrupted"] += 1
            found[kind]["repeated"] += repeated
            assert repeated <= 1, (kind, repeated)  # there is a checkpoint after every step
        return found

    def repeated(self) -> list[tuple[str, int]]:
        """For each continued trial: the last kill before it, and how many steps it trained a second time."""
        seen: dict[str, int] = {}
        found = []
        for line in (self.root / "steps.log").read_text().splitlines():
            key, attempt, what, step, when = line.split()
            if what == "start" and int(attempt) > 1:
                before = [kind for killed, kind, _ in self.done if killed < float(when)]
                found.append((before[-1] if before else "driver", max(0, seen.get(key, 0) - int(step))))
            elif what == "step":
                seen[key] = int(step)
        return found


class environment:
    """The storm's variables in this process for a while: where its table is."""

    def __init__(self, wanted: dict[str, str]) -> None:
        self.wanted = {name: wanted[name] for name in ("ARCHLAB_DATABASE",) if name in wanted}

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.wanted}
        os.environ.update(self.wanted)

    def __exit__(self, *_: object) -> None:
        for name, value in self.before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def write_corpus(folder: Path, study: str = STUDY) -> Path:
    """The study and 70 kB of made-up words."""
    chance = random.Random(0)
    words = ["".join(chance.choices("bcdfglmnprst", k=2)) + chance.choice("aeiou") for _ in range(300)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    documents = [" ".join(chance.choices(words, weights, k=150)) for _ in range(120)]
    (folder / "corpus.txt").write_text("\n\n".join(documents) + "\n")
    (folder / "tiny.yaml").write_text(study)
    return folder / "tiny.yaml"


def undisturbed(study: Path, root: Path) -> Path:
    """The study run without a fault, in a process per trial as under the storm."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")}
    command = [
        sys.executable,
        "-m",
        "tests.search.storm_trainer",
        "run",
        study,
        "--store",
        root,
        "--no-track",
        "--json",
    ]
    subprocess.run(list(map(str, command)), env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=END_S)
    return root


def main() -> None:
    """Storms with seeds 0, 1, … and prints what was tried, lost and repeated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="archlab-storm-"))
    total = {kind: Counter() for kind in KINDS}
    study = write_corpus(folder)
    calm = whole_of(undisturbed(study, folder / "calm"))
    started, seeds, runs = time.monotonic(), 0, 0
    try:
        for seed in range(given.first, given.first + given.seeds):
            storm, counts = one(seed, study, folder / f"seed-{seed}", calm)
            seeds, runs = seeds + 1, runs + storm.runs
            for kind, each in counts.items():
                total[kind] += each
            told = f"seed {seed}: {len(storm.done)} kills, {storm.runs} runs, the end is that of an undisturbed one"
            print(told, file=sys.stderr, flush=True)
        shutil.rmtree(folder)
    finally:  # also of those that went well before one that did not
        print("| SIGKILL of | times | trials lost | finished trials run again | interrupted trials | steps repeated |")
        print("|---|---|---|---|---|---|")
        for kind, counts in total.items():
            cells = [NAMES[kind], *(counts[name] for name in ("tried", "lost", "rerun", "interrupted", "repeated"))]
            print("| " + " | ".join(map(str, cells)) + " |")
        minutes = (time.monotonic() - started) / 60
        print(f"\n{seeds} storms, {runs} runs, {minutes:.0f} minutes on {os.cpu_count()} cores", flush=True)


def one(seed: int, study: Path, folder: Path, calm: dict) -> tuple[Storm, dict[str, Counter]]:
    """One storm with servers of its own, and what it came to."""
    folder.mkdir()
    servers = Servers(folder)
    try:
        storm = Storm(seed, study, folder / "store", servers)
        storm.run()
        counts = storm.judge(calm)
    finally:
        servers.close()
    shutil.rmtree(folder)
    return storm, counts


if __name__ == "__main__":
    main()
