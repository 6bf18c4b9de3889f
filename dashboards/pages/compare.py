"""Variants and trials beside each other: what differs in their specs and recipes, their curves, and their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

import dash
import dash_mantine_components as dmc
from dash import Input, Output, html
from dash.development.base_component import Component

from archlab.dashboards import figures, lines, table, theme
from archlab.dashboards.library import Library, Study
from archlab.dashboards.pages.curves import NAMES
from archlab.dashboards.pages.runs import span
from archlab.dashboards.pages.shell import (
    COMPARE,
    MOST_BESIDE,
    keep_address,
    pulse,
    register_page,
    register_refresh,
    shell,
)
from archlab.dashboards.parts import block_table, choice, graph, guarded, section
from archlab.dashboards.trials import trials_of
from archlab.dashboards.view import METRICS, View
from archlab.search.comparison.side_by_side import side_by_side
from archlab.search.formatting.tables import Block, Cell, Column, number, printable
from archlab.search.formatting.words import terse
from archlab.search.reporting.main_table import main_block
from archlab.search.reporting.shape import Shape
from archlab.search.results.comparable import spec_of
from archlab.search.results.told import Told

_OFFERED = 100  # of a list of thousands, what is shown at once; it is searched
_SHORT = 12  # digits of a key in an address
PLACES = {"different": "What differs", "all": "Everything"}
_USUAL = ("different", "validation")
TITLES = {"model": "Model", "recipe": "Recipe", "machine": "Machine"}


@dataclass(frozen=True)
class Sides:
    """What stands beside each other: variants by name, then trials by key."""

    variants: tuple[str, ...] = ()
    trials: tuple[str, ...] = ()

    @classmethod
    def of(cls, chosen: Sequence[str], study: Study) -> Sides:
        """From what is chosen in the list, where a trial is its key; what the study no longer has is left out."""
        names, keys = (set(study.variants), {trial["key"] for trial in study.trials})
        return cls(*(tuple(each for each in chosen if each in known) for known in (names, keys)))

    @property
    def chosen(self) -> list[str]:
        """As the list has them."""
        return [*self.variants, *self.trials]

    def query(self) -> dict[str, str | list[str]]:
        """As an address has them: commas between names, or where a name has one the key again for each."""
        names = list(self.variants)
        plain = not any("," in each for each in names)
        said: dict[str, str | list[str]] = {"variants": ",".join(names) if plain else names} if names else {}
        return said | ({"runs": ",".join(key[:_SHORT] for key in self.trials)} if self.trials else {})


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/compare` and its callbacks to an app."""
    register_page(COMPARE, layout)

    def refresh(study: Study, _: str, chosen: list[str], places: str, metric: str) -> dict[str, Any]:
        sides = Sides.of(chosen, study)
        said = sides.query()
        said |= {key: value for key, value in (("places", places), ("metric", metric)) if value not in _USUAL}
        shown = content(library, study, sides, places, metric)
        return {"content": shown, "query": f"?{urlencode(said, doseq=True, safe=',')}"}

    inputs = [Input(f"compare-{key}", "value") for key in ("variants", "places", "metric")]
    outputs = {"content": Output("compare-content", "children")}
    register_refresh(app, library, COMPARE, "compare", refresh, outputs, inputs)
    keep_address(app, COMPARE, "compare-query")


@guarded
def layout(library: Library, name: object = "", **query: Any) -> Component:
    """The page, with the variants and trials that the address names, else the first two variants."""
    study = library.study(str(name))
    sides, notices = _wanted(study, query.get("variants", ""), query.get("runs", ""))
    chosen = {}
    for key, known in (("places", PLACES), ("metric", METRICS)):
        asked = str(query.get(key, next(iter(known))))
        if asked not in known:
            notices.append(f"The address asks for {key} {asked[:40]!r}, which does not exist ({', '.join(known)}).")
        chosen[key] = asked if asked in known else next(iter(known))
    with library.reading():
        shown = content(library, study, sides, chosen["places"], chosen["metric"])
    controls = [
        _select(study, sides),
        choice("compare-places", "Places", PLACES, chosen["places"]),
        choice("compare-metric", "Curves", NAMES["metric"][1], chosen["metric"]),
    ]
    return shell(
        study,
        COMPARE,
        *pulse("compare", study, COMPARE, notices),
        html.Div(controls, className="controls"),
        html.Div(shown, id="compare-content"),
    )


