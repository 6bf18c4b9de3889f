"""The ledger of a study: who was champion, who challenged them, and what came of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from archlab.dashboards import figures, theme
from archlab.dashboards.library import Library, NotFound
from archlab.dashboards.pages.shell import address, crumbs, notice
from archlab.dashboards.pages.studies import REFRESH_MS
from archlab.dashboards.parts import badge, block_table, graph, guarded, section
from archlab.search.challenge.ledger import KEPT, LOWER, Entry, Ledger
from archlab.search.challenge.page import page
from archlab.search.reporting.findings import MINUS
from archlab.search.store.store import StoreError

_MET = (KEPT, LOWER)  # later challengers go on top of these
_TONES = {KEPT: theme.PALETTE[1], "worse": theme.PALETTE[3]}


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/challenge/<name>`, and what makes it anew when a challenger has been judged."""

    def title(name: str = "", **_: Any) -> str:
        return f"{name}: challengers · archlab"

    dash.register_page("challenge", path_template="/challenge/<name>", title=title, layout=layout)

    @app.callback(
        Output("challenge-content", "children"),
        Output("challenge-seen", "data"),
        Output("challenge-notice", "children"),
        Input("challenge-tick", "n_intervals"),
        State("challenge-seen", "data"),
        prevent_initial_call=True,
    )
    def ticked(_: int, seen: list[str]) -> Any:
        try:
            ledger = _ledger(library, seen[0])
        except (StoreError, NotFound) as error:
            return no_update, no_update, notice(f"Shown as it last was: {error}")
        now = [seen[0], _version(ledger)]
        return (no_update, no_update, None) if now == seen else (content(ledger), now, None)


@guarded
def layout(library: Library, name: object = "", **_: Any) -> Component:
    """The page of the study's newest ledger."""
    ledger = _ledger(library, str(name))
    parts = [
        crumbs(f"{ledger.study}: challengers"),
        html.H1(f"Who beats {ledger.champion}?"),
        html.Div(id="challenge-notice"),
        html.Div(content(ledger), id="challenge-content"),
        dcc.Store(id="challenge-seen", data=[ledger.study, _version(ledger)]),
        dcc.Interval(id="challenge-tick", interval=REFRESH_MS),
    ]
    return html.Div(parts, className="study")


def _ledger(library: Library, name: str) -> Ledger:
    """Raises NotFound for a study without a ledger."""
    known = library.ledgers()
    if name not in known:
        raise NotFound(name, [*known])
    return known[name]


def _version(ledger: Ledger) -> str:
    return f"{ledger.base}:{len(ledger.entries)}"


def content(ledger: Ledger) -> list[Component]:
    """Each challenger's difference to the champion that it met, the ledger, and who followed whom."""
    if not ledger.entries:
        return [html.P("No challenger has been judged yet.", className="muted")]
    told = page(ledger)
    rows = [_row(entry) for entry in ledger.entries if entry.difference is not None]
    colours = {row["variant"]: _TONES.get(row["verdict"], theme.BASELINE_COLOUR) for row in rows}
    title = "Difference in validation loss"
    drawn = figures.forest(rows, colours, "nats/token", title, "the champion that it met")
    notes = [html.P(text, className="muted small") for text in told.notes]
    return [
        *(html.P(line, className="lead") for line in told.lines),
        graph("challenge-forest", drawn, max(200, 110 + 30 * len(rows))),
        section("Ledger", *(block_table(each) for each in told.blocks), *notes),
        section("Who met whom", html.Ul([*_tree(ledger)], className="links")),
    ]


def _row(entry: Entry) -> dict[str, Any]:
    """What a figure draws of a challenger, whose interval is the one that its verdict rests on."""
    difference = math.nan if entry.difference is None else entry.difference
    half = math.nan if entry.half_width is None else entry.half_width
    ends = {"delta_low": difference - half, "delta_high": difference + half}
    return {"variant": f"{entry.number}. {entry.name}", "delta": difference, "verdict": entry.verdict, **ends}


def _tree(ledger: Ledger) -> Iterable[Component]:
    """Those that challengers were put on top of, in order, each with the challengers that it met."""
    for champion in dict.fromkeys([ledger.first, *(each.name for each in ledger.entries if each.verdict in _MET)]):
        met = [entry for entry in ledger.entries if entry.against == champion]
        items = [html.Li([_link(ledger, entry), " ", badge(entry.verdict), _told(entry)]) for entry in met]
        yield html.Li([html.B(champion), html.Ul(items)])


def _link(ledger: Ledger, entry: Entry) -> Component:
    """The name of a challenger, which leads to the study of its round, where one was made."""
    name = f"{entry.number}. {entry.name}"
    return dcc.Link(name, href=address(ledger.round(entry.number))) if entry.seeds else html.Span(name)


def _told(entry: Entry) -> str:
    """What a challenger changes, its difference, and why it was proposed."""
    said = "" if entry.difference is None else f" {entry.difference:+.4f}".replace("-", MINUS)
    why = f"; proposed because: {entry.why}" if entry.why else ""
    return f"{said}; changes {', '.join(_paths(entry))}{why}"


def _paths(entry: Entry) -> Iterable[str]:
    for each in entry.changes:
        yield from [each] if isinstance(each, str) else (f"{path}: {_yaml(value)}" for path, value in each.items())


def _yaml(value: Any) -> str:
    """A value about as a study writes it."""
    return json.dumps(value, ensure_ascii=False).replace('"', "")
