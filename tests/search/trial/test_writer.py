"""Checkpoints beside training: what is written is the state as it was taken, and no error and no write is lost."""

import errno
import os
import resource
import threading
import time
from collections import OrderedDict

import pytest
import torch
from torch import nn

from archlab.search.hardware import low_memory
from archlab.search.trial import checkpoint
from archlab.search.trial.pace import LEAST_S, Pace
from archlab.search.trial.snapshot import Snapshot, bytes_of, tensors_in
from archlab.search.trial.writer import FILE, Writer, spent


def trained():
    """A model whose head is its embedding, and its optimizer, after a step."""
    model = nn.Sequential(nn.Embedding(50, 16), nn.BatchNorm1d(16), nn.Linear(16, 50))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(20)).sum().backward()
    optimizer.step()
    return model, optimizer


def state(step=1):
    """A state of every kind: shared tensors, a view, whole numbers, an empty tensor, attributes of a mapping."""
    model, optimizer = trained()
    base = torch.arange(12.0)
    return {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "parts": [base[3:9].view(2, 3).T, base, torch.zeros(0), torch.zeros(()).expand(4)],
        "betas": (0.9, 0.95),
        "nothing": None,
    }


def put(writer, folder, step, what, persist=lambda: None, **options):
    writer.put(folder, step, what, persist, began=time.perf_counter(), **options)


