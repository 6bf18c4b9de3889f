"""Everything arrives at MLflow and Optuna exactly once, whatever is killed, cut, replayed or down."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from archlab.search.executors.group_end import free_port
from archlab.search.store.addresses import MLFLOW
from archlab.search.store.lock import StudyLock
from archlab.search.store.store import Row, Store
from archlab.search.trackers import mlflow_sink
from archlab.search.trackers.acknowledged import Shipped, Spool, news_of
from archlab.search.trackers.database import create_whole, open_optuna
from archlab.search.trackers.shipper import Shipper, _one_shipper, sync, unsent
from archlab.search.trackers.shipper_process import NICEST, ShipperProcess
from archlab.search.trackers.tracked import START, Line, Position, new_lines, tracked, values_of
from archlab.search.trial.trial import Trial
from tests.search.processes import alive
from tests.search.study_kit import until

pytestmark = [
    # mlflow and what it imports warn about each other
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*noload"),
    pytest.mark.filterwarnings("ignore:.*sqlite3.Connection:ResourceWarning"),
]

RECORD = {
    "study": "gates",
    "question": "where?",
    "variants": [{"name": "G1", "parameters": 123, "changes": [["block.*.gate", "none", "sdpa"]]}],
}
SPLIT = {"loss": 2.0, "perplexity": math.exp(2.0), "bits_per_byte": 1.5}
STEPS = 6


def trial(seed: int = 0, lr: float = 1e-3) -> Trial:
    recipe = {"lr": lr, "tokens": 600, "optimizer": {"type": "adamw", "betas": [0.9, 0.95]}, "clip": None}
    return Trial(model={"d_model": 8, "note": "x" * 12_000}, recipe=recipe, data="stdlib-1", seed=seed)


def row(seed: int = 0, lr: float = 1e-3, variant: str = "G1", role: str = "tune", **settings: Any) -> Row:
    return Row(trial(seed, lr), variant, role, {"lr": lr, **settings}, seed)


def lines(first: int, last: int, attempt: int = 1, clock: float = 1000.0) -> list[dict[str, Any]]:
    """Training lines of steps first..last, a validation line every third; 6 points and 1 point per line."""
    found: list[dict[str, Any]] = []
    for step in range(first, last + 1):
        base = {"step": step, "time": clock + step + 0.5, "attempt": attempt}
        rates = {"tokens": 100 * step, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 50.0 + attempt}
        found.append({**base, "loss": 5.0 - step / 10, **rates})
        if step % 3 == 0:
            found.append({**base, "validation_loss": 4.0 - step / 10})
    return found


def write(store: Store, key: str, records: list[dict[str, Any]], mode: str = "a") -> None:
    with open(store.trial_folder(key) / "metrics.jsonl", mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def result(state: str = "complete", **more: Any) -> dict[str, Any]:
    both = {"validation": SPLIT, "test": SPLIT} if state == "complete" else {"validation": None, "test": None}
    measured = {"state": state, "reason": None, "step": STEPS, "parameters": 77, "train_s": 3.0, "peak_memory_bytes": 5}
    return {**measured, **both, "fingerprint": {"torch": "2.13.0", "threads": "1"}, **more}


def finished(store: Store, wanted: Row, state: str = "complete", study: str = "gates", **more: Any) -> str:
    """Adds a row and trains it to its end."""
    store.add_trials(study, [wanted])
    key = wanted.trial.key
    attempt = store.claim(key, study)
    assert attempt is not None
    write(store, key, lines(1, STEPS))
    store.finish(key, attempt, state, result(state, **more) if state != "failed" else None, more.get("reason"))
    return key


POINTS = 5 * STEPS + STEPS // 3


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two databases, made once."""
    folder = tmp_path_factory.mktemp("templates")
    create_whole(folder / "mlflow.db", mlflow_sink._make_mlflow)
    storage = open_optuna(folder)
    storage.remove_session()
    storage.engine.dispose()
    return folder


