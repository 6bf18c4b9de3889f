"""What the automatic check tries of the slow tests."""

from __future__ import annotations

import re
from pathlib import Path

from tests.slow_tests import LONGEST, SHARES

TESTS = Path(__file__).parent


def functions() -> set[str]:
    """The names of all test functions, with their file and without."""
    found = set()
    for path in TESTS.rglob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE):
            found |= {name, f"{path.relative_to(TESTS.parent).as_posix()}::{name}"}
    return found


def test_what_is_left_to_test_all_is_there() -> None:
    known = functions()
    assert {*SHARES} <= known
    assert {name.partition("[")[0] for name in LONGEST} <= known
