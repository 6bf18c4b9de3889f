"""Rules that tell prose from what is not: those of Gopher and of C4, with their published thresholds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from archlab.search.data.cleaning.stages import CleaningStage, Step, Verdict

_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_BULLETS = ("•", "‣", "◦", "▪", "*", "-")
_ELLIPSES = ("...", "…")
_TOP = {2: 0.20, 3: 0.18, 4: 0.16}  # table A1: n to the most that the most frequent n-gram may make up
_DUPLICATE = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}  # and that repeated n-grams may
_ENDS = (".", "!", "?", '"', "\N{RIGHT DOUBLE QUOTATION MARK}")
_SENTENCE = re.compile(r"[.!?]+[\"'\N{RIGHT DOUBLE QUOTATION MARK})\]]*(?=\s|$)")
_BLANK_LINES = re.compile(r"\n\s*\n")


@CleaningStage.register("gopher")
class Gopher(CleaningStage):
    """Drops documents by the quality and repetition rules of Gopher (arXiv:2112.11446, A.1.1 and table A1).

    Kept are those of 50 to 100,000 words with a mean of 3 to 10 characters, at most 0.1 hash signs and 0.1 ellipses per
    word, at most 90% of lines that begin with a bullet and 30% that end with an ellipsis, 80% of words with a letter,
    two different ones of eight English stop words; at most 30% of lines and of paragraphs repeated, which hold at most
    20% of the characters; the most frequent 2-, 3- and 4-gram at most 20%, 18% and 16% of the characters of all words,
    and repeated 5- to 10-grams at most 15% down to 10%. What repeats is every occurrence after the first; words are
    what white space separates.
    """

    group: ClassVar[str] = "quality"

    def start(self) -> Step:
        """Drops a document for the first rule that it breaks."""

        def step(text: str) -> Verdict | None:
            reason = _poor(text) or _repetitive(text)
            return Verdict("", {reason: 1}) if reason else None

        return step


@CleaningStage.register("c4")
class C4(CleaningStage):
    """Drops lines and documents by the rules of C4 (arXiv:1910.10683, section 2.2).

    A line stays if it ends with `.`, `!`, `?` or a closing double quotation mark, has at least 5 words and does not say
    JavaScript; a document if it has at least 3 sentences in these lines, no curly bracket and no `lorem ipsum`.
    Sentences end at `.`, `!` or `?` before white space. Not done are C4's word list, its language detection, and its
    removal of repeated spans of three sentences, for which there is `dedup: spans`.
    """

    group: ClassVar[str] = "quality"

    def start(self) -> Step:
        """Drops lines first, then the document if what is left is too little."""

        def step(text: str) -> Verdict | None:
            for mark in ("{", "lorem ipsum"):
                if mark in text.lower():
                    return Verdict("", {f"holds {mark}": 1})
            lines = [(line, _poor_line(line)) for line in text.splitlines(keepends=True)]
            left = "".join(line for line, reason in lines if reason is None)
            reasons = Counter(reason for _, reason in lines if reason)
            if len(_SENTENCE.findall(left)) < 3:
                return Verdict("", {"fewer than 3 sentences": 1})
            return Verdict(left, dict(reasons), next(line for line, reason in lines if reason)) if reasons else None

        return step


def _poor_line(line: str) -> str | None:
    """Why C4 drops a line, if it does; blank lines, which separate paragraphs, stay."""
    words = line.split()
    if not words:
        return None
    if not words[-1].endswith(_ENDS):
        return "lines without terminal punctuation"
    if len(words) < 5:
        return "lines of fewer than 5 words"
    return "lines that say JavaScript" if "javascript" in line.lower() else None


def _poor(text: str) -> str | None:
    """The quality rule of Gopher that a text breaks."""
    words = text.split()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    count = len(words)
    if not 50 <= count <= 100_000:
        return "fewer than 50 words" if count < 50 else "more than 100,000 words"
    if not 3 <= sum(map(len, words)) / count <= 10:
        return "mean word length outside of 3 to 10"
    if text.count("#") > 0.1 * count or sum(map(text.count, _ELLIPSES)) > 0.1 * count:
        return "more than 0.1 hash signs or ellipses per word"
    if sum(line.startswith(_BULLETS) for line in lines) > 0.9 * len(lines):
        return "more than 90% of lines are bullets"
    if sum(line.endswith(_ELLIPSES) for line in lines) > 0.3 * len(lines):
        return "more than 30% of lines end with an ellipsis"
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * count:
        return "fewer than 80% of words have a letter"
    if len(_STOP_WORDS.intersection(word.strip(".,;:!?\"'()").lower() for word in words)) < 2:
        return "fewer than 2 English stop words"
    return None


def _repetitive(text: str) -> str | None:
    """The repetition rule of Gopher that a text breaks."""
    parts = {
        "lines": [line.strip() for line in text.splitlines() if line.strip()],
        "paragraphs": [part.strip() for part in _BLANK_LINES.split(text) if part.strip()],
    }
    for name, pieces in parts.items():
        repeated = [piece for piece, again in zip(pieces, _again(pieces), strict=True) if again]
        if len(repeated) > 0.3 * len(pieces):
            return f"more than 30% of {name} repeated"
        if sum(map(len, repeated)) > 0.2 * sum(map(len, pieces)):
            return f"repeated {name} hold more than 20% of the characters"
    words = text.split()
    lengths = np.array([len(word) for word in words])
    total = int(lengths.sum())
    for n, most in _TOP.items():
        gram, times = Counter(zip(*(words[start:] for start in range(n)), strict=False)).most_common(1)[0]
        if times > 1 and times * sum(map(len, gram)) > most * total:
            return f"the most frequent {n}-gram holds more than {most:.0%} of the characters"
    for n, most in _DUPLICATE.items():
        covered = np.zeros(len(words), dtype=bool)
        for place in np.flatnonzero(_again(list(zip(*(words[start:] for start in range(n)), strict=False)))):
            covered[place : place + n] = True
        if int(lengths[covered].sum()) > most * total:
            return f"repeated {n}-grams hold more than {most:.0%} of the characters"
    return None


def _again(items: Sequence[object]) -> list[bool]:
    """Whether each item occurred before."""
    seen: set[object] = set()
    return [item in seen or seen.add(item) is not None for item in items]  # type: ignore[func-returns-value]