@pytest.fixture
def store(tmp_path: Path, templates: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.delenv(MLFLOW, raising=False)
    for name in mlflow_sink.SETTINGS:
        monkeypatch.setenv(name, mlflow_sink.SETTINGS[name])
    with Store.open(tmp_path / "store") as opened:
        for name in ("mlflow.db", "optuna.db"):
            (opened.root / name).write_bytes((templates / name).read_bytes())
        opened.save_study("gates", RECORD, "study: gates")
        yield opened


def client(store: Store) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{store.root}/mlflow.db")


def runs(store: Store, study: str = "gates") -> dict[str, Any]:
    """Key to run; a key has one run."""
    reader = client(store)
    found = reader.search_runs([reader.get_experiment_by_name(study).experiment_id])
    keys = [run.data.tags["archlab.key"] for run in found]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, found, strict=True))


def points(store: Store, name: str | None = None) -> list[tuple[Any, ...]]:
    """(name, step, time in ms, value) as MLflow's own table holds them."""
    return points_of(store.root / "mlflow.db", name)


def points_of(path: Path, name: str | None = None) -> list[tuple[Any, ...]]:
    """The points of one of MLflow's databases."""
    database = sqlite3.connect(path)
    try:
        query = (
            "SELECT key, step, timestamp, value FROM metrics WHERE ?1 IS NULL OR key = ?1 ORDER BY key, step, timestamp"
        )
        return database.execute(query, (name,)).fetchall()
    finally:
        database.close()


def recorded(store: Store, study: str = "gates") -> list[optuna.trial.FrozenTrial]:
    """Optuna's trials, by seed."""
    trials = optuna.load_study(study_name=study, storage=open_optuna(store.root)).trials
    return sorted(trials, key=lambda trial: trial.params["seed"])


def test_a_finished_trial_arrives_whole(store: Store) -> None:
    key = finished(store, row(width=8))
    assert unsent(store.root, "gates") == POINTS + 2
    assert sync(store.root) == {"gates": 0}
    run = runs(store)[key]
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "G1 lr=0.001 seed=0"
    assert (run.info.start_time, run.info.end_time) == (1001_500, 1006_500)
    assert run.data.params == {
        "variant": "G1",
        "seed": "0",
        "parameters": "77",
        "lr": "0.001",
        "tokens": "600",
        "optimizer.type": "adamw",
        "optimizer.betas": "[0.9,0.95]",
        "clip": "null",
        "settings.width": "8",
        "changes.block._.gate": "sdpa",
    }
    tags = run.data.tags
    assert tags["archlab.state"] == "complete"
    assert (tags["archlab.study"], tags["archlab.attempt"], tags["archlab.roles"]) == ("gates", "1", "tune")
    spec = tags["archlab.spec"] + tags["archlab.spec.1"] + tags["archlab.spec.2"]
    assert json.loads(spec) == trial().model
    assert tags["fingerprint.threads"] == "1"
    assert {"fingerprint.python", "fingerprint.cpu", "fingerprint.mlflow", "archlab.spec_hash"} <= tags.keys()
    assert run.data.metrics["test_perplexity"] == run.data.metrics["validation_perplexity"] == math.exp(2.0)
    written = [line for line in lines(1, STEPS) if "loss" in line]
    for name in ("loss", "lr", "grad_norm", "tokens_per_s", "tokens"):
        expected = [(name, line["step"], round(line["time"] * 1000), line[name]) for line in written]
        assert points(store, name) == expected
    assert [step for _, step, _, _ in points(store, "validation_loss")] == [3, 6]


def test_it_is_also_an_optuna_trial(store: Store) -> None:
    key = finished(store, row(width=8))
    finished(store, row(seed=1, variant="baseline", width=4))
    sync(store.root)
    first, second = recorded(store)
    assert first.params == {"variant": "G1", "lr": 0.001, "seed": 0, "width": 8}
    assert (first.state.name, first.value, first.user_attrs["key"]) == ("COMPLETE", 2.0, key)
    assert first.intermediate_values == {3: 3.7, 6: 3.4}
    assert first.duration is not None
    assert first.duration.total_seconds() == 5
    assert second.params["variant"] == "baseline"


