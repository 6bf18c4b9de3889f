"""Every test that docs/concepts/reliability.md names is there, and every fault has one."""

import re

from tests.docs_kit import ROOT


def test_every_fault_names_tests_that_exist():
    there = {
        f"{path.name}::{name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    rows = re.findall(
        r"^\| (\d+) \|.*\| ([^|]+) \|$", (ROOT / "docs" / "concepts" / "reliability.md").read_text(), re.MULTILINE
    )
    assert [int(number) for number, _ in rows] == list(range(1, 36))
    missing = {name for _, cell in rows for name in re.findall(r"`([^`]+::[^`]+)`", cell)} - there
    assert missing == set()
    assert [number for number, cell in rows if "`" not in cell and cell != "the same"] == []
