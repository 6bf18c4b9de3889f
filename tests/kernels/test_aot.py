"""Kernels compile for the cards that we name, keep their values in registers, and grow no heavier unseen.

A kernel takes a second or two. `make test` compiles three; slow tests compile for the H100 one of each kind and a
fourth of the others, and for older cards those that are built otherwise there; `make test-all` compiles all for the
H100.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from archlab.kernels.aot import CAPABILITIES, REPORT, SHARED_BYTES
from tests.slow_tests import ALL

# Prints what is built for each card, and compiles for some cards the kernels that are asked for, or those that differ
# from the H100's.
PROGRAM = """
import json, sys
from archlab.kernels import aot
from archlab.kernels.launch import compiling_for

cards, wanted = [*map(int, sys.argv[1].split(","))], sys.argv[2:]
built, rows = {}, []
for card in {*aot.CAPABILITIES, *cards}:
    with compiling_for(card):
        built[card] = {build.name: build for build in aot.builds()}
newest = built[90]
for capability in cards:
    ours = built[capability]
    own = [name for name, build in ours.items() if name not in newest or build.meta != newest[name].meta]
    with compiling_for(capability):
        rows += [aot.compile_for(ours[name], capability) for name in wanted or own if name in ours]
import triton
print(json.dumps({"triton": triton.__version__, "names": {c: list(b) for c, b in built.items()}, "kernels": rows}))
"""
COMMITTED = json.loads(REPORT.read_text())


def run(*command: str) -> str:
    """What a process in which kernels are compiled prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = (sys.executable, "-W", "error", *command)
    root = Path(__file__).parents[2]
    return subprocess.run(
        command, env=environment, cwd=root, check=True, timeout=1200, stdout=subprocess.PIPE
    ).stdout.decode()


def of(capability: int) -> dict[str, dict[str, Any]]:
    """The committed rows of a card."""
    return {row["name"]: row for row in COMMITTED["kernels"] if row["capability"] == capability}


def hold(report: dict[str, Any], capability: int) -> None:
    """What was compiled spills nothing and is no heavier than committed."""
    rows = {row["name"]: row for row in report["kernels"] if row["capability"] == capability}
    known = of(capability)
    assert rows and not [row for row in rows.values() if row["stack_bytes"]]
    assert all(row["shared_bytes"] <= SHARED_BYTES[capability] for row in rows.values())
    if report["triton"] == COMMITTED["triton"]:  # registers are the compiler's choice, which differs between versions
        heavier = [name for name, row in rows.items() if row["registers"] > known[name]["registers"]]
        assert not heavier, "more registers than committed: run python -m archlab.kernels.aot if that is meant"
    lost = [name for name, row in rows.items() if known[name]["hgmma"] and not row["hgmma"]]
    assert not lost, "these fell back to the tensor-core instructions of older cards"
    if capability == 90:
        narrow = [name for name, row in rows.items() if row["hmma"] and not name.startswith("wkv7-")]
        assert not narrow, "a product narrower than 64 rows"


def test_what_is_built_is_what_the_committed_report_lists_and_some_compile() -> None:
    wanted = ("rms_norm-weight-backward-1024", "attention-forward-decay-128", "linear_recurrence-walk-token-128")
    report = json.loads(run("-c", PROGRAM, "90", *wanted))
    for capability in CAPABILITIES:
        told = "run python -m archlab.kernels.aot and commit the report"
        assert set(report["names"][str(capability)]) == of(capability).keys(), told
    hold(report, 90)


@pytest.mark.slow
def test_some_of_each_kind_compile_for_an_h100_as_the_committed_report_says() -> None:
    kinds = {"-".join(name.split("-")[:2]): name for name in reversed(of(90))}  # of the same op and direction the first
    others = sorted(of(90).keys() - kinds.values())
    hold(json.loads(run("-c", PROGRAM, "90", *kinds.values(), *others[::20])), 90)


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="make test-all compiles all kernels")
def test_all_kernels_compile_for_an_h100_as_the_committed_report_says(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run("-m", "archlab.kernels.aot", str(file), "--capability", "90")
    report = json.loads(file.read_text())
    assert {row["name"] for row in report["kernels"]} == of(90).keys()
    hold(report, 90)


@pytest.mark.slow
def test_attention_fits_the_memory_and_the_registers_of_newer_cards() -> None:
    """A B200 spills with an H100's tiles; an RTX 50 has the memory of an RTX 40."""
    kernels = (
        *(f"attention-{kind}-window-sinks-128" for kind in ("forward", "keys", "queries")),
        "attention-keys-decay-128",
    )
    rows = json.loads(run("-c", PROGRAM, "100,120", *kernels))["kernels"]
    assert len(rows) == 7, "the last one is built for one of the two"
    assert [row for row in rows if row["stack_bytes"] or row["shared_bytes"] > SHARED_BYTES[row["capability"]]] == []


@pytest.mark.slow
def test_what_older_cards_have_of_their_own_compiles_as_the_committed_report_says() -> None:
    older = [capability for capability in CAPABILITIES if capability < 90]
    report = json.loads(run("-c", PROGRAM, ",".join(map(str, older))))
    for capability in older:
        hold(report, capability)