def test_trials_that_have_not_started_hold_nobody_up(store: Store) -> None:
    finished(store, row())
    store.add_trials("gates", [row(), row(seed=1, lr=4e-3)])
    assert not (store.trial_folder(row(seed=1, lr=4e-3).trial.key) / "trial.json").exists()
    assert sync(store.root) == {"gates": 0}
    (only,) = recorded(store)
    assert only.distributions["lr"].high == 4e-3  # of all that will come


@pytest.mark.parametrize("lost", ["everything", "the last note", "the database of notes", "the start of that database"])
def test_sending_twice_changes_nothing(store: Store, lost: str) -> None:
    """A kill between sending and noting the answer, at any point, is a replay."""
    key = finished(store, row())
    sync(store.root)
    before = points(store)
    assert len([point for point in before if point[0] in lines(1, 1)[0] or point[0] == "validation_loss"]) == POINTS
    with Spool(store.root) as spool:
        for target in ("optuna", mlflow_sink.MlflowSink(store.root, "gates", spool, RECORD)._target):
            known = spool.all(target, "gates")[key]
            if lost == "the last note":
                half = list(new_lines(store.trial_folder(key) / "metrics.jsonl", START))[3].position
                spool.put(target, "gates", key, known.__class__(known.place, half, ""))
            else:
                spool.forget(target)
    if lost == "the database of notes":
        for path in store.root.glob("shipped.db*"):
            path.unlink()
    if lost == "the start of that database":
        with open(store.root / "shipped.db", "r+b") as file:
            file.write(b"x" * 5000)
    assert unsent(store.root, "gates") > 0
    assert sync(store.root) == {"gates": 0}
    assert points(store) == before
    assert len(runs(store)) == len(recorded(store)) == 1


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "killed before the note"])
def test_steps_that_are_trained_again_are_one_point_each(store: Store, noted: bool) -> None:
    """The file is cut at the checkpoint's step and goes on with new times; MLflow keeps the first time of each step."""
    store.add_trials("gates", [row()])
    key = trial().key
    attempt = store.claim(key, "gates")
    assert attempt == 1
    write(store, key, lines(1, 5))
    sync(store.root)
    assert runs(store)[key].info.status == "KILLED"  # its driver holds no lock
    store.release(key, attempt)
    if not noted:
        for path in store.root.glob("shipped.db*"):
            path.unlink()
    assert store.claim(key, "gates") == 2
    write(store, key, lines(1, 3), mode="w")
    write(store, key, lines(4, STEPS, attempt=2, clock=2000.0))
    store.finish(key, 2, "complete", result())
    assert sync(store.root) == {"gates": 0}
    times = {step: time_ms for _, step, time_ms, _ in points(store, "loss")}
    assert len(points(store, "loss")) == STEPS
    assert times == {1: 1001_500, 2: 1002_500, 3: 1003_500, 4: 1004_500, 5: 1005_500, 6: 2006_500}
    assert len(points(store, "validation_loss")) == 2
    assert runs(store)[key].info.status == "FINISHED"
    assert runs(store)[key].data.tags["archlab.attempt"] == "2"


def test_requests_hold_whole_lines_and_no_more_than_mlflow_takes() -> None:
    written = [
        Line({"step": step, "time": step, "attempt": 1, **{f"block.{n}.load": float(n) for n in range(300)}}, place)
        for step, place in enumerate((Position(10), Position(20), Position(30), Position(40), Position(50)), start=1)
    ]
    requests = list(mlflow_sink._batches(iter(written)))
    assert [(len(metrics), position.offset) for metrics, position, _ in requests] == [(900, 30), (600, 50)]
    assert all(finite for _, _, finite in requests)
    assert [metric.step for metrics, _, _ in requests for metric in metrics][::300] == [1, 2, 3, 4, 5]
    assert list(mlflow_sink._batches(iter(()))) == []


