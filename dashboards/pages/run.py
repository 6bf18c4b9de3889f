"""One trial: what was trained, its curves, its attempts, what it said last, and the command that goes on with it."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from archlab.dashboards import figures, theme
from archlab.dashboards.curves import Line, group, thin
from archlab.dashboards.library import Library, NotFound
from archlab.dashboards.load import of_trial
from archlab.dashboards.pages.notes import note_box
from archlab.dashboards.pages.runs import span
from archlab.dashboards.pages.shell import BEFORE_OVERVIEW, RUNS, address, crumbs, notice
from archlab.dashboards.pages.studies import REFRESH_MS
from archlab.dashboards.parts import badge, card, command_line, graph, guarded, here, section, to_trial
from archlab.dashboards.trials import Trial, find_trial
from archlab.dashboards.view import METRICS
from archlab.dashboards.words import ago, command, curve_of
from archlab.search.formatting.tables import number
from archlab.search.formatting.words import terse
from archlab.search.store import addresses
from archlab.search.store.store import StoreError

FIGURES = (("training", "validation"), ("gradient",), ("rate",), ("speed",))
"""What is drawn of a trial: names of the metrics in each figure."""


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/run/<key>` and its callback to an app."""

    dash.register_page(
        "run",
        path_template="/run/<key>",
        title=lambda key="": f"trial {str(key)[:8]} · archlab",
        layout=layout,
        order=BEFORE_OVERVIEW,
    )

    @app.callback(
        Output("run-title", "children"),
        Output("run-content", "children"),
        Output("run-seen", "data"),
        Output("run-notice", "children"),
        Input("run-tick", "n_intervals"),
        State("run-seen", "data"),
        prevent_initial_call=True,
    )
    def refresh(_: int, seen: list[str]) -> Any:
        key, study, version = seen
        try:
            trial = find_trial(library, key, study)
        except (StoreError, NotFound) as error:
            return no_update, no_update, no_update, notice(f"Shown as it last was: {error}")
        if not isinstance(trial, Trial) or trial.version == version:
            return [no_update] * 4
        with library.reading():
            title, *rest = content(trial, library)
        return title, rest, [key, study, trial.version], None


@guarded
def layout(library: Library, key: object = "", study: object = "", **_: Any) -> Component:
    """The page of the trial of a key, or of its beginning; `study` is the one that a reader came from."""
    trial = find_trial(library, str(key), str(study))
    if not isinstance(trial, Trial):
        return _none(str(key), trial)
    with library.reading():
        shown = content(trial, library)
    name = trial.study.name
    return html.Div(
        [
            crumbs(trial.key[:12], {name: address(name), "runs": address(name, RUNS.step)}),
            dcc.Store(id="run-seen", data=[trial.key, name, trial.version]),
            dcc.Interval(id="run-tick", interval=REFRESH_MS),
            html.Div(None, id="run-notice"),
            html.Div(shown[:1], id="run-title"),
            note_box(trial.row["note"], trial=trial.key),
            html.Div(shown[1:], id="run-content"),
        ],
        className="study",
    )


def _none(key: str, keys: list[str]) -> Component:
    links = [html.Li(dcc.Link(each[:16], href=f"/run/{each}")) for each in keys[:12]]
    said = "More than one trial begins with" if keys else "No study of this store wants a trial"
    return card(
        "No such trial",
        html.P([f"{said} ", html.Code(key[:80]), "."]),
        html.Ul(links, className="links"),
        dcc.Link("All studies", href="/", className="button"),
        kind="missing",
    )


def content(trial: Trial, library: Library) -> list[Component]:
    """All of the page that moves."""
    row = trial.row
    settings = ", ".join(terse(row["settings"]))
    title = f"{row['variant']} · seed {row['seed']}" + (f" · {settings}" if settings else "")
    error = trial.traceback()
    specs = [_spec("Model", trial.model_yaml()), _spec("Recipe, data and seed", trial.recipe_yaml())]
    files = [section("Machine", _fingerprint(trial)), section("Checkpoints", *_checkpoints(trial))]
    return [
        html.Div([html.H1(title), badge(trial.state)], className="run-title"),
        html.P(_facts(trial), className="muted"),
        *([html.P(row["reason"], className="problem")] if row["reason"] else []),
        *_commands(trial, library),
        section("Curves", html.Div(_curves(trial), className="pair"), html.P(_read_on(trial), className="muted small")),
        section("Machine load", *_load(trial, library)),
        *([section("Error", html.Pre(error, className="log"))] if error else []),
        section("Attempts", _table(_events(trial), "when", "attempt", "what happened", "")),
        section("Output", *_output(trial), aside=html.Code("output.txt")),
        html.Div(specs, className="pair"),
        html.Div(files, className="pair"),
        section("Where else", *_elsewhere(trial, library)),
    ]


