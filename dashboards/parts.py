"""The pieces of a page: frame, cards, progress, figures, and what is shown when something is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import dash_mantine_components as dmc
import flask
from dash import dcc, html
from dash.development.base_component import Component

from dashboards.figures import GRAPH_CONFIG, Figure
from dashboards.library import STATES, Library, NotFound, Study
from dashboards.words import STATE_WORDS
from search.store import StoreError

log = logging.getLogger("archlab.dashboard")


def _shown(store: Path) -> str:
    """A folder as it is called from here, where it is below; else whole."""
    here = Path.cwd()
    return str(store.relative_to(here)) if store.is_relative_to(here) else str(store)


def frame(content: Component, store: Path) -> Component:
    """Header, content, theme: around every page."""
    moon, sun = html.Span("☾", className="scheme-icon"), html.Span("☀", className="scheme-icon")
    header = html.Header(
        html.Div(
            [
                dcc.Link([html.Span(className="mark"), "archlab"], href="/", className="brand"),
                html.Div(
                    [
                        html.Span(_shown(store), className="store-path", title=f"The store that is shown: {store}"),
                        dmc.ColorSchemeToggle(
                            lightIcon=sun,
                            darkIcon=moon,
                            variant="subtle",
                            color="gray",
                            **{"aria-label": "light or dark"},
                        ),
                    ],
                    className="header-right",
                ),
            ],
            className="header-inner",
        ),
        className="header",
    )
    return html.Div([header, html.Main(content, className="page")])


def graph(name: str, figure: Figure, height: int) -> dcc.Graph:
    """Every figure of the dashboard is made here: local, no logo, nothing that sends data away."""
    return dcc.Graph(id=name, figure=figure, config=GRAPH_CONFIG, style={"height": f"{height}px"}, className="figure")


def section(title: str, *children: Any, aside: Any = None, id: str | None = None) -> Component:
    """A titled part of a page; `aside` stands at the right of the title."""
    head = html.Div(
        [html.H2(title), html.Div(aside, className="aside") if aside is not None else None], className="section-head"
    )
    extra = {} if id is None else {"id": id}
    return html.Section([head, *children], className="section", **extra)


def badge(text: str) -> Component:
    """A verdict in its colour."""
    return html.Span(text, className=f"badge badge-{text.replace(' ', '-')}")


def progress_bar(study: Study) -> Component:
    """One segment per state, as wide as its share of the trials; the rest is still to come."""
    total = max(study.expected, 1)
    segments = [
        html.Span(
            className=f"segment segment-{state}",
            style={"width": f"{100 * count / total:.2f}%"},
            title=f"{count} {STATE_WORDS[state]}",
        )
        for state, count in study.counts.items()
        if state != "planned"
    ]
    assert all(state in STATES for state in study.counts)
    return html.Div(segments, className="progress", role="img", **{"aria-label": "progress"})


def command_line(text: str) -> Component:
    """A command with a button that copies it."""
    button = dmc.CopyButton("Copy", value=text, copiedChildren="Copied", size="compact-xs", variant="default")
    return html.Div([html.Code(["$ ", text]), button], className="command")


def card(title: str, *children: Any, kind: str = "plain") -> Component:
    """A message in the middle of a page."""
    return html.Div([html.H1(title), *children], className=f"card card-{kind}", role="status")


def store_card(error: StoreError, root: Path) -> Component:
    """What to do about a store that can't be read: a friendly beginning where there is none yet."""
    if not (root / "store.json").exists() and not (root / "trials.db").exists():
        return empty_card(root)
    return card(
        "This store can't be read",
        html.P(str(error)),
        html.P("This page looks again by itself. A check of the machine and the store:", className="muted"),
        command_line(f"archlab doctor --store {root}"),
        kind="error",
    )


def empty_card(root: Path) -> Component:
    """The first thing that a new user sees."""
    return card(
        "No studies yet",
        html.P(
            [
                "A study appears here with its first trial, and fills in while it trains. The store is ",
                html.Code(str(root)),
                ".",
            ]
        ),
        html.P("Run the study that comes with archlab:", className="muted"),
        command_line("archlab run studies/quickstart.yaml"),
        html.P("or write one of your own, from a commented template:", className="muted"),
        command_line("archlab init my_study.yaml"),
        kind="empty",
    )


def not_found_card(error: NotFound) -> Component:
    """For an address with a study that does not exist: those that do."""
    links = [html.Li(dcc.Link(name, href=f"/study/{name}")) for name in error.known[:12]]
    return card(
        "No such study",
        html.P(["There is no study ", html.Code(error.name[:80]), " in this store."]),
        html.P("There are:" if links else "There are none yet.", className="muted"),
        html.Ul(links, className="links"),
        dcc.Link("All studies", href="/", className="button"),
        kind="missing",
    )


def guarded(layout: Callable[..., Component]) -> Callable[..., Component]:
    """A layout, given the library of the app that serves it, that always gives a page.

    What goes wrong becomes a card that says what to do. The library is looked up per request because Dash keeps one
    register of pages for all apps of a process.
    """

    @wraps(layout)
    def safe(**query: Any) -> Component:
        library: Library = flask.current_app.config["LIBRARY"]
        try:
            return layout(library, **query)
        except NotFound as error:
            return not_found_card(error)
        except StoreError as error:
            return html.Div([store_card(error, library.root), dcc.Interval(id="retry", interval=3000)])
        except Exception as error:
            return failure_card(error)

    return safe


def failure_card(error: Exception) -> Component:
    """For what nobody foresaw; the traceback goes to the terminal that serves the page."""
    log.exception("a page failed")
    return card(
        "This page failed",
        html.P([html.Code(f"{type(error).__name__}: {error}"[:500])]),
        html.P("The terminal that runs the dashboard shows where. The other pages still work.", className="muted"),
        dcc.Link("All studies", href="/", className="button"),
        kind="error",
    )


def choice(name: str, label: str, options: Mapping[str, str], value: str) -> Component:
    """A row of named choices; `name` is its id."""
    data = [{"value": key, "label": text} for key, text in options.items()]
    control = dmc.SegmentedControl(id=name, data=data, value=value, size="xs", radius="sm")
    return html.Div([html.Span(label, className="control-label"), control], className="control")
