"""Studies beside each other: does what one found hold in the others, and what do they differ in?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from archlab.dashboards import figures, theme, words
from archlab.dashboards.library import Library, NotFound, Study
from archlab.dashboards.pages.compare import TITLES, places_table
from archlab.dashboards.pages.shell import crumbs, notice
from archlab.dashboards.pages.studies import REFRESH_MS
from archlab.dashboards.parts import block_table, choice, graph, guarded, section
from archlab.search.formatting.tables import DASH, Block, Cell, Column, interval, number, printable, short_count
from archlab.search.store.store import StoreError

MOST = 8
"""So many studies stand beside each other."""
PLACES = {"different": "What differs", "all": "Everything"}
METHOD = (
    "Each difference is that of a variant to the baseline of its own study, with the interval of that study's table. "
    "Nothing is pooled or tested across studies, and intervals of different studies do not hold together."
)


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/compare` and its callbacks to an app."""
    dash.register_page("across", path="/compare", title="Compare studies · archlab", layout=layout)

    def drawn(chosen: list[str], places: str, seen: list[str]) -> list[Any]:
        try:
            studies = [library.study(name) for name in chosen]
            version = _version(studies)
            if [version, places] == seen:
                return [no_update] * 4
            with library.reading():
                shown = content(studies, places)
        except (StoreError, NotFound) as error:
            return [no_update, no_update, notice(f"Shown as it last was: {error}"), no_update]
        said: dict[str, str] = {"studies": ",".join(chosen)} if chosen else {}
        said |= {"places": places} if places != "different" else {}
        return [shown, [version, places], None, f"?{urlencode(said, safe=',')}" if said else ""]

    targets = {"content": "children", "seen": "data", "notice": "children", "query": "data"}
    inputs = [("across-studies", "value"), ("across-places", "value")]
    seen = State("across-seen", "data")
    again = [Output(f"across-{name}", kind, allow_duplicate=True) for name, kind in targets.items()]

    @app.callback(again, Input("across-tick", "n_intervals"), *(State(*i) for i in inputs), seen,
                  prevent_initial_call=True)  # fmt: skip
    def ticked(_: int, chosen: list[str], places: str, before: list[str]) -> Any:
        return drawn(chosen, places, before)

    outputs = [Output(f"across-{name}", kind) for name, kind in targets.items()]

    @app.callback(outputs, *(Input(*i) for i in inputs), prevent_initial_call=True)
    def chosen(names: list[str], places: str) -> Any:
        return drawn(names, places, [])

    keep = "query => window.archlabAddress(query, 'compare', {})"
    app.clientside_callback(keep, Input("across-query", "data"), prevent_initial_call=True)


@guarded
def layout(library: Library, studies: object = "", places: object = "different", **_: Any) -> Component:
    """The page, with the studies that the address names, else the two newest."""
    known = [row["name"] for row in library.listing()]
    asked = [each for each in str(studies).split(",") if each]
    lost = [f"The store has no study {each[:60]!r}." for each in asked if each not in known]
    names = [each for each in dict.fromkeys(asked) if each in known][:MOST] if asked else known[:2]
    wanted = str(places) if str(places) in PLACES else "different"
    found = [library.study(name) for name in names]
    with library.reading():
        shown = content(found, wanted)
    select = dmc.MultiSelect(
        id="across-studies",
        data=known,
        value=names,
        maxValues=MOST,
        searchable=True,
        size="sm",
        className="filter",
        **{"aria-label": "Studies"},
    )
    return html.Div(
        [
            crumbs("Compare studies"),
            html.H1("Compare studies"),
            html.Div([notice(text) for text in lost], id="across-notice"),
            html.Div([select, choice("across-places", "Settings", PLACES, wanted)], className="controls"),
            html.Div(shown, id="across-content"),
            dcc.Store(id="across-seen", data=[_version(found), wanted]),
            dcc.Store(id="across-query"),
            dcc.Interval(id="across-tick", interval=REFRESH_MS),
        ],
        className="study",
    )


def _version(studies: Sequence[Study]) -> str:
    return "|".join(each.version.partition(":")[0] for each in studies)


