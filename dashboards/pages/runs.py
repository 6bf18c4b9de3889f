"""Every trial of a study: its state, settings, seed, how far and how fast it came, and why it ended as it did."""

from __future__ import annotations

import math
import shlex
from typing import Any
from urllib.parse import urlencode

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component

from dashboards import table, theme
from dashboards.library import Library, NotFound, Study
from dashboards.pages.shell import COMPARE, MOST_BESIDE, RUNS, address, notice, register_page, register_refresh, shell
from dashboards.pages.studies import KEEP_ADDRESS, REFRESH_MS
from dashboards.parts import command_line, guarded, here, section, to_trial
from dashboards.words import command
from search.frames import trials_frame
from search.render.ablation import OF_TRIAL, trial_values
from search.render.blocks import DASH, number, short_count
from search.selection import select, terse
from search.store import StoreError
from search.where import BadFilter, parse_filter

STATES = ("complete", "running", "interrupted", "paused", "planned", "failed", "diverged", "pruned")
HEADINGS = {
    "variant": table.Heading("Variant", "Leads to the trial", 150),
    "state": table.Heading("State", "Interrupted: its driver is gone, and the next run goes on with it", 110),
    "role": table.Heading("Role", "tune: a rate; repeat: a seed at the best; search: proposed; screen: a probe", 106),
    "seed": table.Heading("Seed", "", 60),
    "settings": table.Heading("Settings", "What was tuned or proposed", 110),
    "step": table.Heading("Steps", "Optimizer steps done", 76),
    "validation": table.Heading("Val. loss", "Validation loss at the end, nats per token", 92),
    "test": table.Heading("Test ppl", "Test perplexity", 86),
    "train_s": table.Heading("Time", "Training time of all attempts", 80),
    "speed": table.Heading("Tokens/s", "Training speed", 84),
    "attempt": table.Heading("Attempts", "How often it was started", 84),
    "reason": table.Heading("Reason", "Why it ended as it did; whether another study trained it", 180),
}
COMPARE_TICKED = """(rows, seen) => {
  const keys = [...new Set((rows || []).map(row => row.key))];
  const told = keys.length > MOST ? `${keys.length} are ticked; MOST compare` : `Compare ${keys.length} trials`;
  const few = keys.length < 2 ? 'Tick trials to compare them' : told;
  return [`/study/${seen[0]}/compare?runs=${keys.slice(0, MOST).map(key => key.slice(0, 12)).join(',')}`, few];
}""".replace("MOST", str(MOST_BESIDE))
"""Where the trials that are ticked stand beside each other."""
_LEFT = ("variant", "state", "role", "settings", "reason")


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/runs` and its callbacks to an app."""
    register_page(RUNS, layout)

    def refresh(_: int, where: str | None, sort: str | None, seen: list[str]) -> Any:
        try:
            study = library.study(seen[0])
        except (StoreError, NotFound) as problem:
            return *[no_update] * 3, notice(f"Shown as it last was: {problem}"), *[no_update] * 2
        if ctx.triggered_id == "runs-tick" and RUNS.version(study) == seen[1]:
            return [no_update] * 6
        said = {key: value for key, value in (("q", where), ("sort", sort)) if value}
        query = f"?{urlencode(said, safe=',')}" if said else ""
        try:
            rows = rows_of(study, where or "")
        except BadFilter as problem:
            return no_update, no_update, str(problem), None, no_update, query
        shown = no_update if ctx.triggered_id == "runs-sort" else rows
        return shown, _count(rows, study), None, None, [study.name, RUNS.version(study)], query

    outputs = [
        Output("runs", "rowData"),
        Output("runs-count", "children"),
        Output("runs-problem", "children"),
        Output("runs-notice", "children"),
        Output("runs-seen", "data"),
        Output("runs-query", "data"),
    ]
    inputs = [
        Input("runs-q", "value"),
        Input("runs-sort", "data"),
    ]
    states = [State("runs-seen", "data")]
    register_refresh(app, refresh, outputs, "runs-tick", inputs, states)
    app.clientside_callback(KEEP_ADDRESS, Input("runs-query", "data"), prevent_initial_call=True)
    app.clientside_callback(
        COMPARE_TICKED,
        Output("runs-compare", "href"),
        Output("runs-compare", "children"),
        Input("runs", "selectedRows"),
        State("runs-seen", "data"),
        prevent_initial_call=True,
    )


@guarded
def layout(library: Library, name: object = "", q: object = "", sort: object = "", **_: Any) -> Component:
    """The page, with the trials that the filter `q` finds."""
    study, problem = library.study(str(name)), None
    try:
        rows = rows_of(study, str(q))
    except BadFilter as error:
        problem, rows = str(error), rows_of(study, "")
    search = dmc.TextInput(
        id="runs-q",
        value=str(q),
        placeholder="Filter: state!=complete seed=0 lr>=0.002",
        size="sm",
        debounce=250,
        className="filter",
        **{"aria-label": "Filter trials"},
    )
    return shell(
        study,
        RUNS,
        dcc.Store(id="runs-seen", data=[study.name, RUNS.version(study)]),
        dcc.Store(id="runs-sort", data=str(sort)),
        dcc.Store(id="runs-query"),
        dcc.Interval(id="runs-tick", interval=REFRESH_MS),
        html.Div(None, id="runs-notice"),
        html.Div([search], className="controls"),
        html.Div(problem, id="runs-problem", className="problem small", role="alert"),
        section(
            "Trials",
            table.grid(rows, table.sorted_by(columns(), str(sort)), "runs", more=table.TICKS),
            aside=[
                dcc.Link("Tick trials to compare them", id="runs-compare", href=address(study.name, COMPARE.step)),
                " · ",
                html.Span(_count(rows, study), id="runs-count", className="muted"),
            ],
        ),
        section("Go on", *commands(study)),
    )


def commands(study: Study) -> list[Component]:
    """What to type to train what is missing, and to try again what failed."""
    store = here()
    found = [html.P("Trains what is missing, and nothing twice:", className="muted small")]
    found.append(command_line(command(study, not store, store[-1] if store else "")))
    if study.counts.get("failed"):
        found.append(html.P("Plans failed trials again, after mending the cause:", className="muted small"))
        found.append(command_line(shlex.join(["archlab", "retry", study.name, *store])))
    return found


def columns() -> list[dict[str, Any]]:
    """The grid's columns."""
    found = [table.definition(key, head, key not in _LEFT) for key, head in HEADINGS.items()]
    found[0] |= {
        "cellRenderer": "Link",
        "pinned": "left",
        "flex": None,
        "width": 144,
        "cellStyle": {"function": "params.data.swatch"},
        "cellClass": "cell-variant",
    }
    found[1] |= table.badges(STATES)
    found[-1] |= {"tooltipValueGetter": {"function": f"params.data.text.{table.field_of('reason')}"}}
    return found


def trials_of(study: Study) -> list[dict[str, Any]]:
    """The study's trials, each with all of its roles; one whose driver is gone is `interrupted`."""
    frame = (
        study.comparison.trials
        if study.comparison is not None
        else trials_frame(select(study.record, study.trials), study.trials)
    )
    found: list[dict[str, Any]] = frame.to_dict("records")
    for trial in found:
        if trial["state"] in ("running", "interrupted"):
            trial["step"] = study.curves[trial["key"]].last_step or trial["step"]
            if study.comparison is None and study.holder is None:
                trial["state"] = "interrupted"
    return found


def rows_of(study: Study, where: str) -> list[dict[str, Any]]:
    """A row of the grid for each trial that a filter finds. Raises BadFilter."""
    trials = trials_of(study)
    values = [trial_values(trial) for trial in trials]
    asked = parse_filter(where, dict.fromkeys(name for each in [OF_TRIAL, *values] for name in each))
    colours = theme.colours(study.variants, study.record["baseline"])
    kept = [trial for trial, each in zip(trials, values, strict=True) if asked.holds(each)]
    baseline = study.record["baseline"]
    return [_row(trial, table.swatch(trial["variant"], baseline, colours), study.name) for trial in kept]


def _row(trial: dict[str, Any], swatch: str, study: str) -> dict[str, Any]:
    settings = ", ".join(terse(trial["settings"])) or DASH
    told = [trial["reason"]] if isinstance(trial["reason"], str) else []  # a frame has NaN where there is none
    reason = ", ".join([*(["reused"] if trial["reused"] else []), *told])
    texts = {
        "variant": trial["variant"],
        "state": trial["state"],
        "role": trial["role"],
        "seed": str(trial["seed"]),
        "settings": settings,
        "step": number(trial["step"], ",.0f"),
        "validation": number(trial["validation_loss"], ".4f"),
        "test": number(trial["test_perplexity"], ".3f"),
        "train_s": span(trial["train_s"]),
        "speed": short_count(trial["tokens_per_s"]) if math.isfinite(trial["tokens_per_s"]) else DASH,
        "attempt": str(trial["attempt"]),
        "reason": reason,
    }
    numbers = {
        **{key: texts[key] for key in ("variant", "state", "role", "reason")},
        **{key: trial[key] for key in ("seed", "step", "train_s", "attempt")},
        "settings": trial["lr"] if math.isfinite(trial["lr"]) else settings,
        "validation": trial["validation_loss"],
        "test": trial["test_perplexity"],
        "speed": trial["tokens_per_s"],
    }
    known = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in numbers.items()
    }
    return {
        "id": f"{trial['variant']}/{trial['role']}/{trial['key']}",
        "key": trial["key"],
        "href": to_trial(trial["key"], study),
        "swatch": {"--swatch": swatch},
        "left_out": not trial["reported"],
        "text": {table.field_of(key): text for key, text in texts.items()},
        "number": {table.field_of(key): value for key, value in known.items()},
    }


def span(seconds: float) -> str:
    """A time as people say it: 48 s, 3.2 min, 1.5 h."""
    if not math.isfinite(seconds):
        return DASH
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _count(rows: list[dict[str, Any]], study: Study) -> str:
    total = len(trials_of(study))
    return f"{total} trials" if len(rows) == total else f"{len(rows)} of {total} trials"
