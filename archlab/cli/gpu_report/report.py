"""Runs the parts of the report one after another, and writes what they found as JSON and as Markdown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from archlab.cli.gpu_report.page import page
from archlab.cli.gpu_report.sections import SECTIONS, Row, Section
from archlab.cli.gpu_report.shortfalls import shortfalls, verdicts_of
from archlab.kernels import launch, verdicts
from archlab.search.utils.children import python_path

CHILD = "archlab.cli.gpu_report.sections"
ENDING_S = 30  # that a study is given to end in
SAID = 2000  # characters of what a part that failed said last


def written(
    folder: Path, tell: Callable[[str], object], parts: Mapping[str, Section] = SECTIONS
) -> tuple[Path, list[str]]:
    """Measures this card. Returns the Markdown file, beside which is the JSON, and what fell short.

    What was wrong or slow is written for the card, so that it is not used; what an earlier report held against it is
    forgotten first, as it is measured again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    card = launch.card() or "cpu"
    kept = launch.verdicts_of(card)
    kept.unlink(missing_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        tell(f"{part.title} …")
        found[name] = measured(name, part)
        tell(f"  {len(found[name]['rows'])} rows in {found[name]['seconds']:.0f} s{_ended(found[name])}")
        if off := verdicts_of(found):  # at once: the parts that follow do without
            verdicts.write(kept, off)
    short, titles = shortfalls(found), {name: part.title for name, part in parts.items()}
    off_file = str(kept) if kept.exists() else None
    file = folder / f"gpu-report-{card}.md"
    whole = {"fell_short": short, "off": off_file, "parts": found}
    file.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    file.write_text(page(found, titles, short, off_file))
    return file, short


def measured(name: str, part: Section, program: Sequence[str] = ("-m", CHILD)) -> dict[str, Any]:
    """A part's rows, how long it took, and how it ended: `exit` is None where it was ended at its limit."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as rows, tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, *program, name, str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": python_path()}
        process = subprocess.Popen(command, stdout=rows, stderr=said, env=environment, start_new_session=True)
        try:
            code: int | None = process.wait(60 * part.minutes)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        rows.seek(0)
        said.seek(0)
        found: list[Row] = [json.loads(line) for line in rows if line.startswith("{") and line.endswith("}\n")]
        last = said.read()[-SAID:]
    ended: dict[str, Any] = {"rows": found, "seconds": round(time.monotonic() - begun, 1), "exit": code}
    return ended | ({"said": last} if code else {})


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a part with all that it started; a study is given the time to end as by Ctrl-C."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for _ in range(ENDING_S * 10):
            process.poll()
            try:
                os.killpg(process.pid, sign)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def _ended(found: Mapping[str, Any]) -> str:
    if found["exit"] is None:
        return ", ended at its limit"
    return f", failed: {found['said'].strip().splitlines()[-1:]}" if found["exit"] else ""
