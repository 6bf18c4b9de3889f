"""Variants beside each other: what differs in their specs and recipes, their curves, and their rows of the table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component

from dashboards import figures, lines, table, theme
from dashboards.library import Library, NotFound, Study
from dashboards.pages.shell import COMPARE, notice, register_page, register_refresh, shell
from dashboards.pages.studies import KEEP_ADDRESS, REFRESH_MS
from dashboards.parts import block_table, choice, graph, guarded, section
from dashboards.view import METRICS, View
from search.render.ablation import main_block
from search.render.shape import Shape
from search.side_by_side import side_by_side
from search.store import StoreError

MOST = 8
PLACES = {"different": "What differs", "all": "Everything"}
TITLES = {"model": "Model", "recipe": "Recipe", "machine": "Machine"}


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/compare` and its callbacks to an app."""
    register_page(COMPARE, layout)

    def refresh(_: int, variants: list[str], places: str, metric: str, seen: list[str]) -> Any:
        try:
            study = library.study(seen[0])
            if ctx.triggered_id == "compare-tick" and COMPARE.version(study) == seen[1]:
                return [no_update] * 4
            with library.reading():
                shown = content(library, study, variants, places, metric)
        except (StoreError, NotFound) as error:
            return no_update, no_update, no_update, notice(f"Shown as it last was: {error}")
        said = {"variants": ("|" if any("," in each for each in variants) else ",").join(variants)}
        said |= {key: value for key, value in (("places", places), ("metric", metric)) if value not in _USUAL}
        return shown, [study.name, COMPARE.version(study)], f"?{urlencode(said, safe=',')}", None

    outputs = [
        Output("compare-content", "children"),
        Output("compare-seen", "data"),
        Output("compare-query", "data"),
        Output("compare-notice", "children"),
    ]
    inputs = [
        Input("compare-variants", "value"),
        Input("compare-places", "value"),
        Input("compare-metric", "value"),
    ]
    states = [State("compare-seen", "data")]
    register_refresh(app, refresh, outputs, "compare-tick", inputs, states)
    app.clientside_callback(KEEP_ADDRESS, Input("compare-query", "data"), prevent_initial_call=True)


_USUAL = ("different", "validation")


@guarded
def layout(library: Library, name: object = "", **query: Any) -> Component:
    """The page, with the variants that the address names, else the first two."""
    study = library.study(str(name))
    variants, notices = _wanted(study, str(query.get("variants", "")))
    chosen = {}
    for key, known in (("places", PLACES), ("metric", METRICS)):
        asked = str(query.get(key, next(iter(known))))
        if asked not in known:
            notices.append(f"The address asks for {key} {asked[:40]!r}, which does not exist ({', '.join(known)}).")
        chosen[key] = asked if asked in known else next(iter(known))
    with library.reading():
        shown = content(library, study, variants, chosen["places"], chosen["metric"])
    select = dmc.MultiSelect(
        id="compare-variants",
        data=study.variants,
        value=variants,
        maxValues=MOST,
        searchable=True,
        size="sm",
        className="filter",
        **{"aria-label": "Variants"},
    )
    names = {key: value[1] for key, value in METRICS.items()}
    return shell(
        study,
        COMPARE,
        dcc.Store(id="compare-seen", data=[study.name, COMPARE.version(study)]),
        dcc.Store(id="compare-query"),
        dcc.Interval(id="compare-tick", interval=REFRESH_MS),
        html.Div([notice(text) for text in notices], id="compare-notice"),
        html.Div(
            [
                select,
                choice("compare-places", "Places", PLACES, chosen["places"]),
                choice("compare-metric", "Curves", names, chosen["metric"]),
            ],
            className="controls",
        ),
        html.Div(shown, id="compare-content"),
    )


def _wanted(study: Study, asked: str) -> tuple[list[str], list[str]]:
    """The variants of an address, and a notice for each that the study lacks."""
    if not asked:
        return study.variants[:2], []
    names = [asked] if asked in study.variants else [each for each in asked.split("|" if "|" in asked else ",") if each]
    lost = [f"The address asks for the variant {each[:60]!r}, which the study lacks." for each in names]
    known = [each for each in dict.fromkeys(names) if each in study.variants]
    notices = [said for said, each in zip(lost, names, strict=True) if each not in study.variants]
    if len(known) > MOST:
        notices.append(f"Shown are {MOST} of {len(known)} variants.")
    return known[:MOST], notices


def content(library: Library, study: Study, variants: Sequence[str], places: str, metric: str) -> list[Component]:
    """The table's rows, what differs, and the curves of some variants."""
    if not variants:
        return [html.P("Choose variants to compare.", className="muted")]
    colours = theme.colours(study.variants, study.record["baseline"])
    shown = []
    if study.comparison is not None:
        shown.append(section("Results", block_table(main_block(study.comparison, Shape(variants=tuple(variants))))))
    else:
        shown.append(html.P(study.problem, className="problem"))
    made = side_by_side([_made_of(library, study, name) for name in variants])
    for part, rows in made.items():
        kept = [(path, values) for path, values, differs in rows if differs or places == "all"]
        known = bool(rows) or part != "machine"
        said = "No differences." if known else "Known when trials have ended."
        body = _places(kept, variants, study.record["baseline"], colours) if kept else html.P(said, className="muted")
        shown.append(section(TITLES[part], body))
    groups = lines.groups(study, View(metric=metric), variants)
    falls = metric in ("validation", "training")
    figure = figures.curves(groups, colours, study.record["baseline"], "Training tokens", METRICS[metric][2], falls)
    figure["layout"]["uirevision"] = f"{metric}{'|'.join(variants)}"
    return [*shown, section("Curves", graph("compare-curves", figure, 430))]


def _made_of(library: Library, study: Study, variant: str) -> dict[str, Any]:
    """What the first of a variant's trials in the table was made of; else its first trial, or what was planned."""
    mine = [trial for trial in study.trials if trial["variant"] == variant]
    if study.comparison is not None:
        reported = set(study.comparison.trials.query("reported")["key"])
        mine.sort(key=lambda trial: trial["key"] not in reported)
    if not mine:
        return {"model": next(each["spec"] for each in study.record["variants"] if each["name"] == variant)}
    made: dict[str, Any] = json.loads(library.spec(mine[0]["key"]))
    return {**made, "machine": (mine[0]["result"] or {}).get("fingerprint")}


def _places(
    rows: Sequence[tuple[str, list[str]]], variants: Sequence[str], baseline: str, colours: Mapping[str, str]
) -> Component:
    """A row per place, grouped by what it is a part of; a value that is not the first one's is marked."""
    heads = [html.Th("")]
    for name in variants:
        swatch = html.Span(className="swatch", style={"background": table.swatch(name, baseline, colours)})
        heads.append(html.Th(html.Span([swatch, name], className="variant-name")))
    groups: dict[str, list[Component]] = {}
    for path, values in rows:
        place, _, name = path.rpartition(".")
        cells = [html.Td(_value(text, text != values[0])) for text in values]
        groups.setdefault(place, []).append(html.Tr([html.Th(html.Code(name)), *cells]))
    body = []
    for place, lines_ in groups.items():
        head = html.Tr(html.Th(html.Code(place), colSpan=len(variants) + 1), className="place")
        body += [head, *lines_] if place else lines_
    return html.Div(
        html.Table([html.Thead(html.Tr(heads)), html.Tbody(body)], className="searched beside"), className="wide"
    )


def _value(text: str, other: bool) -> Any:
    shown = text if text else html.Span("not there", className="muted")
    return html.Ins(shown) if other else shown
