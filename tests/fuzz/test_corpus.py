"""What coverage-guided fuzzing has found that reaches lines of ours which no committed study reaches, tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.coverage import TARGETS, read_corpus

_MOST_BYTES = 100_000


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_what_was_found_is_answered_or_refused(target: str, tmp_path: Path) -> None:
    check, inputs = TARGETS[target](tmp_path), read_corpus(target)
    assert inputs
    for data in inputs:
        check(data)


def test_the_corpus_is_small() -> None:
    assert sum(len(data) for target in TARGETS for data in read_corpus(target)) < _MOST_BYTES
