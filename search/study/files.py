"""Study files: those of a folder, a new one, and the schema by which editors check them. Needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from archlab.search.utils.untrusted import open_regular

_MOST_BYTES = 1_000_000  # of a file, in which its study's name is looked for
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


def beside_store(file: Path, root: Path) -> str:
    """What a study's file is called from the folder of the store, whatever folder it is run in; one elsewhere stays."""
    at, home = Path(os.path.abspath(file)), Path(os.path.abspath(root)).parent
    return str(at.relative_to(home)) if at.is_relative_to(home) else str(file)


def from_here(told: str, root: Path) -> str:
    """What a file is called from the current folder, of which a record has what `beside_store` told."""
    at = Path(os.path.abspath(root)).parent / told
    return os.path.relpath(at) if at.is_file() else told


def studies_in(folder: Path, below: bool = False) -> dict[Path, str]:
    """The study files in a folder, with `below` also those in the folders in it, with the names of their studies. A
    file that can't be read is none."""
    own = sorted(folder.iterdir()) if below else []
    inside = [each for each in own if not each.name.startswith(".") and each.is_dir()]
    found = {}
    for path in (path for each in [folder, *inside] for path in sorted([*each.glob("*.yaml"), *each.glob("*.yml")])):
        try:
            with open_regular(path, follow=True) as file:
                text = file.read(_MOST_BYTES).decode(errors="replace")
        except OSError:
            continue
        named = re.search(r"^study: *[\"']?([\w-]+)", text, re.MULTILINE)
        if named:
            found[path.relative_to(folder)] = named[1]
    return found
