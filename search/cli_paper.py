"""The verb of what goes into a paper: figures, with the tables and numbers behind them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from search.cli_kit import INVALID, JSON, STORE, fail, store_folder, study_name, verb


@click.command()
@click.argument("study")
@click.option("-o", "--out", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path), help="STUDY-figures.")
@click.option("--width", default="3.25", show_default=True, metavar="INCHES", help="3.25 a column, 6.75 a page.")
@STORE
@JSON
@verb
def figures(study: str, out: Path | None, width: str, store: str | None, as_json: bool) -> None:
    """Write the figures and tables of a study for a paper, with the numbers behind them.

    Each figure is a PDF, an SVG and a PNG beside a CSV of its numbers; the tables are table.tex, .md, .csv and .json;
    provenance.json says which trials, data and versions they come from. The same study gives the same files.
    """
    from dashboards.paper.files import write

    inches = _inches(width)
    found = _stored(study, store)
    folder = out or Path(f"{found.name}-figures")
    words = ["archlab", "figures", study, "--width", width, *(["--store", store] if store else [])]
    written = write(found, folder, inches, shlex.join(words))
    drawn = sorted({path.stem for path in written if path.suffix == ".pdf"})
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "figures": drawn, "files": [path.name for path in written]}))
        return
    named = f": {', '.join(drawn)}" if drawn else ""
    click.echo(f"{len(drawn)} figures, the tables and provenance.json are in {folder}{named}")


def write_page(study: str, store: str | None, file: Path) -> None:
    """Writes a study as one page of HTML."""
    from dashboards import words
    from dashboards.paper.page import page

    found, root = _stored(study, store), store_folder(store).absolute()
    file.write_text(page(found, words.command(found, root.name == ".archlab", str(root))))


def _stored(study: str, store: str | None) -> Any:
    """A study as the dashboard sees it, whose results compare."""
    from dashboards.library import Library
    from search.store import Store

    root, name = store_folder(store), study_name(study)
    with Store.open(root, create=False) as opened:
        opened.study(name)  # or says which there are
    found = Library(root).study(name)
    if found.comparison is None:
        fail(found.problem or f"the results of {name} can't be compared", INVALID)
    return found


def _inches(text: str) -> float:
    """A width that a page can have."""
    try:
        inches = float(text)
    except ValueError:
        inches = 0.0
    if not 1.0 <= inches <= 20.0:
        raise click.BadParameter(f"'{text}' is no width between 1 and 20 inches (3.25, 6.75)", param_hint="--width")
    return inches


VERBS = (figures,)
