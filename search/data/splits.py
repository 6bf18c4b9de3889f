"""Which document trains, which chooses, which reports: decided by the hash of its text, so no two splits overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from arch_dsl.errors import SpecError
from search.data.sources import Document, Source

NAMES = ("train", "validation", "test")
VALIDATION_FROM = 0.90
TEST_FROM = 0.95


@dataclass(frozen=True)
class Splits:
    """The documents of each split in reading order, and the bytes that no split uses."""

    documents: dict[str, list[bytes]]
    duplicate_bytes: int
    unused_bytes: int

    def digest(self) -> str:
        """The SHA-256 of all documents with their order and their split."""
        total = hashlib.sha256()
        for name in NAMES:
            total.update(f"{name} {len(self.documents[name])}\n".encode())
            for document in self.documents[name]:
                total.update(hashlib.sha256(document).digest())
        return total.hexdigest()


def split(documents: Iterable[Document], source: Source, path: str) -> Splits:
    """Assigns each document once. A group's hash, read as a number in [0, 1), says its split: 90%, 5%, 5%.

    Where a corpus is so small that no hash falls into a held-out split, the highest one below it is taken. Blank
    documents are left out; of those with the same bytes the first is kept. Raises SpecError for fewer than three groups
    or a cap that holds no document.
    """
    kept: dict[bytes, Document] = {}
    duplicate_bytes = 0
    for document in documents:
        if not document.data.strip():
            continue
        key = hashlib.sha256(document.data).digest()
        duplicate_bytes += len(document.data) if key in kept else 0
        kept.setdefault(key, document)
    names = _assign({document.group for document in kept.values()}, source, path)
    whole = {name: [key for key, document in kept.items() if names[document.group] == name] for name in NAMES}
    used = {
        "train": whole["train"],
        "validation": _capped(whole["validation"], kept, source, "validation_bytes", path),
        "test": _capped(whole["test"], kept, source, "test_bytes", path),
    }
    unused = {key for keys in whole.values() for key in keys} - {key for keys in used.values() for key in keys}
    return Splits(
        {name: [kept[key].data for key in keys] for name, keys in used.items()},
        duplicate_bytes,
        sum(len(kept[key].data) for key in unused),
    )


def _assign(groups: set[bytes], source: Source, path: str) -> dict[bytes, str]:
    if not groups:
        raise SpecError.of(path, "holds no text", source.mark())
    if len(groups) < len(NAMES):
        count = "1 document" if len(groups) == 1 else f"{len(groups)} documents"
        message = f"holds {count}; training, validation and test need at least one each"
        raise SpecError.of(path, message, source.mark())
    ordered = sorted(groups)
    test = [group for group in ordered if _number(group) >= TEST_FROM] or ordered[-1:]
    rest = ordered[: -len(test)]
    validation = [group for group in rest if _number(group) >= VALIDATION_FROM] or rest[-1:]
    names = dict.fromkeys(rest, "train") | dict.fromkeys(validation, "validation") | dict.fromkeys(test, "test")
    if "train" not in names.values():
        raise SpecError.of(path, "holds too few documents: none is left for training", source.mark())
    return names


def _number(group: bytes) -> float:
    return int.from_bytes(group[:8], "big") / 2**64


def _capped(keys: Sequence[bytes], kept: dict[bytes, Document], source: Source, cap: str, path: str) -> list[bytes]:
    """As many documents as fit, taken in the order of their hashes, returned in reading order."""
    limit: int = getattr(source, cap)
    taken: set[bytes] = set()
    total = 0
    for key in sorted(keys):
        if total + len(kept[key].data) <= limit:
            taken.add(key)
            total += len(kept[key].data)
    if not taken:
        least = min(len(kept[key].data) for key in keys)
        message = f"must be at least {least:,}, the smallest document of its split, found {limit:,}"
        raise SpecError.of(f"{path}.{cap}", message, source.mark(cap))
    return [key for key in keys if key in taken]
