"""Writes the figures and tables of a study into a folder, with the numbers behind them and where they come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archlab.dashboards.library import Study
from archlab.dashboards.paper.drawing import FORMS, Drawing, safe_name
from archlab.dashboards.paper.pictures import drawings
from archlab.search.reporting.report import report, to_plain

TABLES = {"md": "md", "tex": "latex", "csv": "csv", "json": "json"}


def write(study: Study, out: Path, width: float, command: str) -> list[Path]:
    """The files that were written: each figure as PDF, SVG and PNG with its rows as CSV, the tables, provenance.json.

    The same study gives the same bytes. Raises ValueError for a study whose results do not compare.
    """
    if study.comparison is None:
        raise ValueError(study.problem or f"the study {study.name} has nothing to draw")
    out.mkdir(parents=True, exist_ok=True)
    made = drawings(study)
    written = []
    for name, data in _contents(study, made, width):
        path = out / name
        path.write_bytes(data)
        written.append(path)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in written}
    told = provenance(study, command) | {"width_inches": width, "captions": {d.name: d.caption for d in made}}
    path = out / "provenance.json"
    path.write_text(json.dumps(told | {"sha256": digests}, indent=2, ensure_ascii=False) + "\n")
    return [*written, path]


def _contents(study: Study, made: list[Drawing], width: float) -> Iterator[tuple[str, bytes]]:
    assert study.comparison is not None
    for drawing in made:
        name = safe_name(drawing.name)
        yield f"{name}.csv", drawing.rows.to_csv(index=False).encode()
        yield from ((f"{name}.{form}", data) for form, data in drawing.files(width, FORMS).items())
    for ending, form in TABLES.items():
        yield f"table.{ending}", report(study.comparison, form).encode()


def provenance(study: Study, command: str) -> dict[str, Any]:
    """What the numbers were computed of: data, versions, method, the trials of the table, and the command."""
    assert study.comparison is not None
    plain = to_plain(study.comparison)
    said = {name: plain[name] for name in ("study", "question", "baseline", "provenance", "cost", "noise", "notes")}
    trials = [
        {key: row[key] for key in ("variant", "seed", "key", "reused")} for row in plain["trials"] if row["reported"]
    ]
    return {**said, "trials": trials, "command": command}
