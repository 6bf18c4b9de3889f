"""TensorBoard and W&B have every point once, read back with TensorBoard's own reader and from W&B's own records."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archlab.search.store.addresses import MLFLOW, TENSORBOARD, WANDB
from archlab.search.store.store import Store
from archlab.search.trackers import shipper
from archlab.search.trackers.shipper import send_table, sync, unsent
from tests.search.trackers.test_track import RECORD, STEPS, finished, lines, result, row, trial, write

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*sqlite3.Connection:ResourceWarning"),
]
CURVE = [(line["step"], line["time"], pytest.approx(line["loss"])) for line in lines(1, STEPS) if "loss" in line]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store whose trials go to TensorBoard and to W&B's files, and not to MLflow."""
    monkeypatch.setenv(MLFLOW, "off")
    monkeypatch.setenv(TENSORBOARD, str(tmp_path / "events"))
    monkeypatch.setenv(WANDB, "team/gates")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Store.open(tmp_path / "store") as opened:
        opened.save_study("gates", RECORD, "study: gates")
        yield opened


def events(store: Store) -> dict[str, Any]:
    """Run to what TensorBoard reads of it."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    read = EventMultiplexer(size_guidance={"scalars": 0, "tensors": 0}).AddRunsFromDirectory(
        str(store.root.parent / "events")
    )
    read.Reload()
    return {run: read.GetAccumulator(run) for run in read.Runs()}


def scalars(read: Any, tag: str = "loss") -> list[tuple[Any, ...]]:
    return [(each.step, each.wall_time, each.value) for each in read.Scalars(tag)]


def records(store: Store) -> dict[str, list[Any]]:
    """W&B's run id to all that was recorded of it, from its transaction logs (LevelDB's log format)."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, list[Any]] = {}
    for path in sorted((store.root / "wandb").glob("offline-run-*/*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack("<IHB", data[at : at + 7])
            whole += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last piece
                found.setdefault(path.stem.removeprefix("run-"), []).append(Record.FromString(whole))
                whole = b""
    return found


def history(found: list[Any], name: str = "loss") -> list[tuple[Any, ...]]:
    """(step, unix s, value) of one of a W&B run's measures."""
    rows = [
        {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    return [(row["step"], row["_timestamp"], row[name]) for row in rows if name in row]


def test_a_finished_trial_is_a_run_of_each(store: Store) -> None:
    key = finished(store, row(width=8))
    assert unsent(store.root, "gates") > 0
    assert sync(store.root) == {"gates": 0}
    ((name, read),) = events(store).items()
    assert name == f"gates/G1/lr=0.001 seed=0 {key[:8]}"
    assert scalars(read) == CURVE
    assert [step for step, _, _ in scalars(read, "validation_loss")] == [3, 6]
    assert scalars(read, "test_perplexity") == [(STEPS, 1006.5, pytest.approx(math.exp(2.0)))]
    ((_, found),) = records(store).items()
    (run,) = (record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (run.entity, run.project, run.run_group, run.job_type) == ("team", "gates", "gates", "G1")
    assert (run.display_name, [*run.tags]) == ("G1 lr=0.001 seed=0", ["tune"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["lr"] == 0.001 and config["settings.width"] == 8 and config["key"] == key
    assert config["changes.block.*.gate"] == "sdpa" and config["model"] == trial().model
    assert history(found) == CURVE
    told = {item.key: json.loads(item.value_json) for record in found for item in record.summary.update}
    assert told["test_perplexity"] == pytest.approx(math.exp(2.0)) and told["archlab.state"] == "complete"
    assert [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"] == [0]


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "killed before the note"])
def test_steps_that_are_trained_again_are_one_point_each(store: Store, noted: bool) -> None:
    """W&B's files hold them twice after a kill that came before the note, with one value: it says nothing of what it
    has. TensorBoard's are read back."""
    store.add_trials("gates", [row()])
    key = trial().key
    assert store.claim(key, "gates") == 1
    write(store, key, lines(1, 5))
    sync(store.root)
    store.release(key, 1)
    if not noted:
        for path in store.root.glob("shipped.db*"):
            path.unlink()
    assert store.claim(key, "gates") == 2
    write(store, key, lines(1, 3), mode="w")
    write(store, key, lines(4, STEPS, attempt=2, clock=2000.0))
    store.finish(key, 2, "complete", result())
    assert sync(store.root) == {"gates": 0}
    (read,) = events(store).values()
    assert [(step, value) for step, _, value in scalars(read)] == [(step, value) for step, _, value in CURVE]
    assert len(scalars(read, "validation_loss")) == 2
    ((_, found),) = records(store).items()
    sent = [(step, value) for step, _, value in history(found)]
    assert sorted(set(sent)) == [(step, value) for step, _, value in CURVE]
    assert (len(sent) == STEPS) is noted
    assert [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"] == [255, 0]


def test_a_folder_that_was_deleted_is_written_anew(store: Store, tmp_path: Path) -> None:
    finished(store, row())
    sync(store.root)
    (tmp_path / "events").rename(tmp_path / "gone")
    assert unsent(store.root, "gates") > 0 and sync(store.root) == {"gates": 0}
    (read,) = events(store).values()
    assert scalars(read) == CURVE


def test_the_table_is_sent_once_for_each_that_it_was(store: Store) -> None:
    finished(store, row())
    sync(store.root)
    for text in ("| a |", "| a |", "| b |"):
        send_table(store.root, "gates", {"md": text, "csv": "a\n"})
    read = events(store)["gates"]
    assert [each.tensor_proto.string_val[0] for each in read.Tensors("table/text_summary")] == [b"| a |", b"| b |"]
    (found,) = (found for identity, found in records(store).items() if identity.startswith("table-"))
    sent = [record.artifact for record in found if record.WhichOneof("record_type") == "artifact"]
    assert [(each.name, each.type) for each in sent] == [("gates-table", "table")] * 2
    assert [[entry.path for entry in each.manifest.contents] for each in sent] == [["table.csv", "table.md"]] * 2


def test_without_a_key_nothing_is_lost_and_nobody_is_asked(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    finished(store, row())
    assert sync(store.root)["gates"] > 0
    assert "WANDB_API_KEY" in caplog.text
    assert len(events(store)) == 1  # the others have it
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert sync(store.root) == {"gates": 0}
    monkeypatch.delenv(TENSORBOARD)
    assert not shipper.shows_tables()
