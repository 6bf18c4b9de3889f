"""The pieces of a page: frame, cards, progress, figures, and what is shown when something is wrong."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import dash_mantine_components as dmc
import flask
from dash import dcc, html
from dash.development.base_component import Component

from archlab.dashboards.figures import GRAPH_CONFIG
from archlab.dashboards.launch import Started
from archlab.dashboards.library import Library, NotFound, Study
from archlab.dashboards.marks import Figure
from archlab.dashboards.words import STATE_WORDS, marked, shown
from archlab.search.formatting.tables import Block
from archlab.search.store.store import StoreError

log = logging.getLogger("archlab.dashboard")
READ_ONLY = "READ_ONLY"
"""Of a server's settings: whether its pages change nothing."""
_ROOM = 60  # characters of the choices of a control that stand in a row


def frame(content: Component, store: Path) -> Component:
    """Header, content, theme: around every page. The folder of the store is called as it is from here."""
    icons = {name: html.Span(sign, className="scheme-icon") for name, sign in (("lightIcon", "☀"), ("darkIcon", "☾"))}
    look = {"variant": "subtle", "color": "gray", "aria-label": "light or dark"}
    folder = store.relative_to(Path.cwd()) if store.is_relative_to(Path.cwd()) else store
    path = html.Span(str(folder), className="store-path", title=f"The store that is shown: {store}")
    right = html.Div([path, dmc.ColorSchemeToggle(**icons, **look)], className="header-right")
    brand = dcc.Link([html.Span(className="mark"), "archlab"], href="/", className="brand")
    header = html.Header(html.Div([brand, right], className="header-inner"), className="header")
    return html.Div([header, html.Main(content, className="page")])


def graph(name: str, figure: Figure, height: int) -> dcc.Graph:
    """Every figure of the dashboard is made here: local, no logo, nothing that sends data away."""
    return dcc.Graph(id=name, figure=figure, config=GRAPH_CONFIG, style={"height": f"{height}px"}, className="figure")


def section(title: str, *children: Any, aside: Any = None, id: str | None = None) -> Component:
    """A titled part of a page; `aside` stands at the right of the title."""
    beside = None if aside is None else html.Div(aside, className="aside")
    head = html.Div([html.H2(title), beside], className="section-head")
    return html.Section([head, *children], className="section", **({} if id is None else {"id": id}))


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
        command_line(shlex.join(["archlab", "doctor", "--store", str(root)])),
        kind="error",
    )


def empty_card(root: Path) -> Component:
    """The first thing that a new user sees."""
    said = "A study appears here with its first trial, and fills in while it trains. The store is "
    return card(
        "No studies yet",
        html.P([said, html.Code(str(root)), "."]),
        html.P([dcc.Link("Write one here", href="/write"), ", from a commented template, and run it by a click. Or:"]),
        command_line("archlab init my_study.yaml"),
        command_line("archlab run my_study.yaml"),
        kind="empty",
    )


def not_found_card(error: NotFound, started: Started | None = None) -> Component:
    """For an address with a study that does not exist: those that do. One that was `started` here is waited for, or it
    is told why it ended."""
    if started is not None and started.code is None:
        wait = dcc.Interval(id="retry", interval=2000)
        return card("It begins", html.P([html.Code(error.name), " is being planned; this page shows it then."]), wait)
    if started is not None:
        said = html.P([html.Code(error.name), f" has no trial: its run ended with code {started.code}."])
        return card("It did not begin", said, html.Pre(started.last_lines(), className="log"), kind="error")
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
        begun = flask.current_app.config["ACTIONS"].launcher.of(str(query.get("name", "")))
        try:
            return layout(library, **query)
        except NotFound as error:
            return not_found_card(error, begun)
        except StoreError as error:
            if begun is not None and not (library.root / "store.json").exists():  # which it makes
                return not_found_card(NotFound(str(query["name"]), []), begun)
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


def choice(name: str | dict[str, str], label: str, options: Mapping[str, str], value: str) -> Component:
    """Named choices in a row, or in a list where they are too long for one, or without any a text; `name` is its id."""
    data = [{"value": key, "label": text} for key, text in options.items()]
    common: dict[str, Any] = {"id": name, "value": value, "size": "xs", "radius": "sm", "aria-label": label}
    if not options:
        control: Component = dmc.TextInput(**common, debounce=300, className="filter")
    elif sum(map(len, options.values())) > _ROOM:
        control = dmc.Select(**common, data=data, allowDeselect=False, searchable=True)
    else:
        control = dmc.SegmentedControl(**common, data=data)
    row = "control" if options else "control control-text"
    return html.Div([html.Span(label, className="control-label"), control], className=row)


def to_trial(key: str, study: str) -> str:
    """Where the page of a trial is, as the study wants it that a reader comes from."""
    return f"/run/{key}?study={study}"


def here() -> list[str]:
    """The words that name the store that is shown to a command; none for the usual one."""
    root = str(flask.current_app.config["LIBRARY"].root)
    return [] if root.endswith("/.archlab") else ["--store", root]


def reads_only() -> bool:
    """Whether the dashboard that is asked changes nothing and starts nothing."""
    return bool(flask.current_app.config[READ_ONLY])


def measuring(study: Study, *measures: str) -> str | None:
    """The command that measures the trials of a study's table without training; None where there are none yet."""
    if study.comparison is None or not (study.comparison.table["n"] > 0).any():
        return None
    named = [word for measure in measures for word in ("--measure", measure)]
    return shlex.join(["archlab", "eval", study.name, *named, *here()])


def asks(study: Study, measure: str) -> bool:
    """Whether the study's `evaluate:` names a measure, so that it comes by itself."""
    named = study.record.get("evaluate") or ()
    return measure in {each["type"] if isinstance(each, dict) else each for each in named}


def missing(what: str, line: str, command: str | None = None, awaited: bool = False) -> Component:
    """In place of a figure: what is not there yet, the line of a study that asks for it, and what computes it now.

    `awaited`: the study asks for it already.
    """
    said: list[Any] = [what, " A study has it with ", html.Code(line), "."]
    if awaited:
        said = [what, " The study asks for it: it comes when the trials of the table have ended."]
    if command is None:
        return html.P(said, className="muted missing")
    return html.Div([html.P([*said, " To measure the finished trials now:"], className="muted"), command_line(command)])


def block_table(block: Block) -> Component:
    """A table as the report prints it, what must be known to read it beneath."""
    header = html.Tr([html.Th(column.header, className=f"to-{column.align}") for column in block.columns])
    body = []
    for line in zip(*(column.cells for column in block.columns), strict=True):
        cells = [(cell.strong, shown(cell, column), column) for cell, column in zip(line, block.columns, strict=True)]
        body.append(html.Tr([html.Td(html.B(t) if b else t, className=f"to-{c.align}") for b, t, c in cells]))
    caption = html.Caption(block.title) if block.title else None
    table = html.Table([caption, html.Thead(header), html.Tbody(body)], className="searched")
    legend = html.P(marked(block.legend), className="muted small") if block.legend else None
    return html.Div([html.Div(table, className="wide"), legend])