DAMAGE = [
    b"\xff\xfe{", b"[]", b"7", b'{"step": "4"}', b'{"step": 4, "time": null}', b"[" * 100_000, b"",
    b'{"step": 4, "time": NaN, "loss": 1}', b'{"step": 4, "time": 1e999, "loss": 1}', b'{"step": -1, "time": 1.0}',
    b'{"step": ' + b"9" * 400 + b', "time": 1.0}',
]  # fmt: skip


@pytest.mark.parametrize("wrong", DAMAGE, ids=lambda each: repr(each[:20]))
def test_a_damaged_line_is_left_out_and_all_others_arrive(store: Store, wrong: bytes) -> None:
    """Of a finished trial, whose file a disk damaged: trackers are copies, and the run itself goes on."""
    key = finished(store, row())
    path = store.trial_folder(key) / "metrics.jsonl"
    told = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*told[:3], wrong + b"\n", *told[4:]]))
    gone = json.loads(told[3])
    assert sync(store.root) == {"gates": 0}
    names = {"validation_loss"} if "validation_loss" in gone else gone.keys() - {"step", "time", "attempt"}
    known = {*lines(1, 1)[0], "validation_loss"}
    assert len([each for each in points(store) if each[0] in known]) == POINTS - len(names)
    assert runs(store)[key].info.status == "FINISHED"
    with open(path, "ab") as file:
        file.write(
            b'{"step": 99, "time": 1.5, "attempt": 1, "loss": "high", "lr": [1], "grad_norm": 2.0, "tokens": '
            + b"9" * 400
            + b"}\n"
        )
    assert [values_of(line.record) for line in new_lines(path, START)][-1] == {"grad_norm": 2.0}


def test_a_line_that_is_being_written_waits(store: Store) -> None:
    store.add_trials("gates", [row()])
    key = trial().key
    store.claim(key, "gates")
    write(store, key, lines(1, 1))
    path = store.trial_folder(key) / "metrics.jsonl"
    text = json.dumps(lines(2, 2)[0])
    with open(path, "a") as file:
        file.write(text[:30])
    sync(store.root)
    assert len(points(store, "loss")) == 1
    with open(path, "a") as file:
        file.write(text[30:] + "\n")
    sync(store.root)
    assert len(points(store, "loss")) == 2


@pytest.mark.parametrize(
    ("state", "reason", "status", "optuna_state"),
    [
        ("complete", None, "FINISHED", "COMPLETE"),
        ("diverged", "loss is not finite", "FINISHED", "FAIL"),
        ("failed", "oom: too large", "FAILED", "FAIL"),
        ("pruned", "pruned at step 6", "KILLED", "PRUNED"),
    ],
)
def test_every_end_is_told(store: Store, state: str, reason: str | None, status: str, optuna_state: str) -> None:
    key = finished(store, row(), state, reason=reason)
    sync(store.root)
    run = runs(store)[key]
    assert run.info.status == status
    assert (run.data.tags["archlab.state"], run.data.tags["archlab.reason"]) == (state, reason or "")
    (only,) = recorded(store)
    assert only.state.name == optuna_state
    assert only.user_attrs["state"] == state


def test_what_is_not_finite_is_nan_with_a_tag(store: Store) -> None:
    store.add_trials("gates", [row()])
    key = trial().key
    attempt = store.claim(key, "gates") or 0
    write(store, key, [*lines(1, 2), {**lines(3, 3)[0], "loss": None, "grad_norm": None}])
    store.finish(key, attempt, "diverged", result("diverged"))
    sync(store.root)
    sync(store.root)
    run = runs(store)[key]
    assert math.isnan(run.data.metrics["loss"])
    assert run.data.tags["archlab.nonfinite"] == "true"
    assert len(points(store, "loss")) == 3


