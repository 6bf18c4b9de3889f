"""A study that tunes with brackets and grows its grid, with the real trainer: killed on the way, it ends the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from archlab.search.comparison.compare import load_comparison
from archlab.search.reporting.report import report
from archlab.search.store.store import Store
from archlab.search.trial.outcome_files import read_attempt
from tests.search.study_files import write_study
from tests.search.study_kit import ROOT, until

RUN = """\
import json, sys, torch
torch.set_num_threads(1)
from archlab.search.running.run import run
def tell(event):
    if event["event"] != "tick":
        print(json.dumps(event), flush=True)
        sys.stdin.readline()  # goes on when that was read
print(run(sys.argv[1], sys.argv[2], executor="inline", track=False, on_event=tell).exit_code)
"""
# the event that the driver is killed at, of which kind the trial is, and how many of them it lives to see
KILLED_AT = [("launched", "tune", 2), ("paused", None, 1), ("launched", "tune", 3), ("finished", None, 2)]
CLOCK = {"tokens_per_s", "train_s", "peak_memory_bytes", "folder", "attempt", "reused"}


def go_on(process: subprocess.Popen[str]) -> None:
    """Lets the driver go on from the event that it told."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def until_begun(launched: dict[str, Any]) -> None:
    """Waits until a trial that was launched has begun; its driver goes no further than to its end."""
    until(lambda: read_attempt(Path(launched["folder"])).get("attempt") == launched["attempt"])


def drive(study: Path, store: Path, event: str = "", role: str | None = None, times: int = 0) -> int | None:
    """Runs the study in a process; None where that was killed at the given event."""
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(study), str(store)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line.strip()
            told = json.loads(last)
            if times and told != 0 and told["event"] == event and role in (None, told.get("role")):
                times -= 1
                if not times:
                    if event == "launched":
                        go_on(process)
                        until_begun(told)
                    process.kill()
                    return None
            if told != 0:
                go_on(process)
    return int(last)


def plain(store: Path) -> dict[str, Any]:
    """The report as JSON, without what the clock says."""
    with Store.open(store) as opened:
        found = json.loads(report(load_comparison(opened, "gates"), "json"))
    for part in ("table", "trials"):
        found[part] = [{name: value for name, value in row.items() if name not in CLOCK} for row in found[part]]
    del found["cost"]  # it counts what was repeated
    found["notes"] = [note for note in found["notes"] if "reused" not in note]
    return found


@pytest.mark.slow
def test_a_tuned_study_killed_on_the_way_ends_with_the_table_of_one_that_was_not(tmp_path: Path) -> None:
    tune = "tune: {lr: {grid: 1-2-5, from: 5e-4, to: 5e-3}}"
    train = "train: {data: {text: corpus.txt}, tokens: 8k, context: 32, batch: 4, lr: 1e-3}"
    study = write_study(tmp_path, tune=tune, train=train, seeds="seeds: 3")
    assert drive(study, tmp_path / "calm") == 0
    for event, role, times in KILLED_AT:
        assert drive(study, tmp_path / "killed", event, role, times) is None
    assert drive(study, tmp_path / "killed") == 0
    calm, killed = plain(tmp_path / "calm"), plain(tmp_path / "killed")
    assert killed == calm
    states = {(row["variant"], row["lr"]): row["state"] for row in calm["rates"]}
    assert {"paused", "complete"} == set(states.values()), "some ended early"
    assert max(lr for _, lr in states) > 5e-3, "the grid grew"
    with Store.open(tmp_path / "killed") as store:
        attempts = {row["key"]: row["attempt"] for row in store.study_trials("gates")}
    assert any(count > 2 for count in attempts.values()), "a trial that had waited was killed and went on"
    assert all(row["n"] == 3 for row in calm["table"])
