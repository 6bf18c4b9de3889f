"""The first page: every study of the store as a card, the newest first."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import quote

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from archlab.dashboards import words
from archlab.dashboards.library import Library, Study
from archlab.dashboards.pages.notes import tags_of
from archlab.dashboards.parts import badge, card, empty_card, failure_card, guarded, progress_bar, store_card
from archlab.search.challenge.ledger import Ledger, round_of
from archlab.search.formatting.tables import DASH
from archlab.search.store.notes import Note
from archlab.search.store.store import StoreError

REFRESH_MS = 2000


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/` and its callbacks to an app."""

    dash.register_page("studies", path="/", title="Studies · archlab", layout=layout)

    shown = [("studies-cards", "children"), ("studies-version", "data")]
    again = [Output(name, kind, allow_duplicate=True) for name, kind in shown]
    searched, seen = ("studies-search", "value"), State("studies-version", "data")

    def cards(search: str | None, before: str) -> list[Any]:
        version, content = _cards(library, search or "")
        return [no_update, no_update] if version == before else [content, version]

    @app.callback(again, Input("studies-tick", "n_intervals"), State(*searched), seen, prevent_initial_call=True)
    def ticked(_: int, search: str | None, before: str) -> Any:
        return cards(search, before)

    # of its own: the next tick would take the place of a search that is not answered yet
    outputs = [*(Output(*each) for each in shown), Output("studies-query", "data")]

    @app.callback(outputs, Input(*searched), seen, prevent_initial_call=True)
    def wanted(search: str | None, before: str) -> Any:
        return [*cards(search, before), f"?q={quote(search)}" if search else ""]

    keep = "query => window.archlabAddress(query, '', {})"
    app.clientside_callback(keep, Input("studies-query", "data"), prevent_initial_call=True)


@guarded
def layout(library: Library, q: object = "", **_: Any) -> Component:
    """The page, with `q` searched for."""
    wanted = str(q)
    version, content = _cards(library, wanted)
    search = dmc.TextInput(
        id="studies-search",
        value=wanted,
        placeholder="Search studies",
        size="sm",
        debounce=200,
        className="search",
        **{"aria-label": "Search studies"},
    )
    links = [dcc.Link("Compare studies", href="/compare"), dcc.Link("Write a study", href="/write", className="button")]
    return html.Div(
        [
            html.Div([html.H1("Studies"), html.Div([search, *links], className="title-side")], className="title-row"),
            html.Div(content, id="studies-cards", className="cards"),
            dcc.Store(id="studies-version", data=version),
            dcc.Store(id="studies-query"),
            dcc.Interval(id="studies-tick", interval=REFRESH_MS),
        ]
    )


def _cards(library: Library, search: str) -> tuple[str, list[Component]]:
    """(what changes when a card does, the cards)."""
    try:
        listing = library.listing()
    except StoreError as error:
        return f"{search}:{error}", [store_card(error, library.root)]
    if not listing:
        return f"{search}:empty", [empty_card(library.root)]
    asked = search.lower().split()
    notes, ledgers = library.notes().studies, library.ledgers()
    wanted = [row for row in listing if all(word in _text(row, notes.get(row["name"], Note())) for word in asked)]
    if not asked:  # the ledgers lead to their rounds
        rounds = {
            round_of(each.study, number + 1)
            for each in ledgers.values()
            for number in range(each.after + len(each.entries))
        }
        wanted = [row for row in wanted if row["name"] not in rounds]
    if not wanted:
        said = html.P(["No study has ", html.Code(search[:80]), " in its name, question, note or tags."])
        return f"{search}:none", [card("Nothing matches", said)]
    versions = [search, *(f"{each.study}:{len(each.entries)}" for each in ledgers.values())]
    content = [_ledger_card(each) for each in ledgers.values() if each.entries and not asked]
    for row in wanted:
        try:
            study = library.summary(row["name"])
            changed = words.ago(max(row["updated"], study.updated))
            versions.append(study.version + changed)
            content.append(_study_card(study, changed))
        except Exception as error:
            versions.append(repr(error))
            name = html.Div(row["name"], className="name")
            content.append(html.Div([name, failure_card(error)], className="study-card"))
    return "|".join(versions), content


def _text(row: dict[str, Any], note: Note) -> str:
    """All that a study is searched by."""
    return " ".join([row["name"], row["question"] or "", note.text, *note.tags]).lower()


def _study_card(study: Study, changed: str) -> Component:
    """Name, question, progress, the best variant and what is said of it; the whole card is a link."""
    kind, _ = words.activity(study)
    stopped = "not running" if study.done < study.expected else "ended, some trials failed"
    short = {"live": "training now", "stopped": stopped, "done": "finished"}[kind]
    found = [] if study.comparison is None else [_best(study)]
    if study.problem is not None:
        found = [html.P(study.problem, className="problem")]
    top = [html.Span([study.name, tags_of(study.note)], className="name"), html.Span(changed, className="when")]
    question = html.Div(study.record.get("question") or study.name, className="question")
    state = [html.Span(words.progress(study)), html.Span(short, className=f"activity activity-{kind}")]
    return dcc.Link(
        [
            html.Div(top, className="card-top"),
            question,
            *found,
            progress_bar(study),
            html.Div(state, className="card-bottom"),
        ],
        href=f"/study/{study.name}",
        className="study-card",
    )


def _ledger_card(ledger: Ledger) -> Component:
    """Who is champion of a study, and how many challengers it took."""
    found = Counter(entry.verdict for entry in ledger.entries)
    said = ", ".join(f"{count} {verdict}" for verdict, count in found.items())
    top = [html.Span(f"{ledger.study}: challengers", className="name")]
    question = html.Div(f"Who beats {ledger.champion}?", className="question")
    label = [html.Span("champion", className="label"), html.B(ledger.champion)]
    return dcc.Link(
        [
            html.Div(top, className="card-top"),
            question,
            html.Div(label, className="best"),
            html.Div(html.Span(said), className="card-bottom"),
        ],
        href=f"/challenge/{quote(ledger.study)}",
        className="study-card",
    )


def _best(study: Study) -> Component:
    row = words.best(study.comparison)
    if row is None:
        return html.Div("no finished trial yet", className="best muted")
    label = html.Span("lowest perplexity", className="label")
    if not words.perplexities_compare(study):
        return html.Div(
            [label, html.Span(DASH, className="number")],
            className="best",
            title="The perplexities of other objectives, test texts or tokenizers do not compare",
        )
    mean, std = row["perplexity_mean"], row["perplexity_std"]
    value = f"{mean:.2f}" + (f" ± {std:.2f}" if std == std else "")
    number = html.Span(value, className="number")
    return html.Div([label, html.B(row["variant"]), number, badge(row["verdict"])], className="best")
