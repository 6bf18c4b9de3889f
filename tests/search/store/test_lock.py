"""One driver per study: the second is told who the first is, at once, and a dead one's lock is free."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from archlab.search.store.lock import StudyLock, StudyLocked, holder_of, lock_path
from tests.search.study_kit import ROOT

HOLD = (
    "import sys, time; from pathlib import Path; from archlab.search.store.lock import StudyLock\n"
    "with StudyLock(Path(sys.argv[1]), 's'): print('held', flush=True); time.sleep(600)"
)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds study 's'."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_driver_is_refused_at_once_with_the_name_of_the_first(tmp_path, holder):
    with pytest.raises(StudyLocked) as caught:
        StudyLock(tmp_path, "s").acquire()
    assert holder.poll() is None, "it does not wait for the first one's end"
    assert caught.value.holder["pid"] == holder.pid
    assert caught.value.holder["host"] == socket.gethostname()
    for word in (str(holder.pid), socket.gethostname(), caught.value.holder["since"], "study 's'"):
        assert word in str(caught.value)


def test_the_lock_of_a_killed_driver_is_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert holder_of(tmp_path, "s") is None
    with StudyLock(tmp_path, "s") as lock:
        assert lock.held


def test_studies_do_not_lock_each_other(tmp_path, holder):
    with StudyLock(tmp_path, "t"):
        assert holder_of(tmp_path, "t")["pid"] == os.getpid()
    assert holder_of(tmp_path, "s")["pid"] == holder.pid
    assert holder_of(tmp_path, "t") is None


def test_asking_who_runs_a_study_makes_no_file(tmp_path):
    assert holder_of(tmp_path, "s") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", "A", ".x", "a..b", "x" * 64, "a\n", "é"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="study name"):
        lock_path(tmp_path, name)