def same(one, other):
    pairs = list(zip(tensors_in(one), tensors_in(other), strict=True))
    return pairs and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_a_checkpoint_of_a_copy_has_the_bytes_of_one_of_the_state(tmp_path):
    what = state()
    folders = tmp_path / "copied", tmp_path / "plain"
    for folder in folders:
        folder.mkdir()
    with Writer(folders[0], 1) as writer:
        put(writer, folders[0], 7, what)
    checkpoint.save(folders[1], 7, what)
    for name in ("checkpoint-7.pt", "checkpoint-7.pt.sha256"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_a_copy_shares_nothing_with_the_state_and_within_itself_what_that_does():
    what = state()
    copied = Snapshot(what).state
    assert isinstance(copied["model"], OrderedDict) and copied["model"]._metadata == what["model"]._metadata
    assert copied["model"]["0.weight"].data_ptr() == copied["model"]["2.weight"].data_ptr()
    assert bytes_of(copied) == bytes_of(what)
    before = Snapshot(copied).state
    for tensor in tensors_in(what):
        tensor.untyped_storage().fill_(1)
    what["optimizer"]["param_groups"][0]["lr"] = 9.0
    what["model"].clear()
    assert same(copied, before) and not same(copied["parts"], what["parts"])
    assert copied["optimizer"]["param_groups"][0]["lr"] == 1e-3


def test_updates_in_place_while_a_slow_disk_writes_tear_nothing(tmp_path):
    model, optimizer = trained()
    what, gate = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, threading.Event()
    before = Snapshot(what).state
    with Writer(tmp_path, 1) as writer:
        put(writer, tmp_path, 1, what, gate.wait)
        for _ in range(3):
            model(torch.arange(20)).sum().backward()
            optimizer.step()
        assert checkpoint.steps_in(tmp_path) == []
        gate.set()
    assert not same(what, before)
    assert same(checkpoint.load(tmp_path, 1), before)


def test_none_is_due_while_one_is_written_and_one_that_is_put_waits_for_its_turn(tmp_path):
    gate, turns = threading.Event(), []
    with Writer(tmp_path, 1) as writer:
        writer.pace = Pace(1e-9)
        put(writer, tmp_path, 1, state(1), lambda: gate.wait() and turns.append(1))
        assert not writer.due()
        threading.Timer(0.05, gate.set).start()
        put(writer, tmp_path, 2, state(2), lambda: turns.append(2))
        writer.finish()
        assert writer.due()
    assert turns == [1, 2]
    assert checkpoint.steps_in(tmp_path) == [2, 1]
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


def test_a_pace_of_zero_and_a_last_checkpoint_are_written_before_training_goes_on(tmp_path):
    writer, here = Writer(tmp_path, 1), []
    put(writer, tmp_path, 1, state(), lambda: here.append(threading.current_thread().name), now=True)
    writer.pace = Pace(0)
    put(writer, tmp_path, 2, state(), lambda: here.append(threading.current_thread().name))
    assert here == ["MainThread"] * 2
    assert checkpoint.steps_in(tmp_path) == [2, 1]


@pytest.fixture
def small_disk():
    """No file may grow past 20 kB: writes fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


BIG = {"model": torch.zeros(20_000)}


@pytest.mark.parametrize("ask", ["finish", "due", "put"])
def test_a_full_disk_reaches_who_trains_and_leaves_the_earlier_checkpoint(tmp_path, small_disk, ask):
    checkpoint.save(tmp_path, 1, {"model": torch.ones(3)})
    writer = Writer(tmp_path, 1)
    put(writer, tmp_path, 2, BIG)
    with pytest.raises(OSError) as error:
        if ask == "due":
            while not writer.due():
                time.sleep(0.001)
        elif ask == "put":
            put(writer, tmp_path, 3, {})
        else:
            writer.finish()
    assert error.value.errno == errno.EFBIG
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1.pt", "checkpoint-1.pt.sha256"]
    writer.finish()  # it was told once


def test_a_full_disk_is_told_with_whatever_ended_training_but_a_second_ctrl_c(tmp_path, small_disk):
    with pytest.raises(OSError) as error, Writer(tmp_path, 1) as writer:
        put(writer, tmp_path, 1, BIG)
        raise ValueError("a trainer's own mistake")
    assert isinstance(error.value.__context__, ValueError)
    with pytest.raises(KeyboardInterrupt), Writer(tmp_path, 1) as writer:
        put(writer, tmp_path, 1, BIG)
        raise KeyboardInterrupt


def test_without_memory_for_a_copy_training_waits_and_says_so_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(low_memory.LEFT, "0.6")
    turns = []
    with Writer(tmp_path, 1) as writer:
        for step in (1, 2):
            put(writer, tmp_path, step, BIG, lambda: turns.append(threading.current_thread().name))
        assert writer.without_copies(100) == 100
    assert turns == ["MainThread"] * 2
    assert capsys.readouterr().err == "training waits for its checkpoints: no memory for a copy of 0 MB\n"
    assert checkpoint.steps_in(tmp_path) == [2, 1]


def test_the_limit_of_a_process_counts_for_its_copy():
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    assert low_memory.has_room(0)
    resource.setrlimit(resource.RLIMIT_DATA, (2**40, hard))
    try:
        assert low_memory.has_room(1000) and not low_memory.has_room(2**40)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@pytest.mark.parametrize(
    ("every", "cost", "interval"),
    [(None, 0.0, LEAST_S), (None, 0.3, LEAST_S), (None, 2.0, 100.0), (60.0, 30.0, 60.0), (5.0, 0.0, 5.0)],
)
def test_the_interval_grows_with_the_cost_unless_the_study_says_one(every, cost, interval):
    pace = Pace(every)
    pace.note(cost)
    assert pace.interval_s == pytest.approx(interval)
    assert not pace.due()


def test_what_checkpoints_cost_is_summed_over_attempts(tmp_path):
    assert spent(tmp_path) == {"count": 0, "waited_s": 0, "writing_s": 0, "bytes": 0}
    for attempt in (1, 2):
        with Writer(tmp_path, attempt) as writer:
            put(writer, tmp_path, attempt, state())
    found, size = spent(tmp_path), checkpoint.path_of(tmp_path, 2).stat().st_size
    assert (found["count"], found["bytes"]) == (2, 2 * size)
    assert found["waited_s"] >= 0 and found["writing_s"] > 0
    with (tmp_path / FILE).open("a") as file:
        file.write('{"waited_s": "x"}\n{"torn')
    assert spent(tmp_path) == found


def test_the_memory_of_a_trial_leaves_out_its_copies(tmp_path):
    writer = Writer(tmp_path, 1)
    put(writer, tmp_path, 1, BIG)
    writer.finish()
    before = writer._peak_before
    assert writer.without_copies(before + 80_000) == before  # the copy is what was added
    assert writer.without_copies(before + 100_000) == before + 20_000  # and so much was not
