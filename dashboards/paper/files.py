"""Writes the figures and tables of a study into a folder, with the numbers behind them and where they come from."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from archlab.dashboards.library import Study
from archlab.dashboards.paper.pictures import drawings
from archlab.search.formatting.frames import inert
from archlab.search.reporting.report import report, to_plain

TABLES = {"md": "md", "tex": "latex", "csv": "csv", "json": "json"}


def write(study: Study, out: Path, width: float, command: str) -> list[Path]:
    """The files that were written: each figure as PDF, SVG and PNG with its rows as CSV, the tables, provenance.json.

    The same study gives the same bytes. Raises ValueError for a study whose results do not compare.
    """
    if study.comparison is None:
        raise ValueError(study.problem or f"the study {study.name} has nothing to draw")
    out.mkdir(parents=True, exist_ok=True)
    made, contents = drawings(study), {}
    for drawing in made:
        name = re.sub(r"[^\w.-]+", "-", drawing.name).strip("-.") or "figure"
        contents[f"{name}.csv"] = drawing.rows.map(inert).to_csv(index=False).encode()
        contents |= {f"{name}.{form}": data for form, data in drawing.files(width).items()}
    contents |= {f"table.{ending}": report(study.comparison, form).encode() for ending, form in TABLES.items()}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    told = provenance(study, command) | {"width_inches": width, "captions": {d.name: d.caption for d in made}}
    facts = json.dumps(told | {"sha256": digests}, indent=2, ensure_ascii=False) + "\n"
    for name, data in (contents | {"provenance.json": facts.encode()}).items():
        (out / name).write_bytes(data)
    return [out / name for name in (*contents, "provenance.json")]


def provenance(study: Study, command: str) -> dict[str, Any]:
    """What the numbers were computed of: data, versions, method, the trials of the table, and the command."""
    assert study.comparison is not None
    plain = to_plain(study.comparison)
    said = {name: plain[name] for name in ("study", "question", "baseline", "provenance", "cost", "noise", "notes")}
    named = ("variant", "seed", "key", "reused")
    trials = [{name: row[name] for name in named} for row in plain["trials"] if row["reported"]]
    return {**said, "trials": trials, "command": command}
