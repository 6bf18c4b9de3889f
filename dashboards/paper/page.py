"""A study as one page that needs nothing else: its verdicts, tables, figures, diagrams, method and provenance."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import chain
from pathlib import Path

from archlab.dashboards import words
from archlab.dashboards.library import Study
from archlab.dashboards.paper.inline import inline
from archlab.dashboards.paper.pictures import drawings
from archlab.search.formatting.tables import IDENTITIES, Block, Page
from archlab.search.reporting.findings import findings
from archlab.search.reporting.report import ALL, build_page
from archlab.search.results.comparison import Comparison
from archlab.search.sections.published.told import ToldOfPublished

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing; the browser holds it to that from wherever it is opened."""
GENERATOR = '<meta name="generator" content="archlab">'
_STYLE = Path(__file__).with_name("page.css")


def page(study: Study, command: str, more: str = "") -> str:
    """The HTML of a study; `command` goes on with it, and `more` HTML ends it. Raises ValueError where the results do
    not compare."""
    found = study.comparison
    if found is None:
        raise ValueError(study.problem or f"the study {study.name} has nothing to show")
    told = build_page(found)
    parts = (_head(study, found), _tables(found, told), _figures(study), _models(study), _foot(told, command))
    return document(study.name, "\n".join([*chain.from_iterable(parts), *([more] if more else [])]))


def document(title: str, body: str) -> str:
    """A page of HTML that loads nothing."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        f'<meta name="viewport" content="width=device-width">{GENERATOR}<title>{escape(title)}</title>'
        f'<style>{_STYLE.read_text()}</style></head>\n<body class="report">\n{body}\n</body></html>\n'
    )


def _head(study: Study, found: Comparison) -> Iterator[str]:
    yield f"<p class=name>{escape(study.name)}</p><h1>{escape(found.question or study.name)}</h1>"
    said = "".join(
        f'<li class="{escape(kind.replace(" ", "-"))}">{escape(text)}</li>' for kind, text in findings(found)
    )
    yield f"<ul class=verdicts>{said}</ul><p class=muted>{escape(words.progress(study))}</p>"


def _tables(found: Comparison, told: Page) -> Iterator[str]:
    """The table, what must be known to read it, and the other tables."""
    first, *others = told.blocks
    yield f"<h2>Results</h2>{_table(first)}"
    yield "".join(f"<p class=small>{escape(line)}</p>" for line in told.lines)
    if told.notes:
        yield f"<ul class=notes>{''.join(f'<li>{escape(note)}</li>' for note in told.notes)}</ul>"
    if published := [*ToldOfPublished().blocks(found)]:
        shown = "".join(f"<h3>{escape(block.title)}</h3>{_table(block)}" for block in published)
        yield f"<section class=published><h2>Published</h2>{shown}</section>"
    heading = next((place for place, block in enumerate(others) if block.title == ALL), 0)
    for place, block in enumerate(others):
        if block not in published:
            shut = "" if place >= heading else " open"
            yield f"<details{shut}><summary>{escape(block.title)}</summary>{_table(block)}</details>"


def _table(block: Block) -> str:
    """A table with its legend."""
    heads = "".join(f"<th class={column.align}>{escape(column.header)}</th>" for column in block.columns)
    rows = ""
    for line in zip(*(column.cells for column in block.columns), strict=True):
        cells = (
            (escape(cell.text), cell.strong, column.align) for cell, column in zip(line, block.columns, strict=True)
        )
        shown = (f"<td class={align}>{f'<b>{text}</b>' if strong else text}</td>" for text, strong, align in cells)
        rows += f"<tr>{''.join(shown)}</tr>"
    legend = f"<p class=small>{escape(block.legend.replace('* ', 'bold: '))}</p>" if block.legend else ""
    return f"<div class=wide><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{legend}"


def _figures(study: Study) -> Iterator[str]:
    yield "<h2>Figures</h2>"
    for number, drawing in enumerate(drawings(study), 1):
        yield drawing.html(f"f{number}", f"Figure {number}. ")


def _models(study: Study) -> Iterator[str]:
    """Each variant beside its baseline, as a drawing, or as text where nothing draws it."""
    from archlab.arch_dsl.inspection.dot import NoDot, dot
    from archlab.arch_dsl.language.errors import SpecError
    from archlab.search.models.graphs import as_text, drawing, graph_of

    yield "<h2>Architecture</h2>"
    yield "<p class=small>Amber is other than in the baseline, green is new, red and dashed is gone.</p>"
    for number, variant in enumerate(study.record["variants"], 1):
        name = variant["name"]
        base = variant.get("baseline") or study.record["baseline"]
        try:
            found = graph_of(study.record, name, None if base == name else base)
            shown = f"<figure class=model>{inline(drawing(dot(found)), f'm{number}')}</figure>"
        except SpecError as error:
            shown = f"<p class=small>It can't be drawn here: {escape(str(error)[:300])}</p>"
        except NoDot:
            shown = f"<pre>{escape(as_text(found))}</pre>"
        yield f"<details{' open' if number == 1 else ''}><summary>{escape(name)}</summary>{shown}</details>"


def _foot(told: Page, command: str) -> Iterator[str]:
    yield f"<h2>Provenance</h2><p class=small>{escape(told.provenance)}</p>"
    if told.identities:
        rows = "".join(f"<li>{escape(name)}: {hashes}</li>" for name, hashes in told.identities)
        yield f"<details class=small><summary>{escape(IDENTITIES)}</summary><ul>{rows}</ul></details>"
    yield f"<p class=small>To go on with it: <code>{escape(command)}</code></p>"