def _select(study: Study, sides: Sides) -> Component:
    """The list of what can stand beside each other."""
    trials = [{"value": key, "label": label} for key, label in _labels(study).items()]
    return dmc.MultiSelect(
        id="compare-variants",
        data=[{"group": "Variants", "items": study.variants}, {"group": "Trials", "items": trials}],
        value=sides.chosen,
        maxValues=MOST_BESIDE,
        limit=_OFFERED,
        searchable=True,
        size="sm",
        className="filter",
        **{"aria-label": "Variants and trials"},
    )


def _labels(study: Study) -> dict[str, str]:
    """What each trial is called, by key: its variant, seed and settings."""
    found = {}
    for trial in study.trials:
        said = [f"seed {trial['seed']}", *terse(trial["settings"])]
        found.setdefault(trial["key"], " · ".join([trial["variant"], *said]))
    return found


def _wanted(study: Study, variants: object, runs: object) -> tuple[Sides, list[str]]:
    """What an address asks for, and a notice for each that the study lacks."""
    if not variants and not runs:
        return Sides(tuple(study.variants[:2])), []
    names, keys = _listed(variants, study.variants), list[str]()
    lost = [f"The address asks for the variant {each[:60]!r}, which the study lacks." for each in names
            if each not in study.variants]  # fmt: skip
    every = {trial["key"] for trial in study.trials}
    for each in _listed(runs, ()):
        found = [key for key in every if key.startswith(each)]
        if len(found) == 1:
            keys += found
        else:
            what = "several trials" if found else "no trial"
            lost.append(f"The address asks for the trial {each[:60]!r}: the study has {what} whose key begins so.")
    sides = Sides.of([*dict.fromkeys(names), *dict.fromkeys(keys)], study)
    if len(sides.chosen) > MOST_BESIDE:
        lost.append(f"Shown are {MOST_BESIDE} of {len(sides.chosen)}.")
    return Sides.of(sides.chosen[:MOST_BESIDE], study), lost


def _listed(asked: object, known: Sequence[str]) -> list[str]:
    """What a key of an address lists: itself again for each, or commas between."""
    if isinstance(asked, list):
        return [str(each) for each in asked]
    return [str(asked)] if asked in known else [each for each in str(asked).split(",") if each]


def content(library: Library, study: Study, sides: Sides, places: str, metric: str) -> list[Component]:
    """The results, what differs, and the curves of some variants and trials."""
    if not sides.chosen:
        return [html.P("Choose variants or trials to compare.", className="muted")]
    labels, baseline = _labels(study), study.record["baseline"]
    colours = theme.colours(study.variants, baseline)
    of = {trial["key"]: trial["variant"] for trial in study.trials}
    heads = [(name, table.swatch(name, baseline, colours)) for name in sides.variants]
    heads += [(labels[key], table.swatch(of[key], baseline, colours)) for key in sides.trials]
    shown = [*_results(study, sides, labels, places), *_differences(library, study, sides.variants)]
    made = [_variant_spec(library, study, name) for name in sides.variants]
    made += [_trial_spec(library, study, key) for key in sides.trials]
    for part, rows in side_by_side(made).items():
        kept = [(path, values) for path, values, differs in rows if differs or places == "all"]
        known = bool(rows) or part != "machine"
        said = "No differences." if known else "Known when trials have ended."
        shown.append(section(TITLES[part], places_table(kept, heads) if kept else html.P(said, className="muted")))
    view = View(metric=metric)
    groups = lines.groups(study, view, sides.variants) if sides.variants else []
    alone = lines.groups(study, replace(view, trials="all"), keys=sides.trials) if sides.trials else []
    groups += [replace(each, label=labels[each.lines[0].key]) for each in alone]
    falls = metric in ("validation", "training")
    figure = figures.curves(groups, colours, baseline, "Training tokens", METRICS[metric][2], falls)
    figure["layout"]["uirevision"] = f"{metric}{'|'.join(sides.chosen)}"
    return [*shown, section("Curves", graph("compare-curves", figure, 430))]


