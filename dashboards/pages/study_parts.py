"""The parts of a study's page that are words: question, verdict, notes, controls, and what each variant changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from dashboards import table, words
from dashboards.library import Study
from dashboards.parts import choice, progress_bar
from dashboards.view import METRICS, SMOOTHING, TRIALS, X_AXES, View
from search.render.blocks import Block, build_page
from search.render.search_blocks import search_blocks

CONTROLS = {"metric": "Show", "x": "Over", "smooth": "Smoothing", "trials": "Trials"}
"""What can be chosen of the curves: key of the address, label."""


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
        f"{len(record['seeds'])} seeds",
    ]
    return [
        html.Div(
            [dcc.Link("Studies", href="/"), html.Span("/", className="slash"), html.Span(study.name, className="here")],
            className="crumbs",
        ),
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
    page = build_page(study.comparison)
    found: list[Component] = [html.P(f"{table.legend(study.comparison)}.")]
    found += [html.P(line, className="method") for line in page.lines]
    if page.notes:
        found.append(html.Ul([html.Li(note) for note in page.notes]))
    found.append(html.P(page.provenance, className="provenance"))
    return found + [_searched(block) for block in search_blocks(study.comparison)]


def _searched(block: Block) -> Component:
    """A table of a search, as the report prints it."""
    header = html.Tr([html.Th(column.header) for column in block.columns])
    lines = zip(*(column.cells for column in block.columns), strict=True)
    body = [html.Tr([html.Td(html.B(cell.text) if cell.strong else cell.text) for cell in line]) for line in lines]
    return html.Table([html.Caption(block.title), html.Thead(header), html.Tbody(body)], className="searched")


def controls(view: View) -> Component:
    """What to draw, as rows of choices."""
    names = {
        "metric": {key: value[1] for key, value in METRICS.items()},
        "x": {key: value[0] for key, value in X_AXES.items()},
        "smooth": SMOOTHING,
        "trials": TRIALS,
    }
    return html.Div(
        [choice(f"curves-{key}", label, names[key], getattr(view, key)) for key, label in CONTROLS.items()],
        className="controls",
    )


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


def notice(text: str) -> Component:
    """A remark above the page."""
    return html.Div(text, className="notice", role="status")
