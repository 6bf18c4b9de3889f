"""How much of the text that measures is in the text that trains: n-grams of words that both have, as GPT-3 counts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from archlab.search.data.dataset import OVERLAP, Dataset

WORDS = 13  # in a row; arXiv:2005.14165, appendix C
_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]


def overlap(train: Iterable[str], sets: Mapping[str, Iterable[str]], words: int = WORDS) -> dict[str, dict[str, int]]:
    """Per set its documents and n-grams, and how many of them the training text has: of a document any n-gram.

    Words are runs of letters, digits and underscores in lower case; a document of fewer than `words` has no n-gram and
    is counted as `short`. Memory holds the n-grams of the sets, of which 64-bit hashes are compared.
    """
    known: dict[str, int] = {}
    windows = {
        name: [_windows(_numbers(text, known, grow=True), words) for text in texts] for name, texts in sets.items()
    }
    every = [part for parts in windows.values() for part in parts]
    wanted = np.unique(np.concatenate(every)) if every else np.zeros(0, dtype=np.uint64)
    found = np.zeros(len(wanted), dtype=bool)
    for text in train if len(wanted) else ():
        hashes = _windows(_numbers(text, known), words)
        places = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        found[places[wanted[places] == hashes]] = True
    return {name: _counts(parts, wanted, found) for name, parts in windows.items()}


def _counts(parts: list[Hashes], wanted: Hashes, found: npt.NDArray[np.bool_]) -> dict[str, int]:
    shared = [int(found[np.searchsorted(wanted, part)].sum()) if len(part) else 0 for part in parts]
    return {
        "documents": len(parts),
        "documents_shared": sum(count > 0 for count in shared),
        "short": sum(not len(part) for part in parts),
        "ngrams": sum(map(len, parts)),
        "ngrams_shared": sum(shared),
    }


def _numbers(text: str, known: dict[str, int], grow: bool = False) -> npt.NDArray[np.int64]:
    """A number for each word, 0 for those of no set."""
    found = _WORD.findall(text.lower())
    if grow:
        for word in found:
            known.setdefault(word, len(known) + 1)
    number = known.get
    return np.array([number(word, 0) for word in found], dtype=np.int64)


def _windows(numbers: npt.NDArray[np.int64], words: int) -> Hashes:
    """A hash of every `words` words in a row that are all known."""
    count = len(numbers) - words + 1
    if count < 1:
        return np.zeros(0, dtype=np.uint64)
    unknown = np.concatenate([[0], np.cumsum(numbers == 0)])
    total = np.zeros(count, dtype=np.uint64)
    mixed = numbers.astype(np.uint64) * _MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    for place in range(words):
        total = total * _MULTIPLIER + mixed[place : place + count]
    known: Hashes = total[unknown[words:] == unknown[:count]]
    return known


def measure(dataset: Dataset, train: Iterable[bytes] | None = None) -> dict[str, dict[str, int]]:
    """The overlap of the training split with validation and test, from the file beside the data, made if it is not
    there; nothing for a source of tokens. `train` is the training text where that is at hand."""
    if not dataset.has_text:
        return {}
    if (known := dataset.overlap) is not None:
        return known
    sets = {name: texts(dataset, name) for name in ("validation", "test")}
    found = overlap((text.decode() for text in train) if train is not None else texts(dataset, "train"), sets)
    new = dataset.folder / f"{OVERLAP}.{os.getpid()}"
    new.write_text(json.dumps({"words": WORDS, **found}, indent=1))
    new.replace(dataset.folder / OVERLAP)
    return found


def texts(dataset: Dataset, split: str) -> Iterator[str]:
    """The documents of a split, as far as its tokens keep them."""
    stream, index, codec = dataset.split(split), dataset.documents(split), dataset.codec
    for start, count in zip(index.starts.tolist(), index.tokens.tolist(), strict=True):
        yield codec.decode(stream[start : start + count]).decode(errors="replace")


def of_files(dataset: Dataset, files: Mapping[str, Path]) -> dict[str, dict[str, int]]:
    """The overlap of the training split with text files, one document per paragraph."""
    sets = {name: re.split(r"\n\s*\n", file.read_text("utf-8")) for name, file in files.items()}
    return overlap(texts(dataset, "train"), sets)


def share(counts: Mapping[str, int]) -> float:
    """The share of n-grams that the training text has, 0 where there are none."""
    return counts["ngrams_shared"] / counts["ngrams"] if counts["ngrams"] else 0.0
