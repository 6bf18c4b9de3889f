"""Every kernel compiles for the cards that we name, keeps its values in registers, and grows no heavier unseen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from archlab.kernels.aot import REPORT, SHARED_BYTES


@pytest.mark.parametrize("capability", [*(pytest.param(c, marks=pytest.mark.slow) for c in (80, 86, 89)), 90])
def test_kernels_compile_without_spilling_and_as_the_committed_report_says(capability: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    file = tmp_path / "report.json"
    command = [sys.executable, "-W", "error", "-m", "archlab.kernels.aot", str(file), "--capability", str(capability)]
    root = Path(__file__).parents[2]
    subprocess.run(command, env=environment, cwd=root, check=True, timeout=1200, capture_output=True)
    report, committed = json.loads(file.read_text()), json.loads(REPORT.read_text())
    rows = {row["name"]: row for row in report["kernels"]}
    known = {row["name"]: row for row in committed["kernels"] if row["capability"] == capability}
    assert rows.keys() == known.keys(), "run python -m archlab.kernels.aot and commit the report"
    assert not [row for row in rows.values() if row["stack_bytes"]]
    assert all(row["shared_bytes"] <= SHARED_BYTES[capability] for row in rows.values())
    if report["triton"] == committed["triton"]:  # registers are the compiler's choice, which differs between versions
        heavier = [name for name, row in rows.items() if row["registers"] > known[name]["registers"]]
        assert not heavier, "more registers than committed: run python -m archlab.kernels.aot if that is meant"
    lost = [name for name, row in rows.items() if known[name]["hgmma"] and not row["hgmma"]]
    assert not lost, "these fell back to the tensor-core instructions of older cards"
    if capability == 90:
        assert not [row["name"] for row in rows.values() if row["hmma"]], "a product narrower than 64 rows"
