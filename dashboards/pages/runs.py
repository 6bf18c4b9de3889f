"""Every trial of a study: its state, settings, seed, how far and how fast it came, and why it ended as it did."""

from __future__ import annotations

import math
import shlex
from typing import Any
from urllib.parse import urlencode

import dash
from dash import Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component

from archlab.dashboards import table, theme
from archlab.dashboards.library import STATES, Library, Study
from archlab.dashboards.pages.shell import (
    COMPARE,
    MOST_BESIDE,
    RUNS,
    address,
    filter_input,
    keep_address,
    pulse,
    register_page,
    register_refresh,
    shell,
)
from archlab.dashboards.parts import command_line, guarded, here, section, to_trial
from archlab.dashboards.trials import kept, trials_of
from archlab.dashboards.words import command
from archlab.search.formatting.filters import BadFilter
from archlab.search.formatting.tables import DASH, number, short_count
from archlab.search.formatting.words import terse

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
    "note": table.Heading("Note", "Tags and the note that people wrote beside it", 130),
    "reason": table.Heading("Reason", "Why it ended as it did; whether another study trained it", 180),
}
TICKED = """(rows, seen) => {
  const every = rows && rows.ids ? rows.ids.map(id => id.split('/').pop()) : (rows || []).map(row => row.key);
  const keys = [...new Set(every)].map(key => key.slice(0, 12));
  const told = keys.length > MOST ? `${keys.length} are ticked; MOST compare` : `Compare ${keys.length} trials`;
  const few = keys.length < 2 ? 'Tick trials to compare them' : told;
  return [`/study/${seen[0]}/compare?runs=${keys.slice(0, MOST).join(',')}`, few, keys.join(',')];
}""".replace("MOST", str(MOST_BESIDE))
"""Where the trials that are ticked stand beside each other, what the link there says, and their keys."""
ADDRESS = "(query, ticked) => query + (ticked && (query ? '&' : '?') + `ticked=${ticked}`)"
_LEFT = ("variant", "state", "role", "settings", "note", "reason")


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/runs` and its callbacks to an app."""
    register_page(RUNS, layout)

    outputs = {
        "rows": Output("runs", "rowData"),
        "count": Output("runs-count", "children"),
        "problem": Output("runs-problem", "children"),
    }
    inputs = [Input("runs-q", "value"), Input("runs-sort", "data")]
    register_refresh(app, library, RUNS, "runs", _refresh, outputs, inputs)
    keep_address(app, RUNS, "runs-query", ADDRESS, Input("runs-picked", "data"))
    app.clientside_callback(
        TICKED,
        Output("runs-compare", "href"),
        Output("runs-compare", "children"),
        Output("runs-picked", "data"),
        Input("runs", "selectedRows"),
        State("runs-seen", "data"),
    )


def _refresh(study: Study, _: str, where: str | None, sort: str | None) -> dict[str, Any]:
    query = _query(where, sort)
    try:
        rows = rows_of(study, where or "")
    except BadFilter as problem:
        return {"problem": str(problem), "seen": no_update, "query": query}
    found = {"count": _count(rows, study), "problem": None, "query": query}
    return found if ctx.triggered_id == "runs-sort" else {**found, "rows": rows}


def _query(where: str | None, sort: str | None) -> str:
    """The address of a view, without its ticks."""
    said = {key: value for key, value in (("q", where), ("sort", sort)) if value}
    return f"?{urlencode(said, safe=',=')}" if said else ""


@guarded
def layout(
    library: Library, name: object = "", q: object = "", sort: object = "", ticked: object = "", **_: Any
) -> Component:
    """The page, with the trials that the filter `q` finds, those `ticked` whose keys begin so."""
    study, problem = library.study(str(name)), None
    try:
        rows = rows_of(study, str(q))
    except BadFilter as error:
        problem, rows = str(error), rows_of(study, "")
    asked = [each for each in str(ticked).split(",") if each]
    every = [trial["key"] for trial in study.trials]
    lost = [each for each in asked if not any(key.startswith(each) for key in every)]
    said = [f"The address ticks the trial {each[:40]!r}, which the study lacks." for each in lost]
    ids = [row["id"] for row in rows if row["key"].startswith(tuple(asked))]
    search = filter_input("runs-q", str(q), "state!=complete seed=0 lr>=0.002", "Filter trials")
    return shell(
        study,
        RUNS,
        dcc.Store(id="runs-sort", data=str(sort)),
        dcc.Store(id="runs-picked"),
        *pulse("runs", study, RUNS, said, _query(str(q), str(sort))),
        html.Div([search], className="controls"),
        html.Div(problem, id="runs-problem", className="problem small", role="alert"),
        section(
            "Trials",
            table.grid(rows, table.sorted_by(columns(study), str(sort)), "runs", more=table.TICKS, ticked=ids),
            aside=[
                dcc.Link("Tick trials to compare them", id="runs-compare", href=address(study.name, COMPARE.step)),
                " · ",
                html.Span(_count(rows, study), id="runs-count", className="muted"),
            ],
        ),
        section("Go on", *commands(study)),
        said={"q": str(q)},
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


def columns(study: Study) -> list[dict[str, Any]]:
    """The grid's columns, with room for the names of variants; that of notes where there are some."""
    noted = any(trial["note"] for trial in study.trials)
    shown = {key: head for key, head in HEADINGS.items() if key != "note" or noted}
    found = [table.definition(key, head, key not in _LEFT) for key, head in shown.items()]
    found[0] |= table.names(study.variants)
    found[1] |= table.badges(STATES)
    found[-1] |= {"tooltipValueGetter": {"function": f"params.data.text.{table.field_of('reason')}"}}
    return found


def rows_of(study: Study, where: str) -> list[dict[str, Any]]:
    """A row of the grid for each trial that a filter finds. Raises BadFilter."""
    baseline = study.record["baseline"]
    colours = theme.colours(study.variants, baseline)
    found = kept(study, trials_of(study), where)
    return [_row(trial, table.swatch(trial["variant"], baseline, colours), study.name) for trial in found]


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
        "note": " ".join([*(f"[{tag}]" for tag in trial["note"].tags), trial["note"].text]).strip(),
        "reason": reason,
    }
    numbers = {
        **{key: texts[key] for key in ("variant", "state", "role", "note", "reason")},
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
