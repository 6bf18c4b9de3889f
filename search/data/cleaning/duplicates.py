"""What occurs twice: paragraphs, spans of words, and documents that are nearly the same. The first one stays."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from archlab.arch_dsl.language.spec import Count, Range
from archlab.search.data.cleaning.stages import CleaningStage, Step, Verdict

Hashes = npt.NDArray[np.uint64]

_PARAGRAPH = re.compile(r".+?(?:\n[^\S\n]*\n\s*|\Z)", re.DOTALL)
_WORD = re.compile(r"\S+")
_MULTIPLIER = 0x9E3779B97F4A7C15


@CleaningStage.register("paragraphs")
class Paragraphs(CleaningStage):
    """Removes paragraphs that occurred before, in this document or an earlier one, as CCNet does (arXiv:1911.00359).

    Paragraphs are separated by blank lines and compared without the white space around them. Memory holds 16 bytes'
    worth of hash for each.
    """

    group: ClassVar[str] = "dedup"

    def start(self) -> Step:
        """Removes the later occurrences."""
        seen: set[bytes] = set()

        def step(text: str) -> Verdict | None:
            left: list[str] = []
            removed: list[str] = []
            for part in _PARAGRAPH.findall(text):
                key = hashlib.sha256(part.strip().encode()).digest()[:16]
                (removed if key in seen else left).append(part)
                if part.strip():
                    seen.add(key)
            return Verdict("".join(left), {"repeated paragraphs": len(removed)}, removed[0]) if removed else None

        return step


@CleaningStage.register("spans")
class Spans(CleaningStage):
    """Removes every span of at least `words` words that occurred before, in this document or an earlier one.

    It does what exact-substring deduplication does (arXiv:2107.06499, section 4.1), with words in place of tokens, the
    first occurrence kept, and 64-bit hashes of all windows of `words` words in place of a suffix array: eight bytes of
    memory per word of the corpus, and one false match expected in about 2^64 / (words of the corpus)^2.
    """

    group: ClassVar[str] = "dedup"

    words: Annotated[int, Range(min=2)] = 50

    def start(self) -> Step:
        """Removes the later occurrences."""
        seen = _Seen()

        def step(text: str) -> Verdict | None:
            found = list(_WORD.finditer(text))
            windows = _windows([match[0] for match in found], self.words)
            again = seen.add(windows)
            covered = np.zeros(len(found), dtype=bool)
            for place in np.flatnonzero(again):
                covered[place : place + self.words] = True
            if not covered.any():
                return None
            ends = [*(match.start() for match in found[1:]), len(text)]
            left = [text[: found[0].start()]]
            left += [text[m.start() : end] for m, end, gone in zip(found, ends, covered, strict=True) if not gone]
            first = int(np.argmax(covered))
            spans = int((np.diff(covered.astype(np.int8), prepend=0) == 1).sum())
            return Verdict(
                "".join(left), {f"repeated spans of {self.words} words or more": spans}, text[found[first].start() :]
            )

        return step


class _Seen:
    """A set of hashes that takes eight bytes for each: sorted arrays, of which those of a size are merged."""

    def __init__(self) -> None:
        self._sorted: list[Hashes] = []

    def add(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Adds them; tells which were there before, or stand further left among them."""
        _, first = np.unique(hashes, return_index=True)
        again = np.ones(len(hashes), dtype=bool)
        again[first] = False
        for known in self._sorted:
            places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            again |= known[places] == hashes
        fresh = np.sort(hashes[~again])
        while self._sorted and len(fresh) and len(self._sorted[-1]) <= 2 * len(fresh):
            fresh = np.sort(np.concatenate([self._sorted.pop(), fresh]), kind="stable")
        if len(fresh):
            self._sorted.append(fresh)
        return again


def _windows(words: list[str], n: int) -> Hashes:
    """A hash of every n words in a row: a polynomial in the hashes of the words, modulo 2^64."""
    if len(words) < n:
        return np.zeros(0, dtype=np.uint64)
    joined = b"".join(hashlib.blake2b(word.encode(), digest_size=8).digest() for word in words)
    single = np.frombuffer(joined, dtype="<u8")
    total = np.zeros(len(words) - n + 1, dtype=np.uint64)
    for place in range(n):
        total = total * np.uint64(_MULTIPLIER) + single[place : place + len(total)]
    return total ^ (total >> np.uint64(31))


@CleaningStage.register("minhash")
class MinHash(CleaningStage):
    """Drops documents that are nearly the same as an earlier one: MinHash with `datasketch` (as in arXiv:2107.06499).

    Two documents are, when their sets of `ngram` lower-case words in a row have an estimated Jaccard similarity of at
    least `threshold`, from `permutations` hash functions; locality-sensitive hashing finds the pairs to compare, and
    may miss one near the threshold. Memory holds eight bytes per hash function and document.
    """

    group: ClassVar[str] = "dedup"

    threshold: Annotated[float, Range(above=0, max=1)] = 0.8
    ngram: Count = 5
    permutations: Annotated[int, Range(min=16)] = 128

    def start(self) -> Step:
        """Drops the later ones."""
        from datasketch import MinHash as Sketch
        from datasketch import MinHashLSH

        index = MinHashLSH(threshold=self.threshold, num_perm=self.permutations)
        sketches: list[Sketch] = []

        def step(text: str) -> Verdict | None:
            words = text.lower().split()
            grams = {" ".join(words[i : i + self.ngram]).encode() for i in range(max(len(words) - self.ngram + 1, 1))}
            sketch = Sketch(num_perm=self.permutations, seed=1)
            sketch.update_batch(sorted(grams))
            if any(sketch.jaccard(sketches[place]) >= self.threshold for place in index.query(sketch)):
                return Verdict("", {"nearly the same as an earlier document": 1})
            index.insert(len(sketches), sketch)
            sketches.append(sketch)
            return None

        return step
