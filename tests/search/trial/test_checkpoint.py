"""Checkpoints: what is damaged is never loaded, and what cannot be written leaves the earlier one whole."""

import errno
import hashlib
import os
import resource

import pytest
import torch

from archlab.search.trial import checkpoint


def state(step):
    """A state of about 80 kB."""
    return {"step": step, "model": {"weight": torch.full((100, 200), float(step))}, "betas": (0.9, 0.95)}


@pytest.fixture
def folder(tmp_path):
    """A folder with the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step))
    return tmp_path


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


WHOLE = ["checkpoint-1.pt", "checkpoint-1.pt.sha256", "checkpoint-2.pt", "checkpoint-2.pt.sha256"]


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((8,), 2.0).numpy().tobytes())] ^= 1  # in a weight, which torch would load
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def garbage(path):
    path.write_bytes(b"\x80\x02 not a checkpoint" * 100)


def lose_digest(path):
    path.with_name(path.name + ".sha256").unlink()


def empty_digest(path):
    empty(path.with_name(path.name + ".sha256"))


DAMAGES = [truncate, flip_bit, empty, garbage, lose_digest, empty_digest]


def test_newest_checkpoint_is_loaded_as_it_was_saved(folder):
    loaded = checkpoint.load_newest(folder)
    assert loaded.discarded == []
    assert loaded.state["step"] == 2
    assert loaded.state["betas"] == (0.9, 0.95)
    assert torch.equal(loaded.state["model"]["weight"], state(2)["model"]["weight"])


def test_digest_is_that_of_the_file_in_the_form_of_sha256sum(folder):
    found = hashlib.sha256((folder / "checkpoint-2.pt").read_bytes()).hexdigest()
    assert (folder / "checkpoint-2.pt.sha256").read_text() == f"{found}  checkpoint-2.pt\n"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_falls_back_to_the_previous_one(folder, damage):
    damage(folder / "checkpoint-2.pt")
    loaded = checkpoint.load_newest(folder)
    assert loaded.state["step"] == 1
    assert [name for name, _ in loaded.discarded] == ["checkpoint-2.pt"]
    assert names(folder) == WHOLE[:2]


def test_two_damaged_checkpoints_leave_nothing_to_continue_from(folder):
    for step in (1, 2):
        truncate(folder / f"checkpoint-{step}.pt")
    loaded = checkpoint.load_newest(folder)
    assert loaded.state is None
    assert [name for name, _ in loaded.discarded] == ["checkpoint-2.pt", "checkpoint-1.pt"]
    assert names(folder) == []


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (self.marker,))


def test_checkpoint_that_would_run_code_is_discarded_and_runs_none(folder):
    marker = str(folder / "owned")
    checkpoint.save(folder, 3, {"step": 3, "model": Evil(marker)})
    loaded = checkpoint.load_newest(folder)
    assert loaded.state["step"] == 2
    assert "torch can't read it" in loaded.discarded[0][1]
    assert not os.path.exists(marker)


def test_only_the_newest_checkpoints_are_kept(folder):
    checkpoint.save(folder, 10, state(10))
    assert checkpoint.steps_in(folder) == [10, 2]
    checkpoint.remove_older(folder, keep=1)
    assert names(folder) == ["checkpoint-10.pt", "checkpoint-10.pt.sha256"]


def test_an_interrupted_removal_leaves_the_newest(folder, monkeypatch):
    for step in (10, 11):
        checkpoint.save(folder, step, state(step), keep=9)
    remove, removed = checkpoint._remove, []

    def interrupted(path):
        if removed:
            raise KeyboardInterrupt
        removed.append(path)
        remove(path)

    monkeypatch.setattr(checkpoint, "_remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.remove_older(folder, keep=1)
    assert checkpoint.steps_in(folder) == [11, 10, 2]


def test_what_an_interrupted_write_left_behind_is_removed(folder):
    (folder / "checkpoint-3.pt.tmp").write_bytes(b"half")
    assert checkpoint.load_newest(folder).state["step"] == 2
    checkpoint.save(folder, 3, state(3))
    assert names(folder) == [*WHOLE[2:], "checkpoint-3.pt", "checkpoint-3.pt.sha256"]


@pytest.fixture
def small_disk():
    """No file may grow past 20 kB: writes fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_checkpoint_that_does_not_fit_leaves_the_earlier_ones_whole(folder, small_disk):
    with pytest.raises(OSError) as error:
        checkpoint.save(folder, 3, state(3))
    assert error.value.errno == errno.EFBIG
    assert names(folder) == WHOLE
    assert checkpoint.load_newest(folder).state["step"] == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_full_disk_is_an_error_of_the_system_and_leaves_the_earlier_ones_whole(folder):
    (folder / "checkpoint-3.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError) as error:
        checkpoint.save(folder, 3, state(3))
    assert error.value.errno == errno.ENOSPC
    assert names(folder) == WHOLE
