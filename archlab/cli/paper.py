"""The verbs of what goes into a paper: the report of a study, and its figures with the numbers behind them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from archlab.cli import completion
from archlab.cli.kit import INVALID, JSON, STORE, STUDY_OR_NAME, fail, store_folder, study_name, verb

if TYPE_CHECKING:
    from archlab.search.results.comparison import Comparison
    from archlab.search.store.store import Store


@click.command()
@STUDY_OR_NAME
@STORE
@click.option("--format", "format_", default="text", metavar="FORMAT", help="text, md, csv, latex or json.")
@click.option("--html", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write a page instead.")
@click.option(
    "--against", metavar="VARIANT", shell_complete=completion.variants, help="Compare with this one, not the baseline."
)
@click.option("--where", metavar="FILTER", help="Which rows of the table: 'verdict=better lr>=0.002'.")
@click.option("--error", metavar="KIND", help="Behind ±: std (usual), se or interval.")
@click.option(
    "--rates", is_flag=True, help="With the losses at the tuned values (text, latex; other formats have them)."
)
@click.option("--columns", metavar="A,B,C", help="The columns of the table: perplexity,delta,memory.")
@JSON
@verb
def report(
    study: str,
    store: str | None,
    format_: str,
    html: Path | None,
    against: str | None,
    where: str | None,
    error: str | None,
    rates: bool,
    columns: str | None,
    as_json: bool,
) -> None:
    """Print the table of a study: means, paired differences with intervals, and what they say.

    With --where, --error or --columns it is the table alone, in that shape; the filter is that of the dashboard. With
    --html FILE a page holds the table with figures, diagrams, method and provenance, and opens without a network.
    """
    from archlab.arch_dsl.language.include import whole_text
    from archlab.search.comparison.compare import load_comparison
    from archlab.search.reporting.report import FORMATS
    from archlab.search.reporting.report import report as render
    from archlab.search.store.store import Store

    if format_ not in FORMATS:
        raise click.BadParameter(f"'{format_}' is not one of {', '.join(FORMATS)}", param_hint="--format")
    if html and (as_json or format_ != "text"):
        raise click.UsageError("--html is a form of its own: it goes with neither --json nor --format")
    form = "json" if as_json else format_
    asked = None if where is None and error is None and columns is None else (where or "", error or "", columns or "")
    if html and against:
        raise click.UsageError("--html compares with the study's baseline: it goes without --against")
    if html and asked:
        raise click.UsageError("--html holds the whole report: it goes with none of --where, --error, --columns")
    if rates and (asked or html or form not in ("text", "latex")):
        raise click.UsageError(
            "--rates is for the whole report as text or latex; md, csv, json and --html have the rates"
        )
    if form in ("csv", "json") and (error is not None or columns is not None):
        raise click.UsageError(f"{form} has every column with exact numbers: it goes with --where alone")
    with Store.open(store_folder(store), create=False) as opened:
        name = study_name(study)
        changed = Path(study).is_file() and whole_text(study) != opened.study_yaml(name)
        pairs = _asked_contrasts(Path(study), opened, name) if changed else None
        text = "" if html else _rendered(render, load_comparison(opened, name, against, pairs), form, asked, rates)
        if changed and pairs is None:
            click.echo(f"{study} has changed since it was run; this is the table of what was run", err=True)
    if html:
        write_page(study, store, html)
        text = f"the report of {name} is in {html}"
    click.echo(text, nl=not text.endswith("\n"))


def _asked_contrasts(file: Path, store: Store, name: str) -> list[list[str]] | None:
    """The contrasts that a study's file asks for now, if these are all that has changed in it since it was run. Raises
    SpecError for a variant that there is not."""
    from archlab.arch_dsl.language.errors import SpecError
    from archlab.arch_dsl.language.include import INCLUDE, read_whole
    from archlab.arch_dsl.language.parse import parse
    from archlab.arch_dsl.language.source import Node, read_text
    from archlab.search.sections.contrasts.spec import Contrasts

    now, before = read_whole(file), read_text(store.study_yaml(name))
    told, other = now.plain(), before.plain()
    told.pop(INCLUDE, None)
    for each in (told, other):
        (each.get("report") or {}).pop("contrasts", None)
        if not each.get("report"):
            each.pop("report", None)
    if told != other:
        return None
    report = now.value["report"] if isinstance(now.value, dict) and "report" in now.value else Node({})
    asked = report.value.get("contrasts") if isinstance(report.value, dict) else None
    found = parse(Contrasts, asked if asked is not None else Node([]))
    names = [variant["name"] for variant in store.study(name)["variants"]]
    if wrong := [*found.unknown([*dict.fromkeys(each.partition(" [")[0] for each in names), *names])]:
        raise SpecError(wrong)
    return [list(pair) for pair in found.pairs]


def _rendered(
    render: Callable[..., str], comparison: Comparison, form: str, asked: tuple[str, str, str] | None, rates: bool
) -> str:
    """The report, or in the shape that (filter, error, columns) ask for the table; what says nothing ends the verb."""
    from archlab.search.formatting.filters import BadFilter
    from archlab.search.reporting.main_table import column_names
    from archlab.search.reporting.shape import read_shape

    if asked is None:
        return render(comparison, form, rates=rates)
    where, error, columns = asked
    shape, wrong = read_shape(column_names(comparison), error, columns, where)
    if wrong:
        fail("\n".join(wrong), INVALID)
    try:
        return render(comparison, form, shape)
    except BadFilter as problem:
        fail(f"--where: {problem}", INVALID)


@click.command()
@STUDY_OR_NAME
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
    from archlab.dashboards.paper.files import write

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


@click.command()
@click.argument("studies", nargs=-1, metavar="[STUDY]...", shell_complete=completion.studies)
@click.option(
    "-o", "--out", default="site", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path), help="site"
)
@click.option("--title", default="Studies", metavar="TEXT", show_default=True, help="Above the list of studies.")
@STORE
@JSON
@verb
def publish(studies: tuple[str, ...], out: Path, title: str, store: str | None, as_json: bool) -> None:
    """Write a folder of web pages of one study, of several, or of all that have results; it needs no server.

    Each has a page with its table, figures, diagrams and provenance, and the files behind them. index.html lists the
    studies of the folder, those that were published before too.
    """
    from archlab.dashboards.library import Library
    from archlab.dashboards.paper.site import NotOurs
    from archlab.dashboards.paper.site import publish as write
    from archlab.search.store.store import Store

    with Store.open(store_folder(store), create=False) as opened:
        names = [*map(study_name, studies)] or [each["name"] for each in opened.studies()]
        texts = {name: opened.study_yaml(name) for name in names}
    found = [Library(store_folder(store)).study(name) for name in names]
    for each in found:
        if each.comparison is None:
            click.echo(f"{each.name} is left out: {each.problem or 'it has no results'}", err=True)
    shown = [each for each in found if each.comparison is not None]
    if not shown:
        fail("no study has results to publish", INVALID)
    try:
        pages = write([(each, texts[each.name]) for each in shown], out, title)
    except NotOurs as error:
        fail(str(error), INVALID)
    if as_json:
        click.echo(json.dumps({"folder": str(out), "pages": [str(page) for page in pages]}))
    else:
        click.echo(f"{len(shown)} {'study is' if len(shown) == 1 else 'studies are'} in {out}: open {out}/index.html")


def write_page(study: str, store: str | None, file: Path) -> None:
    """Writes a study as one page of HTML."""
    from archlab.dashboards import words
    from archlab.dashboards.paper.page import page

    found = _stored(study, store)
    file.write_text(page(found, words.command_elsewhere(found)))


def _stored(study: str, store: str | None) -> Any:
    """A study as the dashboard sees it, whose results compare."""
    from archlab.dashboards.library import Library
    from archlab.search.store.store import Store

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


VERBS = (report, figures, publish)
