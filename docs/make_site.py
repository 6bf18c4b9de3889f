"""Builds the documentation as a site: `make site`, then open build/docs/site/index.html. Its search needs a server:
`python -m http.server --directory build/docs/site`.

The pages are read on GitHub too, where `../../studies/quickstart.yaml` leads to the file. They are copied to
build/docs/pages first, with the files that they link to under `files/`, links to folders as plain text, and the
notebook as a page. A link that leads nowhere ends the build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
NOTEBOOK = DOCS / "guides" / "python.ipynb"
ELSEWHERE = re.compile(r'\s*<script src="https?://[^>]*></script>')
"""What would be loaded from another machine: a shim with which the search works without a server."""
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")


def main() -> None:
    folder = ROOT / "build" / "docs"
    shutil.rmtree(folder, ignore_errors=True)
    print(build(folder) / "index.html")


def build(folder: Path) -> Path:
    """Builds the site in a folder, and returns where. Raises CalledProcessError where a link leads nowhere."""
    stage(folder / "pages")
    shutil.copy(DOCS / "zensical.toml", folder)
    subprocess.run([str(Path(sys.executable).with_name("zensical")), "build", "--strict"], cwd=folder, check=True)
    for page in (folder / "site").rglob("*.html"):
        page.write_text(ELSEWHERE.sub("", page.read_text()))
    return folder / "site"


def stage(folder: Path) -> None:
    """Writes all pages to a folder, and what they link to."""
    shutil.copytree(DOCS / "assets", folder / "assets")
    for page in sorted(DOCS.rglob("*.md")):
        write(folder, page.relative_to(DOCS), page.read_text())
    write(folder, NOTEBOOK.relative_to(DOCS).with_suffix(".md"), notebook_page(json.loads(NOTEBOOK.read_text())))


def write(folder: Path, name: Path, text: str) -> None:
    """Writes one page, and copies the files outside of the pages that it links to."""

    def moved(match: re.Match[str]) -> str:
        label, target, _ = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        file = Path(os.path.normpath((DOCS / name).parent / target))
        if file == NOTEBOOK:
            return f"{label}({Path(target).with_suffix('.md')})"
        if file.is_dir():
            return label.removeprefix("[").removesuffix("]")
        if file.suffix == ".md" and file.is_relative_to(DOCS):
            return match[0]
        shown = file.suffix in (".png", ".svg", ".json")
        copied = folder / "files" / f"{file.relative_to(ROOT)}{'' if shown else '.txt'}"
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copied)
        return f"{label}({os.path.relpath(copied, (folder / name).parent)})"

    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(LINK.sub(moved, text))


def notebook_page(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: its texts, its code, and what the code showed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if image := data.get("image/png"):
                parts.append(f'<img alt="figure" src="data:image/png;base64,{"".join(image).strip()}">')
            elif html := data.get("text/html"):
                parts.append("".join(html))
            elif text := data.get("text/plain", output.get("text")):
                parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
