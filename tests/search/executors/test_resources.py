"""What a trial takes and how many fit, as a table; what no machine can do is refused in the study."""

import math
import os
import subprocess
import sys

import pytest

from archlab.arch_dsl.language.parse import parse
from archlab.search.executors.executor import ResourcesError
from archlab.search.executors.process_group import Parallel
from archlab.search.executors.resources import Resources, Room
from archlab.search.utils.quantities import Memory
from tests.search.study_kit import ROOT

BOX = Room(cpus=8, gpus=2, memory=32e9)


@pytest.mark.parametrize(
    ("asked", "rooms", "slots"),
    [
        (Resources(gpus=0.0), [BOX], 8),
        (Resources(cpus=3, gpus=0.0), [BOX], 2),
        (Resources(gpus=0.25), [BOX], 8),
        (Resources(gpus=0.3), [BOX], 6),
        (Resources(gpus=1.0), [BOX], 2),
        (Resources(gpus=2.0), [BOX], 1),
        (Resources(gpus=0.0, memory=Memory(10 * 10**9)), [BOX], 3),
        (Resources(gpus=1.0, parallel=Parallel(data=2)), [BOX], 1),
        (Resources(gpus=1.0, parallel=Parallel(data=2)), [BOX, BOX, Room(8, 1, 32e9)], 2),
        (Resources(cpus=2, gpus=0.0, parallel=Parallel(data=2, shard=2)), [BOX, BOX], 2),
        (Resources(cpus=2, gpus=0.0), [Room(8, math.nan, 32e9)], 4),
    ],
)
def test_so_many_trials_fit(asked, rooms, slots):
    assert asked.slots(rooms) == slots


@pytest.mark.parametrize(
    ("asked", "rooms", "told"),
    [
        (
            Resources(cpus=9, gpus=0.0),
            [BOX],
            "asks for 9 cores; this machine has 8 cores, 2 GPUs and 32 GB of memory for us",
        ),
        (
            Resources(gpus=4.0, memory=Memory(10**9)),
            [BOX, Room(64, 0, 64e9)],
            "asks for 1 core, 4 GPUs and 1 GB of memory; the largest of 2 machines has 64 cores, 2 GPUs and 64 GB",
        ),
        (
            Resources(gpus=1.0, parallel=Parallel(shard=8)),
            [BOX, BOX],
            "asks for 1 core and 1 GPU for each of 8 processes; the largest of 2 machines has 8 cores, 2 GPUs "
            "and 32 GB of memory, all have room for 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is(asked, rooms, told):
    with pytest.raises(ResourcesError) as caught:
        asked.slots(rooms)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8 * 10**9), ("500 MB", 5 * 10**8), ("1.5GiB", 3 * 2**29), ("2TB", 2 * 10**12)]
)
def test_memory_is_written_with_a_unit(text, size):
    assert parse(Resources, {"memory": text}).memory == Memory(size)


def test_gpus_default_to_one_for_each_process_where_there_are_any():
    assert Resources().with_gpus(2).gpus == 1.0
    assert Resources().with_gpus(0).gpus == 0.0
    assert Resources(gpus=0.0).with_gpus(2).gpus == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts what a process allocates")
def test_a_process_that_takes_more_memory_than_it_may_has_a_memory_error():
    code = (
        "from archlab.search.hardware.cores import limit; limit(0.0, 600_000_000); kept = bytearray(200_000_000)\n"
        "try:\n    bytearray(500_000_000)\nexcept MemoryError:\n    print('refused')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=240)
    assert done.stdout == "refused\n", done


def test_a_share_of_a_gpu_limits_its_memory(monkeypatch):
    import torch

    from archlab.search.hardware.cores import limit

    shares = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    limit(0.25, None)
    limit(1.0, 10**6)
    assert shares == [0.25]
