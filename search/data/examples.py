"""Rows of examples, each what is given and what is asked for: a pure function of (data, seed, row), as windows are."""

from __future__ import annotations

import numpy as np

from archlab.search.data.batches import IGNORE, epoch_order
from archlab.search.data.checksums import DataError
from archlab.search.data.dataset import Dataset
from archlab.search.data.documents.draws import Bools, Ints
from archlab.search.data.sources.given_tokens import ANSWER


def examples(dataset: Dataset, seed: int, first: int, count: int, context: int) -> Ints:
    """Rows `first` to `first + count` of training: an epoch has every example once, in a random order. As `read`."""
    total = len(dataset.documents("train").tokens)
    chosen = [
        epoch_order(seed, epoch, total)[place]
        for epoch, place in (divmod(row, total) for row in range(first, first + count))
    ]
    return read(dataset, "train", np.array(chosen), context)


def read(dataset: Dataset, split: str, chosen: Ints, context: int) -> Ints:
    """Examples of a split, int64 `[examples, context + 1]`: how many tokens are given, the tokens (with the end of the
    document), then -100. One that is longer than `context` loses the beginning of what is given, then its end.

    Of data with answers: the end of a document, then the tokens without one, `ANSWER` added to those that are answers.
    Raises DataError for data that holds no examples.
    """
    inputs, asked = dataset.inputs(split), dataset.answers(split)
    if asked is not None:
        return _asked(dataset, split, asked, chosen, context)
    if inputs is None:
        raise DataError(f"data {dataset.identity} holds no examples")
    stream, documents = dataset.split(split), dataset.documents(split)
    rows = np.full((len(chosen), context + 1), IGNORE, dtype=np.int64)
    for row, index in zip(rows, chosen, strict=True):
        start, length = int(documents.starts[index]), int(documents.tokens[index])
        lost = min(max(length - context, 0), int(inputs[index]))
        text = stream[start + lost : start + length][:context]
        row[0], row[1 : len(text) + 1] = int(inputs[index]) - lost, text
    return rows


def _asked(dataset: Dataset, split: str, asked: Bools, chosen: Ints, context: int) -> Ints:
    """Sequences with answers, which are at most `context` long."""
    stream, documents = dataset.split(split), dataset.documents(split)
    rows = np.full((len(chosen), context + 1), IGNORE, dtype=np.int64)
    rows[:, 0] = dataset.eod
    for row, index in zip(rows, chosen, strict=True):
        start, length = int(documents.starts[index]), int(documents.tokens[index]) - 1
        own = slice(start, start + length)
        row[1 : length + 1] = stream[own] + asked[own] * np.int64(ANSWER)
    return rows
