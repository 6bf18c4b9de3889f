"""What the tests of scheduling share: a small study of toy trials, and a driver in a process of its own."""

import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

from archlab.search.executors.executor import Failure, Finished
from archlab.search.executors.inline import InlineExecutor
from archlab.search.running.driver import drive
from archlab.search.store.store import Row, Store
from archlab.search.trial.trial import Trial
from tests.search.forked import Forked

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENTRY = "tests.search.toy_trainer:train"


def toy(x=1, seed=0, steps=4, step_s=0.0, **recipe):
    """A toy trial of `steps` steps."""
    return Trial({"x": x}, {"steps": steps, "step_s": step_s, **recipe}, "none", seed)


def go(folder, *steps):
    """Lets the trials of a store go on that hold before these steps."""
    for step in steps:
        (Path(folder) / f"go-{step}").touch()


def rows_of(*trials, role="repeat", until=None):
    """One row per trial, each of which pauses after step `until` if that is given."""
    return [Row(trial, f"v{trial.model['x']}", role, {}, trial.seed, until) for trial in trials]


def make_store(folder, study="s", rows=()):
    """A store with one study, and these rows."""
    store = Store.open(folder)
    store.save_study(study, {"study": study, "question": "?"}, f"study: {study}\n")
    store.add_trials(study, rows)
    return store


def steps_run(folder):
    """How often each (trial, step) ran, and how often each trial was started."""
    steps, starts = Counter(), Counter()
    log = Path(folder) / "steps.log"
    for line in log.read_text().splitlines() if log.exists() else []:
        name, step, _, what, *_ = line.split()
        if what == "start":
            starts[name] += 1
        else:
            steps[name, int(step)] += 1
    return steps, starts


def results(store, study="s"):
    """State and result by key."""
    return {row["key"]: (row["state"], row["result"]) for row in store.study_trials(study)}


def until(true):
    """Waits until `true()`; what never comes true ends by the runner's timeout."""
    while not (found := true()):
        time.sleep(0.02)
    return found


class Driver:
    """`drive` on a store's study in a process and session of its own, with the inline executor or with Ray."""

    def __init__(self, folder, trials, executor="inline", **options):
        job = {"folder": str(folder), "trials": [trial.to_json() for trial in trials], "executor": executor, **options}
        from tests.search.drive_toy import run  # which imports this module

        self.process = Forked(run, job, {**os.environ, "PYTHONPATH": str(ROOT)})

    def group_signal(self, number):
        """What a terminal does on Ctrl-C: everyone in the foreground group gets it."""
        os.killpg(self.process.pid, number)

    def end(self, timeout=240.0):
        """Exit code and output."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            raise
        return self.process.returncode, output


def drive_inline(store, rows, study="s", **options):
    """Drives fixed rows, or what a function plans."""
    plan = rows if callable(rows) else lambda _: rows
    return drive(store, study, plan, InlineExecutor(ENTRY, store.root), **options)


def made(folder):
    """The folder, which is there."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class ByHand:
    """An executor whose attempts end when the test says so."""

    slots, gpus = 2, 0.5

    def __init__(self):
        self.submitted, self.cancelled, self.ended = [], [], []

    def start(self):
        pass

    def submit(self, key, folder, attempt, until=None):
        self.submitted.append((key, folder, attempt))

    def wait(self, timeout):
        time.sleep(0.01)
        ended, self.ended = self.ended, []
        return ended

    def cancel(self, key):
        self.cancelled.append(key)
        attempt = next(attempt for each, _, attempt in reversed(self.submitted) if each == key)
        self.ended.append(Finished(key, attempt, Failure("cancelled", "killed")))

    def close(self):
        pass


def done(**more):
    """The result of a trial that came to its end, with whatever else it says."""
    return {"state": "complete", "validation": {"loss": 1.0}, "test": {"loss": 1.0}, **more}
