"""A search: its front, how it went, which axes mattered, and the trials that a reader's filter or brush leaves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dash
from dash import Input, Output, State, html, no_update
from dash.development.base_component import Component

from archlab.dashboards import figures_search
from archlab.dashboards.figures_search import Dimension
from archlab.dashboards.library import Library, NotFound, Study
from archlab.dashboards.pages.shell import SEARCH, Choice, Chosen, needs_comparison, notice, register_tab
from archlab.dashboards.parts import block_table, graph, section
from archlab.search.comparison.figure_frames import settings_frame
from archlab.search.formatting.filters import BadFilter, Filter, parse_filter
from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import Block, Cell, Column, number, printable, short_count
from archlab.search.formatting.words import shortest, terse
from archlab.search.sections.search.promotion_tables import promotion_blocks
from archlab.search.sections.search.told import importances_block, rivals_block, trials_block
from archlab.search.store.store import StoreError

if TYPE_CHECKING:  # which a server starts without
    import pandas as pd

    from archlab.search.results.comparison import Comparison

MOST = 40  # rows of the table
PLAIN = ("number", "state", "perplexity", "feasible", "front")
_TERM = re.compile(r"""(?:"[^"]*(?:"|$)|'[^']*(?:'|$)|[^\s"'])+""")  # of a filter, as it was written


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/search`; a brush of the parallel coordinates is written into the filter."""
    register_tab(app, library, SEARCH, choices, content)

    @app.callback(
        Output({"page": SEARCH.step, "key": "q"}, "value"),
        Input("parallel", "restyleData"),
        State({"page": SEARCH.step, "key": "q"}, "value"),
        State(f"{SEARCH.step}-seen", "data"),
        prevent_initial_call=True,
    )
    def brush(event: Sequence[Any], text: str | None, seen: list[str]) -> Any:
        try:
            found = library.study(seen[0]).comparison
        except (StoreError, NotFound):
            return no_update
        if found is None:
            return no_update
        trials, paths = settings_frame(found.search)
        terms = figures_search.brushed(event, _dimensions(found, trials, paths))
        return replaced(text or "", terms, _names(found, paths)) if terms else no_update


def plain_rows(trials: pd.DataFrame) -> list[dict[str, Any]]:
    """The trials as filters read them: what one lacks is None."""
    rows = records(trials)
    return [{name: None if value != value else value for name, value in row.items()} for row in rows]


def replaced(text: str, found: dict[str, str], names: Sequence[str]) -> str:
    """A filter whose terms about some of the `names` are these instead."""
    kept = [each for each in _TERM.findall(text) if _about(each, names) not in found]
    return " ".join([*kept, *(term for term in found.values() if term)])


def _about(part: str, names: Sequence[str]) -> str | None:
    """The name that a term is about; None for a word, what is turned round, and what is no term."""
    try:
        terms = parse_filter(part, names).terms
    except BadFilter:
        return None
    return terms[0].name if terms and not terms[0].negated else None


def _names(found: Comparison, paths: Sequence[str]) -> list[str]:
    """What a filter can ask of a trial."""
    return [*PLAIN, *_others(found), *paths]


def choices(study: Study) -> Sequence[Choice]:
    """Which goal stands beside the perplexity, and the filter."""
    goals = [] if study.comparison is None else _others(study.comparison)
    over = [Choice("goal", "Perplexity over", {goal: _named(goal) for goal in goals})] if len(goals) > 1 else []
    return [*over, Choice("q", "Filter", {})]


@needs_comparison
def content(_: Study, found: Comparison, chosen: Chosen) -> list[Component]:
    """Front or history, importances, parallel coordinates, and the trials."""
    if not len(found.search):
        return [html.P("The search has made no trial yet.", className="muted")]
    trials, paths = settings_frame(found.search)
    trials["told"] = [", ".join(terse(each, paths)) for each in found.search["settings"]]
    where, wrong = Filter(), []
    try:
        where = parse_filter(chosen["q"], _names(found, paths))
    except BadFilter as error:
        wrong = [notice(f"The filter is not applied: {error}")]
    kept = trials[[where.holds(row) for row in plain_rows(trials.drop(columns="told"))]]
    return [
        *wrong,
        _front(found, trials, chosen),
        *(section(block.title, block_table(replace(block, title=""))) for block in promotion_blocks(found)),
        *_beside(found),
        *_mattered(found),
        _parallel(found, trials, paths, where),
        _table(found, kept, paths),
    ]


def _others(found: Comparison) -> list[str]:
    return [goal for goal in found.searched.get("minimize", ()) if goal != "perplexity"]


def _named(goal: str) -> str:
    """A goal in words."""
    return goal.replace("_", " ").replace("flops", "FLOPs")


def _front(found: Comparison, trials: pd.DataFrame, chosen: Chosen) -> Component:
    others, drawn = _others(found), []
    if others:
        goal = chosen.get("goal", others[0])
        drawn.append(graph("front", figures_search.front(trials, goal, _named(goal)), 400))
    drawn.append(graph("history", figures_search.history(trials), 400))
    legend = trials_block(found).legend.removeprefix("* ").removeprefix("best; ")
    pair = "pair" if others else "pair pair-single"
    note = html.P(legend if legend != "best" else "", className="muted small")
    return section("Front" if others else "Trials", html.Div(drawn, className=pair), note)


def _beside(found: Comparison) -> list[Component]:
    """Other searches of the same space, where the store has any."""
    if not len(found.rivals):
        return []
    block = rivals_block(found)
    return [section(block.title, block_table(replace(block, title="")))]


def _mattered(found: Comparison) -> list[Component]:
    shares = found.searched.get("importances") or {}
    if not shares:
        few = "Which axes mattered is told from 20 complete trials on."
        return [section("Importance of the axes", html.P(few, className="muted"))]
    legend = importances_block(found).legend
    drawn = graph("importances", figures_search.importances(shares), 80 + 30 * len(shares))
    return [section("Importance of the axes", drawn, html.P(legend, className="muted small"))]


def _dimensions(found: Comparison, trials: pd.DataFrame, paths: Sequence[str]) -> list[Dimension]:
    """The axes of a search, then its goals, of the complete trials."""
    done = trials[trials["perplexity"].notna()]
    return [Dimension.of(name, done[name]) for name in [*paths, *_others(found), "perplexity"]]


def _parallel(found: Comparison, trials: pd.DataFrame, paths: Sequence[str], where: Filter) -> Component:
    done = trials[trials["perplexity"].notna()]
    if len(done) < 2:
        return section("All axes", html.P("Drawn from two complete trials on.", className="muted"))
    figure = figures_search.parallel(_dimensions(found, trials, paths), list(done["perplexity"]), where)
    note = "A line per complete trial, strong where its perplexity is low. Drag along an axis, or write "
    note += "a filter such as n_layers>=2 state=complete: the table follows."
    return section("All axes", graph("parallel", figure, 380), html.P(note, className="muted small"))


def _table(found: Comparison, kept: pd.DataFrame, paths: Sequence[str]) -> Component:
    """The trials that the filter leaves, best first."""
    if not len(kept):
        return section("Trials", html.P("No trial is left by the filter.", className="muted"))
    rows = records(kept.head(MOST))
    columns = [
        Column("trial", [Cell(str(row["number"])) for row in rows]),
        Column("perplexity ↓", [Cell(number(row["perplexity"], ".3f"), bool(row["front"])) for row in rows]),
        *(Column(f"{_named(goal)} ↓", [Cell(_short(row[goal])) for row in rows]) for goal in _others(found)),
        Column("state", [Cell(row["state"]) for row in rows], "l"),
        *(Column(shortest(path, paths), [Cell(printable(_short(row[path]))) for row in rows], "l") for path in paths),
    ]
    shown = f"{len(kept)} of {len(found.search)} trials" + (f", the best {MOST} of them" if len(kept) > MOST else "")
    return section("Trials", block_table(Block(shown, columns, "bold: on the front")))


def _short(value: Any) -> str:
    """A number with three digits, a text as it is."""
    if isinstance(value, float):
        return number(None, "") if value != value else short_count(value) if value >= 1000 else f"{value:.3g}"
    return short_count(value) if isinstance(value, int) and value >= 10_000 else figures_search.spoken(str(value))
