"""Study files: those of a folder, a new one, and the schema by which editors check them. Needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

TEMPLATE = Path(__file__).with_name("template.yaml")


def schema_file() -> Path:
    """The JSON Schema of studies, beside the installed package or in the checkout."""
    package = Path(__file__).parents[2]
    installed = package / "study.schema.json"
    return installed if installed.exists() else package.parent / "docs" / "study.schema.json"


def new_study(path: Path) -> str:
    """The text of a commented study to start from, which is called like its file."""
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:63].rstrip("-") or "my-study"
    schema = os.path.relpath(schema_file(), path.parent)
    return TEMPLATE.read_text().replace("=study.schema.json", f"={schema}", 1).replace("my-study", name, 1)


def studies_in(folder: Path, below: bool = False) -> dict[Path, str]:
    """The study files in a folder, with `below` also those in the folders in it, with the names of their studies. A
    file that can't be read is none."""
    inside = [each for each in sorted(folder.iterdir()) if below and not each.name.startswith(".") and each.is_dir()]
    found = {}
    for path in (path for each in [folder, *inside] for path in sorted([*each.glob("*.yaml"), *each.glob("*.yml")])):
        try:
            named = re.search(r"^study: *[\"']?([\w-]+)", path.read_text(), re.MULTILINE)
        except (OSError, UnicodeDecodeError):
            continue
        if named:
            found[path.relative_to(folder)] = named[1]
    return found
