"""Studies as a folder of pages that any web server, or none, can show: a page each, their files, and a list of all."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from archlab.dashboards.library import Study
from archlab.dashboards.paper.drawing import WIDTHS
from archlab.dashboards.paper.files import write
from archlab.dashboards.paper.page import GENERATOR, document, page
from archlab.dashboards.words import command_elsewhere
from archlab.search.reporting.findings import findings

ABOUT = "about.json"  # of a study's folder: what the list says of it


_BACK = '<p class=small><a href="../index.html">All studies</a></p>'


class NotOurs(ValueError):
    """The folder holds a page that is not of archlab."""


def publish(studies: Sequence[tuple[Study, str]], out: Path, title: str) -> list[Path]:
    """Writes `STUDY/index.html` and its files for each, and `index.html` with all that the folder holds by then.

    studies: each with its YAML. What other calls have published stays and stays listed. Returns the pages. Raises
    NotOurs for a folder whose index.html is another's, ValueError where results do not compare.
    """
    _claim(out)
    pages = []
    for study, text in studies:
        folder, command = out / study.name, command_elsewhere(study)
        _claim(folder)
        files = write(study, folder / "files", WIDTHS[0], command)
        (folder / "study.yaml").write_text(text)
        named = ["study.yaml", *(f"files/{file.name}" for file in files)]
        links = "".join(f'<li><a href="{quote(name)}">{escape(Path(name).name)}</a></li>' for name in named)
        more = f"<details><summary>Files</summary><ul class=files>{links}</ul></details>{_BACK}"
        (folder / "index.html").write_text(page(study, command, more))
        (folder / ABOUT).write_text(json.dumps(_about(study), ensure_ascii=False, indent=1) + "\n")
        pages.append(folder / "index.html")
    told = [json.loads(file.read_text()) for file in sorted(out.glob(f"*/{ABOUT}"))]
    told.sort(key=lambda about: about["updated"], reverse=True)
    (out / "index.html").write_text(document(title, "\n".join(_list(title, told))))
    return [*pages, out / "index.html"]


def _claim(folder: Path) -> None:
    """Makes a folder of ours. Raises NotOurs where it has a page of somebody else's."""
    index = folder / "index.html"
    if index.exists() and GENERATOR not in index.read_text(errors="replace")[:2000]:
        raise NotOurs(f"{index} is not a page of archlab: name another folder")
    folder.mkdir(parents=True, exist_ok=True)


def _about(study: Study) -> dict[str, Any]:
    assert study.comparison is not None
    return {
        "study": study.name,
        "question": study.comparison.question,
        "updated": study.updated,
        "variants": len(study.variants),
        "trials": study.done,
        "findings": [list(pair) for pair in findings(study.comparison)],
    }


def _list(title: str, told: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    for about in told:
        name, day = about["study"], time.strftime("%Y-%m-%d", time.gmtime(about["updated"]))
        said = "".join(
            f'<li class="{escape(kind.replace(" ", "-"))}">{escape(text)}</li>' for kind, text in about["findings"]
        )
        link = f'<a href="{quote(name)}/index.html">{escape(about["question"] or name)}</a>'
        yield f"<section class=study><h2>{link}</h2>"
        yield f"<p class=muted>{escape(name)} · {about['variants']} variants · {about['trials']} trials · {day}</p>"
        yield f"<ul class=verdicts>{said}</ul></section>"