def test_a_trial_in_two_roles_is_one_run_and_one_optuna_trial(store: Store) -> None:
    finished(store, row())
    sync(store.root)
    store.add_trials("gates", [row(role="repeat")])
    sync(store.root)
    (run,) = runs(store).values()
    assert run.data.tags["archlab.roles"] == "repeat, tune"
    assert len(recorded(store)) == 1


def test_a_reused_trial_is_in_both_studies_and_says_so(store: Store) -> None:
    key = finished(store, row())
    store.save_study("more", RECORD, "study: more")
    store.add_trials("more", [row(variant="mine")])
    assert sync(store.root) == {"gates": 0, "more": 0}
    assert runs(store)[key].data.tags["archlab.reused"] == "false"
    mine = runs(store, "more")[key]
    assert (mine.data.tags["archlab.reused"], mine.data.params["variant"]) == ("true", "mine")
    assert recorded(store, "more")[0].params["variant"] == "mine"


def test_a_renamed_variant_changes_the_tag_and_not_the_param(store: Store) -> None:
    key = finished(store, row())
    sync(store.root)
    store.add_trials("gates", [row(variant="gated")])
    store.drop_others("gates", [row(variant="gated")])
    assert sync(store.root) == {"gates": 0}
    run = runs(store)[key]
    assert (run.data.tags["archlab.variant"], run.data.params["variant"]) == ("gated", "G1")


def test_new_variants_and_settings_join_the_optuna_study(store: Store) -> None:
    finished(store, row())
    sync(store.root)
    finished(store, row(seed=1, variant="G2", width="wide"))
    finished(store, row(seed=2, variant="G3", width=4), "failed")
    sync(store.root)
    assert [trial.params["variant"] for trial in recorded(store)] == ["G1", "G2", "G3"]
    assert [trial.params.get("width") for trial in recorded(store)] == [None, "wide", 4]


def test_the_trials_of_a_search_are_left_to_its_proposer(store: Store) -> None:
    finished(store, row(role="search", width=8))
    finished(store, row(seed=1, role="repeat", width=8))
    assert sync(store.root) == {"gates": 0}
    assert "gates" not in [each.study_name for each in optuna.get_all_study_summaries(open_optuna(store.root))]
    assert [trial.params["seed"] for trial in recorded(store, "gates/repeats")] == [1]
    assert len(runs(store)) == 2


def wait_until(store: Store, count: int, name: str = "loss") -> None:
    until(lambda: len(points(store, name)) >= count)


def test_the_thread_ships_while_the_trial_runs_and_leaves_no_run_running(store: Store) -> None:
    store.add_trials("gates", [row(), row(seed=1)])
    key, other = trial().key, trial(seed=1).key
    with StudyLock(store.root, "gates"):
        shipper = Shipper(store.root, "gates", RECORD, interval_s=0.05)
        shipper.start()
        attempt = store.claim(key, "gates") or 0
        store.claim(other, "gates")
        shipper.notice(key)
        write(store, key, lines(1, 2))
        write(store, other, lines(1, 1))
        wait_until(store, 3)
        assert runs(store)[key].info.status == "RUNNING"
        assert sync(store.root)["gates"] >= 0  # left to the driver's thread
        write(store, key, lines(3, STEPS))
        wait_until(store, STEPS + 1)
        store.finish(key, attempt, "complete", result())
        assert shipper.close(120) == 0
    assert {k: run.info.status for k, run in runs(store).items()} == {key: "FINISHED", other: "KILLED"}
    assert runs(store)[other].data.tags["archlab.state"] == "interrupted"


