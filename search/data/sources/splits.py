"""Which document trains, which chooses, which reports: decided by the hash of its text, so no two splits overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from archlab.arch_dsl.language.errors import SpecError
from archlab.search.data.documents.document import Document
from archlab.search.data.documents.spool import Picked, Texts
from archlab.search.data.sources.family import Source

NAMES = ("train", "validation", "test")
VALIDATION_FROM = 0.90
TEST_FROM = 0.95


@dataclass
class Kept:
    """The documents of a corpus that are not blank and not a copy, each once: the text, its SHA-256 and its group.

    `domain` counts the corpora of a mixture, whose documents are kept together, so that no text is in two of them.
    """

    texts: Texts = field(default_factory=list[bytes])
    keys: list[bytes] = field(default_factory=list)
    groups: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)
    duplicate_bytes: int = 0

    def add(self, documents: Iterable[Document], source: Source) -> range:
        """Keeps what is new; returns the places of these documents."""
        first = len(self.keys)
        for data, group in documents:
            if not (data if source.holds_tokens else data.strip()):
                continue
            key = hashlib.sha256(data).digest()
            if key in self.known:
                self.duplicate_bytes += len(data)
                continue
            self.known.add(key)
            self.keys.append(key)
            self.groups.append(group)
            self.sizes.append(len(data))
            self.texts.append(data)
        return range(first, len(self.keys))


@dataclass(frozen=True)
class Splits:
    """The documents of each split in reading order, and the bytes that no split uses.

    `domains` says of each corpus of a mixture which documents of a split are its own: (first, one after the last).
    """

    documents: dict[str, Picked]
    hashes: dict[str, list[bytes]]
    duplicate_bytes: int
    unused_bytes: int
    domains: dict[str, dict[str, tuple[int, int]]]

    def digest(self) -> str:
        """The SHA-256 of all documents with their order and their split."""
        total = hashlib.sha256()
        for name in NAMES:
            total.update(f"{name} {len(self.hashes[name])}\n".encode())
            for key in self.hashes[name]:
                total.update(key)
        return total.hexdigest()


def split_all(corpora: Mapping[str, tuple[Source, str, range]], kept: Kept) -> Splits:
    """Splits each corpus by itself: its source, its place in the study and the places of its documents.

    Each document is assigned once. A group's hash, read as a number in [0, 1), says its split: 90%, 5%, 5%. Where a
    corpus is so small that no hash falls into a held-out split, the highest one below it is taken. Raises SpecError for
    fewer than three groups or a cap that holds no document.
    """
    places: dict[str, list[int]] = {name: [] for name in NAMES}
    domains: dict[str, dict[str, tuple[int, int]]] = {}
    unused_bytes = 0
    for domain, (source, path, own) in corpora.items():
        used, unused = _split(own, kept, source, path)
        domains[domain] = {n: (len(places[n]), len(places[n]) + len(used[n])) for n in NAMES}
        unused_bytes += unused
        for name in NAMES:
            places[name] += used[name]
    return Splits(
        {name: Picked(kept.texts, places[name]) for name in NAMES},
        {name: [kept.keys[place] for place in places[name]] for name in NAMES},
        kept.duplicate_bytes,
        unused_bytes,
        domains,
    )


def _split(own: range, kept: Kept, source: Source, path: str) -> tuple[dict[str, list[int]], int]:
    """The places of each split of one corpus, and the bytes beyond the caps."""
    names = _assign({kept.groups[place] for place in own}, source, path)
    used: dict[str, list[int]] = {name: [] for name in NAMES}
    for place in own:
        used[names[kept.groups[place]]].append(place)
    unused = 0
    for name, cap in source.caps.items():
        whole = used[name]
        used[name] = _capped(whole, kept, source, cap, path)
        unused += sum(kept.sizes[place] for place in whole) - sum(kept.sizes[place] for place in used[name])
    return used, unused


def _assign(groups: set[bytes], source: Source, path: str) -> dict[bytes, str]:
    if not groups:
        raise SpecError.of(path, f"holds no text{' after cleaning' if source.clean else ''}", source.mark())
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


def _capped(places: Sequence[int], kept: Kept, source: Source, cap: str, path: str) -> list[int]:
    """As many documents as fit, taken in the order of their hashes, returned in reading order."""
    limit: int = getattr(source, cap) * source.unit
    taken: set[int] = set()
    total = 0
    for place in sorted(places, key=lambda place: kept.keys[place]):
        if total + kept.sizes[place] <= limit:
            taken.add(place)
            total += kept.sizes[place]
    if not taken:
        least, found = min(kept.sizes[place] for place in places) // source.unit, limit // source.unit
        message = f"must be at least {least:,}, the smallest document of its split, found {found:,}"
        raise SpecError.of(f"{path}.{cap}", message, source.mark(cap))
    return [place for place in places if place in taken]
