"""What the pages of one study share: the way between them, the choices of a reader in the address, and the pulse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import dash
import dash_mantine_components as dmc
import flask
from dash import ALL, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from archlab.dashboards.library import Library, NotFound, Study
from archlab.dashboards.pages.studies import REFRESH_MS
from archlab.dashboards.parts import choice, guarded
from archlab.search.sections.design.frames import factors
from archlab.search.store.store import StoreError

if TYPE_CHECKING:  # which a server starts without
    from archlab.search.results.comparison import Comparison


@dataclass(frozen=True)
class Tab:
    """A page of a study at `/study/<study>/<step>`; the first one's step is empty. It is offered where it `applies`.

    `live`: it moves with the curves too, not only when a trial ends or is measured.
    """

    step: str
    title: str
    applies: Callable[[Study], bool] = lambda _: True
    live: bool = False

    def version(self, study: Study) -> str:
        """What changes when what it shows does."""
        return study.version if self.live else study.version.partition(":")[0]


OVERVIEW = Tab("", "Overview", live=True)
TABLE = Tab("table", "Table")
CURVES = Tab("curves", "Curves", live=True)
FACTOR = Tab("factor", "Factors", lambda study: bool(factors(study.record["variants"])))
SCALING = Tab("scaling", "Scaling", lambda study: bool(study.record.get("ladder")))
SEARCH = Tab("search", "Search", lambda study: bool(study.record.get("search")))
STABILITY = Tab("stability", "Stability", live=True)
CONTEXT = Tab("context", "Context")
INSPECT = Tab("inspect", "Inspect")
TIMELINE = Tab("timeline", "Timeline", live=True)
RUNS = Tab("runs", "Runs", live=True)
ARCHITECTURE = Tab("architecture", "Architecture")
REPORT = Tab("report", "Report")
COMPARE = Tab("compare", "Compare", live=True)
MOST_BESIDE = 8
"""So many variants and trials stand beside each other at most."""

TABS = [
    *(OVERVIEW, TABLE, CURVES),
    *(FACTOR, SCALING, SEARCH, STABILITY, CONTEXT, INSPECT),
    *(TIMELINE, RUNS, COMPARE, ARCHITECTURE, REPORT),
]
"""In the order in which they stand above each page."""


@dataclass(frozen=True)
class Choice:
    """A control of a page: its key in the address, its label, what each of its values is called, and which of them is
    `usual`: the first one where that is not said. Without `values` it is a text that a reader writes."""

    key: str
    label: str
    values: Mapping[str, str]
    usual: str = ""

    @property
    def default(self) -> str:
        """What is chosen where the address says nothing."""
        return self.usual or next(iter(self.values), "")


BEFORE_OVERVIEW = 1
"""The `order` of pages below a study: the template of its overview, which has none, takes their addresses for names."""

GO = "event => { if (event && event.points[0].customdata) window.archlabVisit(event.points[0].customdata) }"
"""What a click on a point of a figure does whose `customdata` are addresses."""

CARRIED = {TABLE.step: ("q",), RUNS.step: ("q",), CURVES.step: ("q", "metric", "x", "smooth", "trials")}
"""Which keys of an address, where a page has them too, a link to another page of the study takes along."""
CARRIES = (OVERVIEW, TABLE, CURVES, RUNS)
"""The pages whose keys mean the same as there."""

_LONGEST = 500  # characters of a text that a reader writes

Chosen = dict[str, str]
Choices = Callable[[Study], Sequence[Choice]]
Content = Callable[[Study, Chosen], list[Component]]
Refresh = Callable[..., Mapping[str, Any]]


def address(study: str, step: str = "", **query: str | list[str]) -> str:
    """Where a page of a study is; a key that has several values comes again for each."""
    return f"/study/{quote(study)}/{step}".rstrip("/") + (f"?{urlencode(query, doseq=True)}" if query else "")


def view_address(study: str, step: str, said: Mapping[str, object]) -> str:
    """Where a page of a study is in the view that the address of another one says."""
    return address(study, step, **{key: str(said[key]) for key in CARRIED.get(step, ()) if said.get(key)})


def shell(study: Study, here: Tab, *content: Any, said: Mapping[str, object] = {}) -> Component:
    """A page of a study: crumbs, the tabs that apply, and its content. `said` is what its address says, which the links
    to other pages take along."""
    links = [_link(study, tab, tab == here, said) for tab in TABS if tab == here or tab.applies(study)]
    tabs = html.Nav(links, className="pages", **{"aria-label": "pages"})
    return html.Div([crumbs(study.name), tabs, *content], className="study")


def crumbs(current: str, above: Mapping[str, str] = {}) -> Component:
    """Where a page stands: the list of studies, the addresses of what is `above` it by name, and itself."""
    links = [dcc.Link(text, href=href) for text, href in {"Studies": "/", **above}.items()]
    parts = [part for link in links for part in (link, html.Span("/", className="slash"))]
    return html.Nav([*parts, html.Span(current, className="here")], className="crumbs")


def _link(study: Study, tab: Tab, current: bool, said: Mapping[str, object]) -> Component:
    if current:
        return html.Span(tab.title, className="to-page page-here", **{"aria-current": "page"})
    return dcc.Link(tab.title, href=view_address(study.name, tab.step, said), className="to-page", id=f"to-{tab.step}")


def keep_address(app: dash.Dash, tab: Tab, store: str, extra: str = "", *inputs: Input) -> None:
    """Writes the query that a store holds into the address, and what a page in the browser adds to it: `extra` is a
    function of the query and the `inputs`."""
    told = json.dumps(CARRIED if tab in CARRIES else {})
    query = f"({extra})(query, ...more)" if extra else "query"
    app.clientside_callback(
        f"(query, ...more) => window.archlabAddress({query}, 'study/{tab.step}', {told})",
        Input(store, "data"),
        *inputs,
        prevent_initial_call=True,
    )


def notice(text: str) -> Component:
    """A remark above the page."""
    return html.Div(text, className="notice", role="status")


def pulse(name: str, study: Study, tab: Tab, notices: Sequence[str], query: str | None = None) -> list[Component]:
    """What `register_refresh` reads and writes beside a page's own outputs, and the notices above the page.

    A store that held None at first would write that into the address.
    """
    return [
        dcc.Store(id=f"{name}-seen", data=[study.name, tab.version(study)]),
        dcc.Store(id=f"{name}-query", **({} if query is None else {"data": query})),
        dcc.Interval(id=f"{name}-tick", interval=REFRESH_MS),
        html.Div([notice(text) for text in notices], id=f"{name}-notice"),
    ]


def register_refresh(
    app: dash.Dash,
    library: Library,
    tab: Tab,
    name: str,
    refresh: Refresh,
    outputs: Mapping[str, Output],
    inputs: Sequence[Input],
    states: Sequence[State] = (),
) -> None:
    """Calls `refresh(study, seen, *inputs, *states)` when a reader has chosen something, and at each tick at which the
    study has moved on from `seen`, the version that is on the page.

    It returns what changes: by the keys of `outputs`, by `query` the address, and by `notice` and `seen` what these are
    set to in place of none and of this version.
    These are two callbacks: the next tick would take the place of a choice that is not answered yet.
    """
    parts = {"notice": "children", "query": "data", "seen": "data"}
    targets = {**outputs, **{part: Output(f"{name}-{part}", prop) for part, prop in parts.items()}}
    again = [Output(each.component_id, each.component_property, allow_duplicate=True) for each in targets.values()]
    kept = [State(each.component_id, each.component_property) for each in inputs]
    seen = State(f"{name}-seen", "data")

    def answer(ticks: bool, before: list[str], *values: Any) -> list[Any]:
        found: Mapping[str, Any]
        try:
            study = library.study(before[0])
            now = [study.name, tab.version(study)]
            if ticks and now == before:
                return [no_update] * len(targets)
            with library.reading():
                found = refresh(study, before[1], *values)
        except (StoreError, NotFound) as error:
            found = {"notice": notice(f"Shown as it last was: {error}"), "seen": [before[0], ""]}
        else:
            found = {"notice": None, "seen": now, **found} if found else {}
        return [found.get(key, no_update) for key in targets]

    @app.callback(again, Input(f"{name}-tick", "n_intervals"), seen, *kept, *states, prevent_initial_call=True)
    def ticked(_: int, before: list[str], *values: Any) -> Any:
        return answer(True, before, *values)

    @app.callback([*targets.values()], *inputs, *states, seen, prevent_initial_call=True)
    def chosen(*values: Any) -> Any:
        return answer(False, values[-1], *values[:-1])


def register_page(tab: Tab, layout: Callable[..., Component]) -> None:
    """Adds the page of a tab at `/study/<name>/<step>`."""

    def title(name: str = "", **_: Any) -> str:
        return f"{name}: {tab.title.lower()} · archlab"

    template = f"/study/<name>/{tab.step}"
    dash.register_page(tab.step, path_template=template, title=title, layout=layout, order=BEFORE_OVERVIEW)


def register_tab(app: dash.Dash, library: Library, tab: Tab, choices: Choices, content: Content) -> None:
    """Adds a page that is its choices and, made of what is chosen, its content: anew when the study has moved.

    What a reader chooses stands in the address. Figures keep their zoom as long as their `uirevision` is the same.
    """

    @guarded
    def layout(library: Library, name: object = "", **query: Any) -> Component:
        study = library.study(str(name))
        offered = choices(study)
        chosen, notices = _read(offered, query)
        with library.reading():
            shown = content(study, chosen)
        controls = [choice({"page": tab.step, "key": c.key}, c.label, c.values, chosen[c.key]) for c in offered]
        return shell(
            study,
            tab,
            *pulse(tab.step, study, tab, notices, _query(offered, chosen)),
            html.Div(controls, className="controls") if controls else None,
            html.Div(shown, id=f"{tab.step}-content"),
        )

    def refresh(study: Study, seen: str, values: list[str], ids: list[dict[str, str]], before: str) -> dict[str, Any]:
        offered = choices(study)
        chosen, notices = _read(offered, {each["key"]: value for each, value in zip(ids, values, strict=True)})
        query = _query(offered, chosen)
        if tab.version(study) == seen and query == before:
            return {}
        return {"content": content(study, chosen), "query": query, "notice": [notice(text) for text in notices]}

    register_page(tab, layout)
    controls, outputs = {"page": tab.step, "key": ALL}, {"content": Output(f"{tab.step}-content", "children")}
    states = [State(controls, "id"), State(f"{tab.step}-query", "data")]
    register_refresh(app, library, tab, tab.step, refresh, outputs, [Input(controls, "value")], states)
    keep_address(app, tab, f"{tab.step}-query")


def needs_comparison(content: Callable[[Study, Comparison, Chosen], list[Component]]) -> Content:
    """The content of a page that is made of a comparison; what is wrong where there is none."""

    @wraps(content)
    def checked(study: Study, chosen: Chosen) -> list[Component]:
        if study.comparison is None:
            return [html.P(study.problem, className="problem")]
        return content(study, study.comparison, chosen)

    return checked


def refusal(why: str, status: int) -> flask.Response:
    """In place of a file, why there is none."""
    return flask.Response(f"{why}\n", status, mimetype="text/plain")


def downloads(file: str, endings: Iterable[str], query: str = "") -> list[Component]:
    """A link to a file for each of its endings."""
    return [html.A(f".{each}", href=f"{file}.{each}{query}", className="download") for each in endings]


def filter_input(name: str, value: str, example: str, label: str) -> Component:
    """Where a reader writes a filter."""
    return dmc.TextInput(
        id=name,
        value=value,
        placeholder=f"Filter: {example}",
        size="sm",
        debounce=250,
        className="filter",
        **{"aria-label": label},
    )


def non_defaults(offered: Sequence[Choice], chosen: Chosen) -> Chosen:
    """What is chosen and not at its default: so much stands in an address."""
    return {each.key: chosen[each.key] for each in offered if chosen[each.key] != each.default}


def _query(offered: Sequence[Choice], chosen: Chosen) -> str:
    said = non_defaults(offered, chosen)
    return f"?{urlencode(said)}" if said else ""


def _read(offered: Sequence[Choice], query: Mapping[str, object]) -> tuple[Chosen, list[str]]:
    """What is chosen, and a notice for each value that does not exist; unknown keys are ignored."""
    chosen, notices = {}, []
    for each in offered:
        value = str(query.get(each.key) or each.default)
        if not each.values:
            value = value[:_LONGEST]
        elif value not in each.values:
            known = ", ".join(each.values)
            notices.append(f"The address asks for {each.key} {value[:40]!r}, which does not exist (there is: {known}).")
            value = each.default
        chosen[each.key] = value
    return chosen, notices