def test_a_server_that_is_down_costs_delay_and_one_warning(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv(MLFLOW, f"http://user:secret@127.0.0.1:{free_port()}")
    monkeypatch.setattr("archlab.search.trackers.shipper.FIRST_RETRY_S", 0.05)
    shipper = Shipper(store.root, "gates", RECORD, interval_s=0.02)
    shipper.start()
    finished(store, row())
    shipper.notice()
    until(lambda: shipper.trouble is not None)
    time.sleep(0.5)
    assert shipper.close(120) == POINTS + 1
    warned = [each.getMessage() for each in caplog.records if each.name == "archlab.track"]
    assert len(warned) == 1
    assert "MLflow takes nothing now, it is sent later" in warned[0]
    assert "secret" not in caplog.text + str(shipper.trouble)
    assert len(recorded(store)) == 1
    monkeypatch.delenv(MLFLOW)
    assert sync(store.root) == {"gates": 0}
    assert len(points(store, "loss")) == STEPS


def test_close_keeps_its_time_limit_when_a_server_hangs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "100")
        monkeypatch.setenv(MLFLOW, f"http://127.0.0.1:{silent.getsockname()[1]}")
        finished(store, row())
        shipper = Shipper(store.root, "gates", RECORD)
        shipper.start()
        assert shipper.close(0.5) >= POINTS
        assert shipper._thread.is_alive()  # it was not waited for
    shipper.close(120)  # who listened is gone, and with it the answer that was waited for


def test_what_is_away_when_a_run_begins_is_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("archlab.search.trackers.shipper.FIRST_RETRY_S", 0.05)
    finished(store, row())
    table = store.root / "trials.db"
    away = table.rename(store.root / "away.db")
    shipper = Shipper(store.root, "gates", RECORD, interval_s=0.02)
    with _one_shipper(store.root, "gates") as alone:  # the shipper of a driver that was killed may still be there
        assert alone
        shipper.start()
        time.sleep(0.2)
        assert shipper._thread.is_alive() and shipper.trouble is None
    until(lambda: shipper.trouble is not None)
    assert "trials.db" in str(shipper.trouble)
    away.rename(table)
    assert shipper.close(120) == 0
    assert len([each for each in caplog.records if each.name == "archlab.track"]) == 1


def test_left_at_once_a_shipper_sends_nothing_more(store: Store) -> None:
    finished(store, row())
    for shipper in (Shipper(store.root, "gates", RECORD), ShipperProcess(store.root, "gates")):
        shipper.start()
        shipper.leave()
    assert unsent(store.root, "gates") == POINTS + 2


@pytest.mark.slow
def test_a_process_that_gives_way_ships_all(store: Store) -> None:
    shipper = ShipperProcess(store.root, "gates")
    shipper.start()
    process = shipper._process
    assert process is not None
    until(lambda: os.getpriority(os.PRIO_PROCESS, process.pid) == NICEST)
    key = finished(store, row())
    shipper.notice(key)
    assert shipper.close(240) == 0
    assert process.returncode is not None
    assert {k: run.info.status for k, run in runs(store).items()} == {key: "FINISHED"}