def _facts(trial: Trial) -> str:
    result = trial.row["result"] or {}
    file = trial.study.curves.get(trial.key)
    step = result.get("step") or (file.last_step if file else 0)
    roles = dict.fromkeys(role for study, _, role in trial.wanted if study == trial.study.name)
    found = [", ".join(roles), f"{step:,} steps"]
    if result.get("train_s"):
        found.append(f"{span(result['train_s'])} of training at {result.get('tokens_per_s') or 0:,.0f} tokens/s")
    if written := result.get("checkpoints"):
        found.append(
            f"checkpoints: {written['count']:,}, {written['bytes'] / 1e6:,.1f} MB in all, waited for "
            f"{written['waited_s']:.2f} s, {written['writing_s']:.2f} s of writing"
        )
    if result.get("peak_memory_bytes"):
        found.append(f"{result['peak_memory_bytes'] / 2**20:,.0f} MiB at most")
    for split, name in (("validation", "loss on the whole validation text"), ("test", "loss on the test text")):
        if (result.get(split) or {}).get("loss") is not None:
            found.append(f"{name} {number(result[split]['loss'], '.4f')}")
    return " · ".join([*found, f"changed {ago(trial.row['updated'])}"])


def _commands(trial: Trial, library: Library) -> list[Component]:
    """What goes on with it: where it can be, what is to be typed for that."""
    store, name, row = here(), trial.study.name, trial.row
    commands = [command(trial.study, not store, str(library.root))]
    if trial.state == "failed":
        said = "Plan it again after mending the cause, and train it:"
        commands.insert(0, shlex.join(["archlab", "retry", name, "--variant", row["variant"], *store]))
    elif trial.state in ("planned", "paused", "interrupted"):
        said = "It goes on from its last checkpoint with:" if trial.checkpoints() else "It is trained by:"
    elif trial.state == "complete" and trial.checkpoints():
        said, file = "Its weights, as a file:", f"{name}-{row['seed']}.safetensors"
        commands = [shlex.join(["archlab", "export", trial.key[:12], "-o", file, *store])]
    else:
        return []
    return [html.P(said, className="muted small"), *map(command_line, commands)]


def _curves(trial: Trial) -> list[Component]:
    """A small figure for each kind of curve."""
    file = trial.study.curves[trial.key]
    colours = {"training": theme.PALETTE[5], "validation": theme.PALETTE[0]}
    shown = []
    for metrics in FIGURES:
        lines = []
        for metric in metrics:
            step, _, value = file.series(METRICS[metric][0])
            keep = thin(len(step))
            if len(step):
                seed, label = trial.row["seed"], f"seed {trial.row['seed']}"
                lines.append(Line(metric, seed, label, step[keep], step[keep], value[keep]))
        title = "Loss (nats/token)" if len(metrics) > 1 else METRICS[metrics[0]][2]
        tones = {line.variant: colours.get(line.variant, theme.PALETTE[0]) for line in lines}
        groups = [group([line]) for line in lines]
        figure = figures.curves(groups, tones, "", "Optimizer steps", title, len(metrics) > 1)
        figure["layout"]["showlegend"] = len(lines) > 1
        shown.append(graph(f"run-{metrics[0]}", figure, 260))
    return shown


def _read_on(trial: Trial) -> str:
    return (
        f"While it trains, validation is read on {curve_of(trial.study, trial.row['variant'])}. So the curve's last "
        "value is not the loss on the whole text."
    )


