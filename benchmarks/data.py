"""Batch assembly beside torch's DataLoader over the same memory-mapped tokens: tokens per second and their ratio.

Both give pairs (inputs, targets) of int64 tensors in the main process, in a random order of windows without repeats.
They take turns; the figure of each is its median over the turns. Last, what the checksums of blocks cost a batch whose
blocks are all read for the first time, as in a corpus far larger than a trial.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from archlab.search.data import Bytes, Stdlib, batch, prepare
from archlab.search.data.checksums import Checksums, Stream
from archlab.search.objectives import Causal

Pair = tuple[torch.Tensor, torch.Tensor]
VOCAB = 257


class Windows(Dataset[Pair]):
    """What one writes by hand: item i is the i-th window of the stream."""

    def __init__(self, tokens: np.ndarray, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Pair:
        window = self.tokens[index * self.context : (index + 1) * self.context + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


def ours(tokens: Stream, context: int, size: int) -> Iterator[Pair]:
    """Batches of archlab, without end."""
    for step in itertools.count():
        rows = batch(tokens, 0, step * size, size, context)
        yield Causal().batch(rows, 0, step * size, VOCAB, False).tensors()[:2]


def loader(tokens: np.ndarray, context: int, size: int) -> Iterator[Pair]:
    """Batches of torch's DataLoader, without end."""
    batches = DataLoader(Windows(tokens, context), batch_size=size, shuffle=True, drop_last=True)
    while True:
        yield from batches


def tokens_per_s(stream: Iterator[Pair], tokens_per_batch: int, least_s: float) -> float:
    """How fast batches come, over at least `least_s` seconds."""
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < least_s:
        next(stream)
        count += 1
    return count * tokens_per_batch / elapsed


def measure(
    stream: Stream, tokens: np.ndarray, context: int, size: int, turns: int, least_s: float
) -> tuple[float, float]:
    """Median tokens per second of ours and of the DataLoader, which take turns."""
    streams = [ours(stream, context, size), loader(tokens, context, size)]
    for stream in streams:
        next(stream)
    rates: list[list[float]] = [[], []]
    for _ in range(turns):
        for stream, seen in zip(streams, rates, strict=True):
            seen.append(tokens_per_s(stream, context * size, least_s))
    return statistics.median(rates[0]), statistics.median(rates[1])


def first_reads(folder: Path, tokens: np.ndarray, context: int, size: int, turns: int) -> tuple[float, float]:
    """Median microseconds of a batch of checked tokens no block of which was read before, and of plain ones."""
    checked, plain = [], []
    for turn in range(turns * 20):
        batch(tokens, turn, 0, size, context)  # the order of an epoch is drawn once
        stream = Stream(tokens, Checksums(folder), "train.bin")  # which has checked nothing yet
        for source, seen in ((stream, checked), (tokens, plain)):
            started = time.perf_counter()
            batch(source, turn, 0, size, context)
            seen.append(1e6 * (time.perf_counter() - started))
    return statistics.median(checked), statistics.median(plain)


def main() -> None:
    """Prints one line per shape, and the time that preparing the standard library takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for state in ("cold", "warm"):
            started = time.perf_counter()
            data = prepare(Stdlib(), Bytes(), Path(folder))
            print(f"prepare the standard library, {state}: {1e3 * (time.perf_counter() - started):.0f} ms")
        stream = data.split("train")
        tokens = stream[:]
        print(f"{'context':>8} {'batch':>6} {'archlab':>12} {'DataLoader':>12} {'ratio':>6}   (million tokens/s)")
        for context, size in ((256, 16), (256, 64), (1024, 16), (2048, 32)):
            own, other = measure(stream, tokens, context, size, options.turns, options.seconds)
            print(f"{context:8} {size:6} {own / 1e6:12.1f} {other / 1e6:12.1f} {own / other:6.1f}")
        for context, size in ((128, 4), (2048, 32)):
            checked, plain = first_reads(data.folder, tokens, context, size, options.turns)
            print(f"{size} x {context}, every block new: {checked:.0f} us checked, {plain:.0f} us plain")


if __name__ == "__main__":
    main()