@pytest.mark.slow
def test_a_process_that_gets_no_time_is_followed_by_one_that_does(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archlab.search.trackers.shipper_process._GIVES_WAY_S", 0.1)
    finished(store, row())
    shipper = ShipperProcess(store.root, "gates")
    shipper.start()
    assert shipper._process is not None
    os.kill(shipper._process.pid, signal.SIGSTOP)
    assert shipper.close(240) == 0


def test_a_process_that_dies_is_followed_by_one_that_ships(store: Store) -> None:
    finished(store, row())
    shipper = ShipperProcess(store.root, "gates")
    shipper.start()
    assert shipper._process is not None
    shipper._process.kill()
    shipper._process.wait()
    assert shipper.close(240) == 0


def test_without_a_process_to_give_a_run_goes_on_and_the_points_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finished(store, row())
    shipper = ShipperProcess(store.root, "gates")
    monkeypatch.setattr(sys, "executable", str(store.root / "no-python"))
    shipper.start()
    shipper.notice()
    assert shipper.close(240) == POINTS + 2
    assert [each.args[1] for each in caplog.records] == ["the end of the run", "the next run, or `archlab sync`,"]


@pytest.mark.parametrize("most", [4_000, 40_000], ids=["none", "little"])
def test_a_full_disk_is_said_in_a_line_and_what_did_not_fit_is_sent_later(
    store: Store, most: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """No file may grow past `most` bytes: neither that of acknowledgements, or but MLflow's and Optuna's."""
    finished(store, row())
    assert sync(store.root) == {"gates": 0}
    for seed in range(1, 4):
        finished(store, row(seed=seed))
    capfd.readouterr()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    shipper = ShipperProcess(store.root, "gates")
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        shipper.start()
        assert shipper.close(240) != 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capfd.readouterr().err
    (line,) = set(said.splitlines())  # once more where a part of it did fit in between
    assert "sent later" in line or "sent to the trackers for now" in line
    assert sync(store.root) == {"gates": 0}
    assert len(points(store, "loss")) == 4 * STEPS


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of its parent's death on Linux alone")
def test_a_shipping_process_dies_with_who_started_it(store: Store) -> None:
    script = (
        "import sys, time; from pathlib import Path;"
        "from archlab.search.trackers.shipper_process import ShipperProcess;"
        "shipper = ShipperProcess(Path(sys.argv[1]), 'gates'); shipper.start();"
        "print(shipper._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, store.root], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    until(lambda: not alive(child))


def test_one_refused_trial_does_not_hold_the_others(store: Store) -> None:
    bad, good = finished(store, row()), finished(store, row(seed=1))
    store.database.write(lambda db: db.execute("UPDATE trial SET spec = '{' WHERE key = ?", (bad,)))
    left = sync(store.root)["gates"]
    assert left > 0
    assert runs(store).keys() == {good}
    assert runs(store)[good].info.status == "FINISHED"


def test_tracking_can_be_off(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MLFLOW, "off")
    finished(store, row())
    assert sync(store.root) == {"gates": 0}
    assert points(store) == []
    assert len(recorded(store)) == 1


def test_a_deleted_database_is_made_and_filled_again(store: Store) -> None:
    key = finished(store, row())
    path = store.trial_folder(key) / "metrics.jsonl"
    with Spool(store.root) as spool:
        sink = mlflow_sink.MlflowSink(store.root, "gates", spool, RECORD)
        (noted,) = tracked(store, "gates")
        everything = Shipped("a-run", list(new_lines(path, START))[-1].position, news_of(noted))
        spool.put(sink._target, "gates", key, everything)
        spool.put("optuna", "gates", key, Shipped(told="complete"))
    assert unsent(store.root, "gates") == 0
    for database in ("mlflow.db", "optuna.db"):
        (store.root / database).unlink()
    assert unsent(store.root, "gates") == POINTS + 2
    assert sync(store.root) == {"gates": 0}
    assert len(points(store, "loss")) == STEPS
    assert len(recorded(store)) == 1
    assert {path.name for path in store.root.glob(".*tmp*")} == set()


def test_a_database_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.db"

    def killed(url: str) -> None:
        Path(url.removeprefix("sqlite:///")).write_text("half")
        raise KeyboardInterrupt

    def made(url: str) -> None:
        database = sqlite3.connect(url.removeprefix("sqlite:///"))
        database.execute("CREATE TABLE t (x)")
        database.close()

    with pytest.raises(KeyboardInterrupt):
        create_whole(path, killed)
    assert not path.exists()
    create_whole(path, made)
    database = sqlite3.connect(path)
    assert database.execute("SELECT count(*) FROM t").fetchone() == (0,)
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database.close()
    create_whole(path, killed)


def test_importing_the_tracking_is_light() -> None:
    heavy = "{'mlflow', 'optuna', 'ray', 'torch', 'pandas', 'numpy', 'sqlalchemy'}"
    script = f"import sys, archlab.search.trackers.shipper; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "set()"
