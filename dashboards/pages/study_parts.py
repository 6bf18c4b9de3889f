"""The parts of a study's page that are words: question, verdict, notes, controls, and what each variant changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dash import html
from dash.development.base_component import Component

from archlab.dashboards import table, words
from archlab.dashboards.library import Study
from archlab.dashboards.optuna_mount import pages_of
from archlab.dashboards.pages.curves import NAMES
from archlab.dashboards.pages.run import tracker
from archlab.dashboards.pages.table import legend_notes
from archlab.dashboards.parts import block_table, choice, progress_bar
from archlab.dashboards.view import View
from archlab.search.reporting.main_table import table_page
from archlab.search.reporting.shape import Shape
from archlab.search.results.told import sections_of

CONTROLS = ("metric", "x", "smooth", "trials")
"""What can be chosen of the curves here, by its key in the address."""


def head(study: Study) -> list[Component]:
    """Question, verdict and progress."""
    kind, sentence = words.activity(study)
    said: list[Component] = []
    if study.problem is not None:
        said = [html.P(study.problem, className="problem")]
    elif study.comparison is not None:
        said = [
            html.Li([html.Span(className=f"verdict-mark mark-{kind.replace(' ', '-')}"), html.Span(text)])
            for kind, text in words.verdicts(study.comparison)
        ]
    data, record = study.record["data"], study.record
    facts = [
        f"{record['tokens']:,} tokens per trial",
        f"context {record['context']}",
        f"{data['source']}, {data['tokenizer']}",
        f"{len(record['seeds'])} seed{'s' if len(record['seeds']) > 1 else ''}",
    ]
    return [
        html.H1(record.get("question") or study.name, className="question"),
        html.Ul(said, className="verdicts"),
        html.Div(
            [
                progress_bar(study),
                html.Div(
                    [
                        html.Span(
                            [
                                html.Span(className=f"dot dot-{kind}"),
                                words.progress(study),
                                html.Span(f" · {sentence}", className="muted"),
                            ]
                        ),
                        html.Span(" · ".join(facts), className="muted"),
                    ],
                    className="status-line",
                ),
            ],
            className="status",
        ),
    ]


def notes(study: Study) -> list[Component]:
    """How the numbers were made, what could have been resolved, and what a reader must know."""
    if study.comparison is None:
        return []
    blocks = [b for told in sections_of(study.comparison) if not told.paged for b in told.blocks(study.comparison)]
    return [*legend_notes(table_page(study.comparison, Shape())), *map(block_table, blocks)]


def controls(view: View) -> Component:
    """What to draw, as rows of choices."""
    shown = [choice(f"curves-{key}", *NAMES[key], getattr(view, key)) for key in CONTROLS]
    return html.Div(shown, className="controls")


def variants(study: Study, colours: Mapping[str, str]) -> Component:
    """What each variant changes in the base, as a diff."""
    rows = []
    for variant in study.record["variants"]:
        solved = variant.get("matched") or {}
        changes = [_change(*change) for change in variant.get("changes") or [] if change[0] not in solved]
        matched = [
            html.Div([html.Code(path), f" set to {value} to match"], className="matched")
            for path, value in solved.items()
        ]
        colour = table.swatch(variant["name"], study.record["baseline"], colours)
        name = html.Div(
            [html.Span(className="swatch", style={"background": colour}), variant["name"]],
            className="variant-name",
        )
        body = [*changes, *matched] or [html.Span("the base, unchanged", className="muted")]
        rows.append(html.Div([name, html.Div(body, className="changes")], className="variant"))
    return html.Div(rows, className="variants")


def _change(path: str, before: Any, after: Any) -> Component:
    return html.Div(
        [
            html.Code(path, className="path"),
            html.Del(str(before)),
            html.Span("→", className="arrow"),
            html.Ins(str(after)),
        ],
        className="change",
    )


def elsewhere(root: Path, name: str) -> list[Any]:
    """Where other programs show the study: Optuna's pages, and MLflow."""
    links = [html.A(title, href=href, target="_blank") for title, href in pages_of(root, name).items()]
    optuna = ["Optuna: ", *(part for link in links for part in (link, " · "))] if links else []
    return [*optuna, *tracker(root)]
