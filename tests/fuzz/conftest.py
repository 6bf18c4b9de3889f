"""After a long run: what each fuzz test tried, and how many of its inputs were answered, refused, and failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fuzz.fuzz_kit import TRIED, long_run

_KEPT = "fuzzed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """What a test counts travels with its report, also from a process of pytest-xdist."""
    TRIED.clear()
    try:
        return (yield)
    finally:
        if TRIED:
            item.user_properties.append((_KEPT, dict(TRIED)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table, as Markdown; a test fails with the first input that breaks its promise."""
    if not long_run():
        return
    terminalreporter.write_line("\n| input | answered | refused | failed |\n|---|---|---|---|")
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for found in (value for name, value in report.user_properties if name == _KEPT and report.when == "call"):
                kind = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
                failed = int(outcome == "failed")
                told = (f"{found.get(name, 0):,}" for name in ("answered", "refused"))
                terminalreporter.write_line(f"| {kind} | {' | '.join(told)} | {failed} |")