def content(studies: Sequence[Study], places: str) -> list[Component]:
    """What the studies found of the changes that they share, then what they differ in."""
    from archlab.search.comparison.across import one_scale, settings, shared_changes  # with pandas

    if not studies:
        return [html.P("Choose studies to compare.", className="muted")]
    colours = dict(zip([each.name for each in studies], theme.PALETTE, strict=False))
    compared = {each.name: (each.record, each.comparison) for each in studies if each.comparison is not None}
    shown = [section("Studies", _studies(studies, one_scale([each.record for each in studies])))]
    if problems := [html.P(f"{s.name}: {s.problem}", className="problem") for s in studies if s.problem]:
        shown += problems
    if len(compared) < 2:
        return [*shown, html.P("Two studies with results can be compared.", className="muted")]
    changes, alone = shared_changes(compared)
    shown.append(section("Do verdicts hold?", *_changes(changes, colours)))
    if rest := [html.Li([html.B(name), ": ", ", ".join(own)]) for name, own in alone.items() if own]:
        shown.append(section("Only in one of them", html.Ul(rest, className="links")))
    heads = [(each.name, colours[each.name]) for each in studies]
    for part, rows in settings({each.name: each.record for each in studies}).items():
        kept = [(path, values) for path, values, differs in rows if differs or places == "all"]
        if rows:
            title = {"model": "Baseline's model", "recipe": "Recipe, data and comparison"}.get(part, TITLES[part])
            said = html.P("No differences.", className="muted")
            shown.append(section(title, places_table(kept, heads) if kept else said))
    return shown


def _changes(changes: Sequence[Any], colours: Mapping[str, str]) -> list[Component]:
    """A sentence for each change, then every difference as a figure and in a table."""
    if not changes:
        return [html.P("The studies have no change in common.", className="muted")]
    mark = {"better": "better", "worse": "worse", "reversed": "diverged", "mixed": "incomplete"}
    told = [
        html.Li([html.Span(className=f"verdict-mark mark-{mark.get(each.kind, 'within-noise')}"), each.sentence()])
        for each in changes
    ]
    shown: list[Component] = [html.Ul(told, className="verdicts")]
    found = [(change, each) for change in changes for each in change.found]
    for unit in dict.fromkeys(each.unit for _, each in found):
        rows = [
            {"variant": f"{change.name} · {each.place}", "delta": each.delta, "delta_low": each.low,
             "delta_high": each.high, "verdict": each.verdict}
            for change, each in found if each.unit == unit
        ]  # fmt: skip
        tones = {f"{change.name} · {each.place}": colours[each.study] for change, each in found}
        name = f"across-{''.join(c for c in unit if c.isalnum())}"
        forest = figures.forest(rows, tones, unit, base="its own baseline")
        shown.append(graph(name, forest, max(200, 110 + 30 * len(rows))))
    columns = [
        Column("change", [Cell(printable(change.name)) for change, _ in found], "l"),
        Column("study", [Cell(printable(each.place)) for _, each in found], "l"),
        Column("n", [Cell(str(each.n)) for _, each in found]),
        Column("Δ loss", [Cell(number(each.delta, "+.4f")) for _, each in found]),
        Column("95% interval", [Cell(interval(each.low, each.high)) for _, each in found]),
        Column("verdict", [Cell(each.verdict) for _, each in found], "l"),
    ]
    return [*shown, block_table(Block("", columns, METHOD))]


def _studies(studies: Sequence[Study], comparable: bool) -> Component:
    """A row per study, a link to each."""
    heads = ["study", "question", "variants", "tokens", "seeds", "progress", "baseline", "best", "perplexity ↓"]
    rows = []
    for study in studies:
        found = None if study.comparison is None else words.best(study.comparison)
        own = {} if study.comparison is None else {r["variant"]: r for r in study.comparison.table.to_dict("records")}
        base = own.get(study.record["baseline"], {}).get("perplexity_mean")
        cells = [
            dcc.Link(study.name, href=f"/study/{study.name}"),
            study.record.get("question") or "",
            str(len(study.variants)),
            short_count(study.record["tokens"]),
            str(len(study.record["seeds"])),
            words.progress(study),
            number(base, ".3f") if comparable and base is not None else DASH,
            found["variant"] if found else DASH,
            number(found["perplexity_mean"], ".3f") if found and comparable else DASH,
        ]
        rows.append(html.Tr([html.Td(cell) for cell in cells]))
    table = html.Table([html.Thead(html.Tr([html.Th(head) for head in heads])), html.Tbody(rows)], className="searched")
    said = "Perplexities of the baselines and of the best rows, on the same test text."
    if not comparable:
        said = "Their perplexities do not compare: the studies have other objectives, test texts or tokenizers."
    return html.Div([html.Div(table, className="wide"), html.P(said, className="muted small")])