def _results(study: Study, sides: Sides, labels: Mapping[str, str], places: str) -> list[Component]:
    """The rows of the variants as the report has them, and a row for each trial. Components that all of them have, or
    none, are left out with what else does not differ."""
    shown: list[Component] = []
    if sides.variants and study.comparison is None:
        shown.append(html.P(study.problem, className="problem"))
    elif sides.variants:
        block = main_block(study.comparison, Shape(variants=sides.variants))
        differs = {c.key for c in block.columns if len({cell.text for cell in c.cells}) > 1}
        whole = places == "all" or len(sides.variants) < 2
        kept = [c for c in block.columns if whole or c.key in differs or not c.key.startswith("component.")]
        shown.append(block_table(replace(block, columns=kept)))
    if sides.trials:
        found = {trial["key"]: trial for trial in trials_of(study)}
        trials = [found[key] for key in sides.trials]
        columns = [
            Column("trial", [Cell(printable(labels[key])) for key in sides.trials], "l"),
            Column("state", [Cell(trial["state"]) for trial in trials], "l"),
            Column("steps", [Cell(number(trial["step"], ",.0f")) for trial in trials]),
            Column("validation loss ↓", [Cell(number(trial["validation_loss"], ".4f")) for trial in trials]),
            Column("test loss ↓", [Cell(number(trial["test_loss"], ".4f")) for trial in trials]),
            Column("test perplexity ↓", [Cell(number(trial["test_perplexity"], ".3f")) for trial in trials]),
            Column("time", [Cell(span(trial["train_s"])) for trial in trials]),
        ]
        shown.append(block_table(Block("", columns)))
    return [section("Results", *shown)]


def _differences(library: Library, study: Study, names: Sequence[str]) -> list[Component]:
    """The differences of the variants to the first of them, by intervals that allow for having been chosen among all
    pairs of the table."""
    if study.comparison is None or len(names) < 2:
        return []
    first, *others = names
    blocks = Told.known["contrasts"].blocks(library.contrasts(study, first, others))
    return [section(f"Differences to {first}", *(block_table(replace(each, title="")) for each in blocks))]


def _variant_spec(library: Library, study: Study, variant: str) -> dict[str, Any]:
    """What the first of a variant's trials in the table was made of; else its first trial, or what was planned."""
    mine = [trial for trial in study.trials if trial["variant"] == variant]
    if study.comparison is not None:
        reported = set(study.comparison.trials.query("reported")["key"])
        mine.sort(key=lambda trial: trial["key"] not in reported)
    if not mine:
        return {"model": next(spec_of(each) for each in study.record["variants"] if each["name"] == variant)}
    return _trial_spec(library, study, mine[0]["key"])


def _trial_spec(library: Library, study: Study, key: str) -> dict[str, Any]:
    """What a trial was made of, and the machine that trained it."""
    made: dict[str, Any] = json.loads(library.spec(key))
    result = next(trial["result"] for trial in study.trials if trial["key"] == key) or {}
    return {**made, "machine": result.get("fingerprint")}


def places_table(rows: Sequence[tuple[str, list[str]]], sides: Sequence[tuple[str, str]]) -> Component:
    """A row per place, grouped by what it is a part of; a value that is not the first one's is marked."""
    heads = [html.Th("")]
    for name, colour in sides:
        swatch = html.Span(className="swatch", style={"background": colour})
        heads.append(html.Th(html.Span([swatch, name], className="variant-name")))
    groups: dict[str, list[Component]] = {}
    for path, values in rows:
        place, _, name = path.rpartition(".")
        cells = [html.Td(_value(text, text != values[0])) for text in values]
        groups.setdefault(place, []).append(html.Tr([html.Th(html.Code(name)), *cells]))
    body = []
    for place, lines_ in groups.items():
        head = html.Tr(html.Th(html.Code(place), colSpan=len(sides) + 1), className="place")
        body += [head, *lines_] if place else lines_
    return html.Div(
        html.Table([html.Thead(html.Tr(heads)), html.Tbody(body)], className="searched beside"), className="wide"
    )


def _value(text: str, other: bool) -> Any:
    shown = text or html.Span("not there", className="muted")
    return html.Ins(shown) if other else shown
