"""Takes a cluster apart while it runs a study, and holds the result against an undisturbed one.

`python -m tests.search.partitions` prints the table of docs/concepts/storms.md. Three machines with Ray, one
with PostgreSQL's and MLflow's servers, and one for a standby are namespaces of this one (tests/search/lab.py).
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
from collections import Counter
from contextlib import suppress
from pathlib import Path

from archlab.search.store.store import Store
from archlab.search.trial.outcome_files import read_attempt
from tests.search.lab import Lab, kill_tree, lacks, wait_for
from tests.search.oracle import assert_sent, assert_whole, journal_points, mlflow_points, whole_of
from tests.search.storm import STUDY, environment, undisturbed, write_corpus

KINDS = {
    "seconds": "a machine is cut off for seconds",
    "minutes": "a machine is cut off for more than a minute",
    "deaf": "a machine hears nothing, and is heard",
    "mute": "a machine hears, and is not heard",
    "slow": "all cables are slow and lose frames",
    "servers": "the servers are cut off",
    "half-open": "the servers hear nothing, or are not heard",
    "frozen": "all processes of a machine stand still",
    "disk": "a machine's temporary disk is full",
    "head": "the head loses its power and comes back",
    "failover": "the database loses its power, and its standby leads",
    "clock": "a machine starts again with a clock that is an hour off, and later with the right one",
}
SHORT = STUDY.replace("32k", "16k").replace("tune: {lr: [1e-3, 4e-3]}\n", "")
END_S = 900.0  # guard: a scenario that takes longer hangs
RUNS = 12  # after which a study that should be done by now is not
ALLOWED = (0, 75)


class Scenario:
    """One study in one store, from its first run to the one that says that everything is done."""

    def __init__(self, seed: int, study: Path, root: Path, lab: Lab) -> None:
        self.chance, self.study, self.root, self.lab = random.Random(seed), study, root, lab
        self.kind = list(KINDS)[seed % len(KINDS)]
        self.victim = lab.machines[self.chance.choice(["one", "two"])]
        self.driver = lab.machines[self.chance.choice(["head", "one"])]
        self.before_s = self.chance.uniform(0.0, 6.0)  # from the first step on the victim
        self.runs, self.refused, self.heals_at = 0, 0, 0.0
        self.process: subprocess.Popen | None = None
        self.complete: dict[str, int] = {}  # attempt by trial that was complete when it struck
        database = lab.follow() if self.kind == "failover" else lab.database.new_database()
        self.url = {"ARCHLAB_DATABASE": database}

    @property
    def log(self) -> Path:
        return self.root.parent / f"{self.root.name}.log"

    def start(self, verb: str = "run") -> subprocess.Popen:
        """The study by address, from the machine of the driver."""
        self.runs += verb == "run"
        assert self.runs <= RUNS, f"{self.runs} runs: {self.tail()}"
        command = ["-m", "tests.search.storm_trainer", verb]
        command += [self.study, "--json", "--address", self.lab.ray.address] if verb == "run" else []
        mlflow = dict.fromkeys(("ARCHLAB_MLFLOW", "ARCHLAB_MLFLOW_URI"), self.lab.uri)
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                self.driver.command(sys.executable, *command, "--store", self.root),
                env={**self.lab.ray.environment(self.driver), **self.url, **mlflow},
                stdout=log,
                stderr=log,
            )
        return self.process

    def run(self) -> None:
        """Runs, strikes, and runs again until a run ends with 0 after all has healed; then once more."""
        deadline, strikes_at, struck = time.monotonic() + END_S, 0.0, False
        while True:
            process = self.start()
            while process.poll() is None:
                assert time.monotonic() < deadline, f"the study is not done after {END_S} s: {self.tail()}"
                if not strikes_at and self.trains():
                    strikes_at = time.monotonic() + self.before_s
                if not struck and strikes_at and time.monotonic() >= strikes_at:
                    self.see_complete()
                    struck, self.heals_at = True, time.monotonic() + self.strike()
                self.pass_time(struck)
            lost_ray = (1,) if struck else ()  # Ray itself ends a process that lost its head, with 1
            assert process.returncode in (*ALLOWED, *lost_ray), (process.returncode, self.tail())
            self.refused += process.returncode != 0
            while struck and self.heals_at and process.returncode:
                self.pass_time(struck)
            if process.returncode == 0 and struck:
                break
            assert process.returncode or struck, "it was done before anything happened"
        wait_for("all has healed", lambda: self.pass_time(struck) or not self.heals_at)
        wait_for("the servers", self.lab.mlflow_answers)
        assert self.start("sync").wait(END_S) == 0, self.tail()  # what an outage has kept back

    def trains(self) -> bool:
        """Whether a trial trains where the fault will strike."""
        struck = ("seconds", "minutes", "deaf", "mute", "frozen", "disk", "clock")
        places = {self.victim.name} if self.kind in struck else None
        for path in self.root.glob("trials/*/*/attempt.json"):
            with suppress(OSError, ValueError):
                host = read_attempt(path.parent).get("host")
                if (path.parent / "metrics.jsonl").exists() and (places is None or host in places):
                    return not (path.parent / "result.json").exists()
        return False

    def strike(self) -> float:
        """The fault; for how many seconds it lasts."""
        chance, cut = self.chance, self.lab.switch.set
        match self.kind:
            case "seconds":
                cut(self.victim.name, lost=1.0)
                return chance.uniform(2.0, 8.0)
            case "minutes":
                cut(self.victim.name, lost=1.0)
                return chance.uniform(65.0, 90.0)
            case "deaf" | "mute":
                cut(self.victim.name, lost=1.0, out=self.kind == "mute", back=self.kind == "deaf")
                return chance.uniform(20.0, 50.0)
            case "slow":
                for seed, name in enumerate(self.lab.machines):
                    cut(
                        name,
                        lost=chance.uniform(0.0, 0.05),
                        delay_s=chance.uniform(0.02, 0.15),
                        jitter_s=0.02,
                        seed=seed,
                    )
                return chance.uniform(30.0, 60.0)
            case "servers":
                cut("servers", lost=1.0)
                return chance.uniform(5.0, 90.0)
            case "half-open":
                mute = chance.random() < 0.5
                cut("servers", lost=1.0, out=mute, back=not mute)
                return chance.uniform(10.0, 90.0)
            case "frozen":
                self.lab.ray.signal(self.victim, signal.SIGSTOP)
                return chance.uniform(2.0, 90.0)
            case "disk":
                self.victim.fill()
                return chance.uniform(5.0, 30.0)
            case "head":
                self.lab.ray.kill(self.lab.ray.head)
                return chance.uniform(1.0, 30.0)
            case "failover":
                self.lab.fail_over()
                return 0.1
            case "clock":
                self.lab.ray.ahead_s[self.victim.name] = chance.choice([-3600.0, 3600.0])
                self.lab.ray.kill(self.victim)
                return chance.uniform(40.0, 70.0)
        raise AssertionError(self.kind)

    def pass_time(self, struck: bool) -> None:
        """A moment: heals what is due, and looks after Ray but for a head that is to stay away."""
        if struck and self.heals_at and time.monotonic() >= self.heals_at:
            self.heals_at = 0.0
            self.heal()
        if not (self.kind == "head" and self.heals_at):
            self.lab.ray.look_after()
        time.sleep(0.05)

    def heal(self) -> None:
        """Ends whatever fault there is, but for a head or a database that are away."""
        self.lab.switch.heal()
        self.victim.free()
        self.lab.ray.signal(self.victim, signal.SIGCONT)
        if self.lab.ray.ahead_s.pop(self.victim.name, None):
            self.lab.ray.kill(self.victim)

    def see_complete(self) -> None:
        """Remembers what has a result by now; it must not be trained again."""
        with environment(self.url), Store.open(self.root, create=False) as store:
            rows = store.study_trials("tiny")
        self.complete = {row["key"]: row["attempt"] for row in rows if row["state"] == "complete"}

    def tail(self) -> str:
        return self.log.read_text()[-3000:]

    def judge(self, calm: dict) -> Counter:
        """Holds the store against the undisturbed one; counts what it took."""
        with environment(self.url):
            assert_whole(self.root, calm)
            assert_sent(mlflow_points(self.lab.uri), journal_points(self.root))
            with Store.open(self.root) as store:
                rows = {row["key"]: row for row in store.study_trials("tiny")}
                charged = [
                    event["detail"]["reason"]
                    for event in store.events("tiny")
                    if event["kind"] == "planned" and event["detail"].get("reason", "").split(":")[0] in CHARGED
                ]
        rerun = [key for key, attempt in self.complete.items() if rows[key]["attempt"] != attempt]
        assert not rerun, f"complete before, and trained again: {rerun}"
        assert not charged, f"charged to a trial: {charged}"
        return Counter(
            tried=1,
            refused=self.refused,
            interrupted=sum(row["attempt"] > 1 for row in rows.values()),
            repeated=self.repeated(),
        )

    def repeated(self) -> int:
        """Steps that were trained more than once."""
        lines = [line.split() for line in (self.root / "steps.log").read_text().splitlines()]
        return sum(
            count - 1 for count in Counter((key, step) for key, _, what, step, _ in lines if what == "step").values()
        )


CHARGED = ("crash", "oom", "hang", "user")


def one(seed: int, study: Path, folder: Path, lab: Lab, calm: dict) -> tuple[Scenario, Counter]:
    """One scenario, and what it came to; the lab is whole afterwards."""
    scenario = Scenario(seed, study, folder / f"seed-{seed}", lab)
    lab.ready()
    try:
        scenario.run()
        return scenario, scenario.judge(calm)
    finally:
        if scenario.process is not None:
            kill_tree(scenario.process)
        scenario.heal()
        if scenario.kind == "failover":
            lab.leave_standby()


def main() -> None:
    """Scenarios with seeds 0, 1, … and prints what was tried, refused and repeated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rays-own-times", action="store_true", help="Ray's own time limits: minutes each")
    parser.add_argument("--lab", type=int, default=0, help="a number of its own for one that runs beside another")
    parser.add_argument("--keep", action="store_true", help="leave the folder of a scenario that fails")
    given = parser.parse_args()
    if missing := lacks():
        sys.exit(f"a lab needs what is not here: {missing}")
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    total, failed, started = {kind: Counter() for kind in KINDS}, [], time.monotonic()
    study = write_corpus(folder, SHORT)
    calm = whole_of(undisturbed(study, folder / "calm"))
    lab = Lab(folder, given.lab)
    if given.rays_own_times:
        lab.ray.own = {}
    try:
        for seed in range(given.first, given.first + given.seeds):
            begun = time.monotonic()
            try:
                scenario, counts = one(seed, study, folder, lab, calm)
            except AssertionError as error:
                failed.append(seed)
                print(f"seed {seed}: FAILED: {error}", file=sys.stderr, flush=True)
                continue
            total[scenario.kind] += counts
            took_s = time.monotonic() - begun
            told = f"seed {seed}: {scenario.kind}, {scenario.runs} runs, {took_s:.0f} s, {dict(counts)}"
            print(told, file=sys.stderr, flush=True)
    finally:
        lab.close()
        print("| fault | scenarios | runs started again | interrupted trials | steps repeated |")
        print("|---|---|---|---|---|")
        for kind, counts in total.items():
            cells = [KINDS[kind], *(counts[name] for name in ("tried", "refused", "interrupted", "repeated"))]
            print("| " + " | ".join(map(str, cells)) + " |")
        minutes = (time.monotonic() - started) / 60
        print(
            f"\n{given.seeds} scenarios, {minutes:.0f} minutes on {os.cpu_count()} cores; failed: {failed}", flush=True
        )
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