def _load(trial: Trial, library: Library) -> list[Component]:
    """A small figure for each thing that the trial used of its machine."""
    samples = library.loads.of(trial.folder)
    if not samples:
        return [
            html.P(
                "There are no samples: the first is taken after a second, and an older archlab took none.",
                className="muted small",
            )
        ]
    shown = [graph(f"load-{name}", figure, 200) for name, figure in of_trial(samples)]
    hosts = ", ".join(dict.fromkeys(samples["host"]))
    told = f"{len(samples['time'])} samples on {hosts}, of the trial's process and its children; times are UTC."
    return [html.Div(shown, className="pair"), html.P(told, className="muted small")]


def _events(trial: Trial) -> list[list[Any]]:
    found = []
    for event in trial.events:
        detail = {**event["detail"], **event["detail"].get("spent", {})}
        said = "; ".join(
            f"{name} {value}"
            for name, value in detail.items()
            if not isinstance(value, dict | list) and (name, value) != ("gpu_s", 0.0)
        )
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        found.append([when, event["attempt"] or "", event["kind"], said])
    return found


def _output(trial: Trial) -> list[Component]:
    text = trial.output()
    if not text:
        return [html.P("It has printed nothing.", className="muted small")]
    return [html.Pre(text, className="log"), html.P(str(trial.folder), className="muted small anywhere")]


def _spec(title: str, text: str) -> Component:
    copy = dcc.Clipboard(content=text, title="Copy", className="copy")
    return section(title, html.Pre(text, className="log spec"), aside=copy)


def _fingerprint(trial: Trial) -> Component:
    found = (trial.row["result"] or {}).get("fingerprint") or {}
    return _table([*map(list, found.items())]) if found else html.P("Known when it has ended.", className="muted small")


def _checkpoints(trial: Trial) -> list[Component]:
    rows = [[f"step {step:,}", f"{size / 1e6:,.1f} MB", ago(when)] for step, size, when in trial.checkpoints()]
    if not rows:
        return [html.P("There are none.", className="muted small")]
    return [_table(rows), html.P(str(trial.folder), className="muted small anywhere")]


def _elsewhere(trial: Trial, library: Library) -> list[Component]:
    """Who wants it, its neighbours, and its tracker."""
    found: list[Any] = []
    for name, variant, role in trial.wanted:
        found.append(html.Li([dcc.Link(name, href=address(name)), f" wants it as {variant} ({role})"]))
    row, trials = trial.row, trial.study.trials
    mine = row["variant"]
    alike = [t for t in trials if t["seed"] == row["seed"] and t["role"] == row["role"] and t["variant"] != mine]
    for label, kept in (
        ("Other trials of the variant: ", [t for t in trials if t["variant"] == mine]),
        ("The same seed of other variants: ", alike),
    ):
        others = {t["key"]: t for t in kept if t["key"] != trial.key}
        links = []
        for key, other in list(others.items())[:24]:
            called = f"seed {other['seed']}" if other["variant"] == mine else other["variant"]
            text = " ".join(filter(None, [called, ", ".join(terse(other["settings"]))]))
            links.append(dcc.Link(text, href=to_trial(key, trial.study.name), className="neighbour"))
        if links:
            found.append(html.Li([label, *links]))
    found.append(html.Li(tracker(library.root)))
    return [html.Ul(found, className="links")]


def tracker(root: Path) -> list[Any]:
    """Where MLflow shows it: a link to a server, or the command that starts one on the store's own database."""
    try:
        given = addresses.address(root, addresses.MLFLOW)
    except StoreError as error:
        return ["MLflow: ", str(error)]
    if given and given.startswith(("http://", "https://")):
        url = addresses.shown(given)
        return ["MLflow: ", html.A(url, href=url, rel="noreferrer", target="_blank") if "@" not in url else url]
    if given or not (root / "mlflow.db").exists():
        return ["MLflow: nothing is sent there"]
    start = shlex.join(["mlflow", "ui", "--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}"])
    return ["MLflow: ", html.Code(start)]


def _table(rows: list[list[Any]], *heads: str) -> Component:
    head = [html.Thead(html.Tr([html.Th(text) for text in heads]))] if heads else []
    body = html.Tbody([html.Tr([html.Td(str(cell)) for cell in row]) for row in rows])
    return html.Div(html.Table([*head, body], className="searched"), className="wide")
