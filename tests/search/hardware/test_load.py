"""Samples of the machine's load: what they hold, how often they come, and that nothing of them harms a trial."""

import hashlib
import itertools
import json
import subprocess
import sys
import threading

import pytest

from archlab.search.hardware import load


def samples(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def often(monkeypatch):
    """A sample at once, then each 10 ms."""
    monkeypatch.setattr(load, "gaps", lambda: itertools.repeat(0.01))


def until(path, count):
    """Waits for so many samples; the test's own time limit ends it."""
    while not path.exists() or len(samples(path)) < count:
        threading.Event().wait(0.01)


def test_the_first_samples_are_close_and_a_run_of_days_has_few():
    found = [*itertools.islice(load.gaps(), 2000)]
    assert found[:11] == [1.0] * 10 + [5.0]
    assert found[509:511] == [5.0, 10.0] and found[1009:1011] == [10.0, 20.0]
    week = next(count for count, total in enumerate(itertools.accumulate(load.gaps())) if total > 7 * 86400)
    assert week < 4500


def test_samples_tell_of_this_process_its_children_and_the_machine(tmp_path, often):
    path = tmp_path / load.FILE
    child = subprocess.Popen([sys.executable, "-c", "import sys; held = bytearray(80_000_000); sys.stdin.read()"],
                             stdin=subprocess.PIPE)  # fmt: skip
    try:
        with load.sampled(path, {"gpu": lambda: 0.5}):
            until(path, 3)
            while samples(path)[-1]["memory_bytes"] < 80_000_000:
                threading.Event().wait(0.01)
    finally:
        child.communicate()
    for each in samples(path):
        assert each.keys() == {"time", "host", "cores", "memory_bytes", "machine_cpu", "machine_memory", "gpu"}
        assert each["cores"] >= 0 and 0 <= each["machine_cpu"] <= 1 and 0 < each["machine_memory"] < 1


def test_work_is_seen_as_cores_and_an_attempt_appends(tmp_path, often):
    path = tmp_path / load.FILE
    path.write_text(json.dumps({"time": 1.0}) + "\n")
    block = bytes(4_000_000)  # its hash leaves the interpreter to other threads, as tensors do; a loop may starve them
    with load.sampled(path):
        while not any(each.get("cores", 0) > 0 for each in samples(path)):
            hashlib.sha256(block)
    assert samples(path)[0] == {"time": 1.0}
    count = len(samples(path))
    assert "load" not in [thread.name for thread in threading.enumerate()], "it has ended with the trial"
    assert len(samples(path)) == count


def test_a_folder_that_is_gone_ends_the_samples_and_not_the_trial(tmp_path, often, capsys):
    with load.sampled(tmp_path / "gone" / load.FILE):
        while not (said := capsys.readouterr().err):
            threading.Event().wait(0.01)
    assert "told no longer: FileNotFoundError" in said


def test_a_full_disk_ends_the_samples_and_not_the_trial(tmp_path, often, capsys):
    (tmp_path / load.FILE).symlink_to("/dev/full")
    with load.sampled(tmp_path / load.FILE):
        while not (said := capsys.readouterr().err):
            threading.Event().wait(0.01)
    said += capsys.readouterr().err
    assert "told no longer: OSError: [Errno 28]" in said and len(said.splitlines()) == 1


def test_what_a_device_cannot_tell_is_left_out_and_said_once(tmp_path, often, capsys):
    def broken():
        raise RuntimeError("NVML: not supported")

    path = tmp_path / load.FILE
    with load.sampled(path, {"gpu": broken, "gpu_memory_bytes": lambda: 2**30}):
        until(path, 3)
    assert all("gpu" not in each and each["gpu_memory_bytes"] == 2**30 for each in samples(path))
    assert capsys.readouterr().err == "samples go on without gpu: RuntimeError: NVML: not supported\n"
