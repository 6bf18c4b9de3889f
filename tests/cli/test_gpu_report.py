"""The report of a card: parts that end as they may, what falls short, and kernels that are then not used."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from archlab.cli.gpu_report import report, sections
from archlab.cli.gpu_report.page import page
from archlab.cli.gpu_report.sections import SECTIONS, Section
from archlab.cli.gpu_report.shortfalls import shortfalls, verdicts_of
from archlab.kernels import OPS, Device, bench, launch, select, verdicts

H100 = Device("cuda", (9, 0))
ROW: dict[str, Any] = {"op": "gate", "case": "rows", "dtype": "bfloat16", "implementation": "triton", "options": {}}


def part(minutes: float = 1.0) -> Section:
    return Section("a part", minutes, lambda device: iter(()))


def found(**parts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {"rows": rows, "seconds": 1.0, "exit": 0} for name, rows in parts.items()}


def test_a_part_that_fails_leaves_its_rows_and_its_last_words() -> None:
    code = "print('{\"a\": 1}'); print('a warning'); raise SystemExit('the card is gone')"
    ended = report.measured("x", part(), ("-c", code))
    assert (ended["rows"], ended["exit"], ended["said"].strip()) == ([{"a": 1}], 1, "the card is gone")


def test_a_part_at_its_limit_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    started = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    )
    code = (
        started + f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); print('{{}}', flush=True); child.wait()"
    )
    ended = report.measured("x", part(0.05), ("-c", code))
    assert (ended["rows"], ended["exit"]) == ([{}], None)
    child = int((tmp_path / "pid").read_text())
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            return  # nobody has asked yet how it ended
        time.sleep(0.1)
    raise AssertionError("what the part started is still there")


def test_what_falls_short_is_told_and_nothing_else_is() -> None:
    good = ROW | {"other": "torch", "other_full": 1.4, "share_of_ceiling": 0.5}
    norm = good | {"op": "rms_norm", "share_of_ceiling": 0.6}
    step = {"model": "m", "way": "kernel by kernel", "ms": 5.0}
    checked = {"op": "gate", "implementation": "triton", "family": "triton", "dtype": "float16", "wrong": None}
    fine = found(ops=[good], steps=[step, step | {"way": "graph", "ms": 4.0}], right=[checked], study=[{"exit": 0}])
    assert shortfalls(fine) == [] and verdicts_of(fine) == []
    bad = found(
        ops=[norm, good | {"other_full": 0.5}],
        steps=[step, step | {"way": "graph", "ms": 6.0}],
        right=[checked | {"wrong": "rows: relative error 1"}],
        study=[{"exit": 1, "trials": 3}],
    )
    bad["cards"] = {"rows": [], "seconds": 180.0, "exit": None}
    assert len(shortfalls(bad)) == 6
    assert [(each.op, each.dtype, each.wrong) for each in verdicts_of(bad)] == [
        ("gate", "float16", True),
        ("gate", "bfloat16", False),
    ]
    text = page(bad, dict.fromkeys(bad, "a part"), shortfalls(bad), "some/file")
    assert all(f"- {each}" in text for each in shortfalls(bad)) and "some/file" in text


def test_a_kernel_that_was_wrong_or_slow_on_this_card_is_not_used_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "WINNERS", tmp_path)
    monkeypatch.setattr(launch, "card", lambda: "some-card")
    monkeypatch.setattr(Device, "current", staticmethod(lambda: H100))
    assert select("rms_norm", H100, torch.bfloat16).implementation == "triton"
    options = {name: allowed[0] for name, allowed in OPS["attention"].options.items()} | {"decay": True}
    verdicts.write(
        launch.verdicts_of("some-card"),
        [
            verdicts.Verdict("rms_norm", "bfloat16", True, "rows: relative error 1"),
            verdicts.Verdict("attention", "bfloat16", False, "torch takes 0.5 of its time", options),
        ],
    )
    wrong = select("rms_norm", H100, torch.bfloat16)
    assert wrong.implementation == "torch" and wrong.fallback and "found it wrong on this card" in wrong.reason
    assert select("rms_norm", H100, torch.float32).implementation == "triton"
    slow = select("attention", H100, torch.bfloat16, decay=True)
    assert "found it slower on this card" in slow.reason and slow.implementation == "torch" and not slow.fallback
    assert "on this card" not in select("attention", H100, torch.bfloat16).reason
    assert select("rms_norm", Device("cuda", (8, 0)), torch.bfloat16).implementation == "triton", "another card"
    monkeypatch.setattr(verdicts, "versions", lambda: {"torch": "2.99", "triton": "9"})
    verdicts._read.cache_clear()
    assert select("rms_norm", H100, torch.bfloat16).implementation == "triton", "other versions are tried again"
    verdicts._read.cache_clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu"], "there is no CUDA device here"),
        (["--gpu", "--json"], "leave --op, --tune and --json out"),
        (["--to", "reports"], "add --gpu, or leave it out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_it_cannot_do_is_refused(options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "archlab", "bench", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.slow
def test_parts_run_on_this_device_and_are_written(tmp_path: Path) -> None:
    said: list[str] = []
    parts = {name: SECTIONS[name] for name in ("machine", "steps", "study")}
    file, short = report.written(tmp_path / "new", said.append, parts)
    held = json.loads(file.with_suffix(".json").read_text())["parts"]
    assert [part["exit"] for part in held.values()] == [0, 0, 0], held
    assert held["steps"]["rows"][0]["tokens_per_s"] > 0
    assert held["study"]["rows"][0]["trials"] == 4 and short == []
    assert len(said) == 6


@pytest.mark.slow
def test_the_machine_is_told_in_both_files(tmp_path: Path) -> None:
    file, short = report.written(tmp_path / "new", lambda line: None, {"machine": SECTIONS["machine"]})
    (row,) = json.loads(file.with_suffix(".json").read_text())["parts"]["machine"]["rows"]
    assert row["copy_gb_per_s"] > 0 and short == []
    assert f"| torch | {row['torch']} |" in file.read_text()


@pytest.mark.slow
def test_a_study_is_run_and_one_that_fails_is_told() -> None:
    row = sections._study(sections.STUDY.replace("100k", "2k").replace("seeds: 2", "seeds: 1"))
    assert (row["exit"], row["trials"]) == (0, 2) and row["tokens_per_s"] > 0
    wrong = sections._study(sections.STUDY.replace("tokens: ", "token: "))
    assert wrong["exit"] == 2 and "did you mean 'tokens'" in wrong["said"]


def test_implementations_that_serve_here_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["token_shift"]
    monkeypatch.setattr(sections, "OPS", {"token_shift": op})
    rows = [*sections.right(Device("cpu"))]
    ours = [row for row in rows if row["implementation"] == "torch"]  # Triton's serve too where they are interpreted
    assert [row["dtype"] for row in ours] == ["float32", "bfloat16", "float16"]
    assert not [row for row in rows if row["wrong"]]
    broken = dataclasses.replace(op, reference=lambda **given: 2 * op.reference(**given))
    monkeypatch.setattr(sections, "OPS", {"token_shift": broken})
    assert all("relative error" in row["wrong"] for row in sections.right(Device("cpu")))


def test_ops_are_timed_beside_what_comes_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "workloads", lambda device: [(OPS["gate"], OPS["gate"].cases[0])])
    (row,) = sections.ops(Device("cpu"))
    assert (row["op"], row["implementation"], row["other"]) == ("gate", "torch", "reference")
    assert row["forward_ms"] > 0 and row["other_full"] > 0 and row["options"].keys() == OPS["gate"].options.keys()
