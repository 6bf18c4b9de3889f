"""A batch depends on data, seed and step alone; an epoch meets every token once; evaluation scores each token once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from archlab.search.data import IGNORE, batch, windows


def stream(length: int) -> np.ndarray:
    """Distinct tokens, closed by the one it starts with, as a stream of documents is."""
    return np.append(np.arange(length - 1), 0).astype(np.uint32)


SHAPES = [(100, 8, 4), (101, 10, 5), (1000, 7, 3), (34, 33, 1), (65, 16, 4), (64, 5, 12), (9, 1, 3)]


@pytest.mark.parametrize(("length", "context", "size"), SHAPES)
def test_an_epoch_meets_every_token_once_but_for_the_rest_at_the_cut(length: int, context: int, size: int) -> None:
    ring, per_epoch = length - 1, (length - 1) // context
    steps = -(-3 * per_epoch // size)
    rows = np.concatenate([batch(stream(length), 5, step * size, size, context) for step in range(steps)])
    assert rows.shape == (steps * size, context + 1)
    assert ((rows[:, 1:] - rows[:, :-1]) % ring == 1 % ring).all(), "a window is a stretch of the stream"
    for epoch in range(3):
        targets = rows[epoch * per_epoch : (epoch + 1) * per_epoch, 1:].ravel()
        assert len(set(targets.tolist())) == len(targets) == per_epoch * context > ring - context


def test_epochs_differ_in_cut_and_order() -> None:
    first, second = (batch(stream(1001), 0, epoch * 100, 100, 10) for epoch in range(2))
    assert first[:, 0].tolist() != second[:, 0].tolist()
    assert {start % 10 for start in first[:, 0].tolist()} != {start % 10 for start in second[:, 0].tolist()}


def test_a_batch_is_pure_whatever_was_asked_before() -> None:
    tokens = stream(5000)
    straight = [batch(tokens, 3, step * 8, 8, 16) for step in range(100)]
    for step in np.random.default_rng(0).permutation(100):
        batch(tokens, 4, int(step) * 8, 8, 16)
        assert (batch(tokens, 3, int(step) * 8, 8, 16) == straight[step]).all()
    assert (batch(tokens, 4, 0, 8, 16) != straight[0]).any(), "another seed, other batches"


def test_the_same_stream_of_windows_flows_through_any_batch_size() -> None:
    tokens = stream(999)
    whole = batch(tokens, 1, 0, 240, 9)
    parts = [batch(tokens, 1, step * 24, 24, 9) for step in range(10)]
    assert (np.concatenate(parts) == whole).all()


def test_batches_are_the_same_in_another_process_from_disk_and_for_ever(tmp_path: Path) -> None:
    tokens = (np.arange(3001) * 7919 % 251).astype(np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    here = [int((batch(tokens, 2**63 + 11, step * 4, 4, 32) * np.arange(33)).sum()) for step in (0, 1, 90)]
    program = (
        "import sys, numpy as np; from archlab.search.data import batch\n"
        "tokens = np.memmap(sys.argv[1], dtype='<u2', mode='r')\n"
        "rows = [batch(tokens, 2**63 + 11, step * 4, 4, 32) for step in (90, 1, 0)]\n"
        "print([int((row * np.arange(33)).sum()) for row in reversed(rows)])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "train.bin")]
    there = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    assert there.strip() == str(here) == "[262518, 265543, 273487]"


def test_steps_far_ahead_cost_no_more_than_near_ones() -> None:
    rows = batch(stream(101), 0, 10**15 * 4, 4, 10)
    assert rows.shape == (4, 11)


@pytest.mark.parametrize(("length", "context"), [(2, 1), (2, 8), (9, 8), (10, 8), (17, 8), (1000, 7)])
def test_windows_score_every_token_but_the_first_exactly_once(length: int, context: int) -> None:
    tokens = np.arange(100, 100 + length, dtype=np.uint16)
    inputs, targets = windows(tokens, context)
    assert inputs.shape == targets.shape == (-(-(length - 1) // context), context)
    scored = targets != IGNORE
    assert targets[scored].tolist() == tokens[1:].tolist()
    assert inputs[scored].tolist() == tokens[:-1].tolist()
    assert (~scored).sum() < context and (inputs[~scored] == 0).all()
    assert targets[scored].tolist() == tokens[np.flatnonzero(scored.ravel()) + 1].tolist()


TOO_SHORT = {
    "batch": (lambda: batch(stream(8), 0, 0, 1, 8), "a stream of 8 tokens has no window of 8 + 1 tokens"),
    "windows": (lambda: windows(np.array([256]), 8), "a stream of 1 tokens has nothing to score"),
}


@pytest.mark.parametrize(("ask", "message"), TOO_SHORT.values(), ids=TOO_SHORT)
def test_a_stream_too_short_is_refused(ask: object, message: str) -> None:
    assert callable(ask)
    with pytest.raises(ValueError) as refused:
        ask()
    assert str(refused.value) == message
