"""Every test that the pages on faults and on strangers name is there, and every fault has one."""

import re

from tests.docs_kit import ROOT


def there():
    return {
        f"{path.name}::{name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def test_every_threat_names_tests_that_exist():
    page = (ROOT / "docs" / "concepts" / "threats.md").read_text()
    rows = [line.split("|")[-2] for line in page.splitlines() if line.startswith("| ")][1:]
    named = [set(re.findall(r"`([^`]+::[^`]+)`", cell)) for cell in rows]
    assert len(rows) > 10 and all(named) and set.union(*named) <= there()


def test_every_fault_names_tests_that_exist():
    rows = re.findall(
        r"^\| (\d+) \|.*\| ([^|]+) \|$", (ROOT / "docs" / "concepts" / "reliability.md").read_text(), re.MULTILINE
    )
    assert [int(number) for number, _ in rows] == list(range(1, 37))
    missing = {name for _, cell in rows for name in re.findall(r"`([^`]+::[^`]+)`", cell)} - there()
    assert missing == set()
    assert [number for number, cell in rows if "`" not in cell and cell != "the same"] == []
