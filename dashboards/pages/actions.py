"""What a reader can do about a study by a click: stop it, go on with it, try again what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dash
import dash_mantine_components as dmc
import flask
from dash import ALL, Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component

from archlab.dashboards.launch import Launcher, Started
from archlab.dashboards.library import Library, NotFound, Study
from archlab.dashboards.pages.studies import REFRESH_MS
from archlab.dashboards.parts import reads_only
from archlab.search.store.store import StoreError

STOP, AT_ONCE, GO_ON, RETRY = "stop", "stop at once", "go on", "retry"
_LABELS = {
    STOP: ("Stop", "Its trials write a checkpoint and end; going on continues from there"),
    AT_ONCE: ("Stop at once", "Without a new checkpoint"),
    GO_ON: ("Go on", "Trains what is missing, and nothing twice"),
    RETRY: ("Retry failed", "Plans the failed trials again"),
}
_EXPECTED = (0, 1, 130)
"""Exit codes of a run that need no words: done, done with failed trials, stopped."""


class Actions:
    """What was asked of the studies of a store from here."""

    def __init__(self, library: Library) -> None:
        self.library, self.launcher = library, Launcher(library.root)
        self._stopped: dict[str, Any] = {}

    def stopping(self, study: Study) -> bool:
        """Whether who runs it now was asked to stop. One who gives its lock back names nobody in it any more."""
        asked = self._stopped.get(study.name)
        return study.holder is not None and asked is not None and study.holder in (asked, {})

    def do(self, what: str, study: Study) -> str:
        """Does it, and says what becomes of it. Raises StoreError, OSError."""
        from archlab.search.running.stop_and_retry import retry, stop_study

        if what in (STOP, AT_ONCE):
            self._stopped[study.name] = study.holder
            done = stop_study(self.library.root, study.name, wait_s=0.0)
            return "" if done["holder"] else "Nobody runs it."
        if what == RETRY:
            with self.library.open() as store:
                count = sum(retry(store, study.name).values())
            return f"{count} trial{'s' * (count != 1)} planned again."
        folder, told = file_of(study, self.library)
        if folder is None:
            return told
        more = [f"--set={path}={_yaml(value)}" for path, value in study.record.get("overrides", {}).items()]
        self.launcher.run(study.name, told, folder, more)
        return ""


def file_of(study: Study, library: Library) -> tuple[Path | None, str]:
    """(the folder in which the study's file was run, what it is called there), or None and why a click can't go on."""
    if own := study.record.get("command"):
        return None, f"Its own command goes on with it: {own}"
    told = study.file
    folder = next((each for each in (Path.cwd(), library.root.parent) if (each / told).is_file()), None)
    if folder is None:
        return None, f"Its file {told} is not here: the command below goes on with it where it is."
    with library.open() as store:
        if not is_what_was_run(folder / told, store.study_yaml(study.name)):
            return None, f"{told} has changed since it was run: Write a study, on the first page, shows its plan."
    return folder, told


def is_what_was_run(file: Path, text: str) -> bool:
    """Whether a file, with what it includes, says what a store keeps as the text of a study."""
    from archlab.arch_dsl.language.errors import SpecError
    from archlab.arch_dsl.language.include import whole_text  # whose package imports torch

    try:
        return file.read_text(errors="replace") == text or whole_text(file) == text
    except (SpecError, OSError):
        return False  # what it includes is gone, or means nothing any more


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def register(app: dash.Dash, library: Library) -> None:
    """Adds what the buttons do, and what they become while a study moves on."""
    actions = Actions(library)
    app.server.config["ACTIONS"] = actions

    told = [State("actions-study", "data"), State("actions-shown", "data")]
    shown = Output("actions", "children", allow_duplicate=True)

    def answer(name: str, before: str, asked: str = "") -> Any:
        said = ""
        try:
            study = library.study(name)
            if asked:
                said = actions.do(asked, study)
                study = library.study(name)
        except (StoreError, NotFound, OSError) as error:
            return [html.Span(str(error), className="problem", role="alert"), *_kept(name, "")]
        return content(study, actions, said) if said or state_of(study, actions) != before else no_update

    @app.callback(shown, Input("actions-tick", "n_intervals"), *told, prevent_initial_call=True)
    def ticked(_: int, name: str, before: str) -> Any:
        return answer(name, before)

    @app.callback(Output("actions", "children"), Input({"action": ALL}, "n_clicks"), *told, prevent_initial_call=True)
    def clicked(clicks: list[int | None], name: str, before: str) -> Any:
        if not any(clicks) or not ctx.triggered_id or reads_only():  # buttons that have just been drawn
            return no_update
        return answer(name, before, ctx.triggered_id["action"])


def action_bar(study: Study) -> Component | None:
    """The buttons of a study, None where its pages change nothing."""
    if reads_only():
        return None
    actions: Actions = flask.current_app.config["ACTIONS"]
    tick = dcc.Interval(id="actions-tick", interval=REFRESH_MS)
    return html.Div([tick, html.Div(content(study, actions), id="actions", className="actions")])


def state_of(study: Study, actions: Actions) -> str:
    """What changes when the buttons do."""
    started = actions.launcher.of(study.name)
    return repr((offered(study, actions), study.holder, started and (started.since, started.code), study.done))


def offered(study: Study, actions: Actions) -> list[str]:
    """What can be done about it now."""
    started = actions.launcher.of(study.name)
    if study.holder is not None:
        return [AT_ONCE] if actions.stopping(study) else [STOP]
    if started is not None and started.code is None:
        return []  # it begins
    failed = [RETRY] if study.counts.get("failed") else []
    waits = study.done < study.expected or study.counts.get("planned")
    return [*([GO_ON] if waits else []), *failed]


def content(study: Study, actions: Actions, said: str = "") -> list[Component]:
    """The buttons, and what became of what was started."""
    shown: list[Any] = [
        dmc.Button(
            _LABELS[each][0],
            id={"action": each},
            size="compact-sm",
            variant="light" if each == GO_ON else "default",
            **{"aria-label": f"{_LABELS[each][0]} {study.name}: {_LABELS[each][1]}"},
        )
        for each in offered(study, actions)
    ]
    started = actions.launcher.of(study.name)
    if actions.stopping(study):
        shown.append(html.Span("It was asked to stop: its trials write a checkpoint.", className="muted small"))
    elif started is not None:
        shown += _started(started, study)
    if said:
        shown.append(html.Span(said, className="small", role="status"))
    return [*shown, *_kept(study.name, state_of(study, actions))]


def _kept(name: str, state: str) -> list[Component]:
    return [dcc.Store(id="actions-study", data=name), dcc.Store(id="actions-shown", data=state)]


def _started(started: Started, study: Study) -> list[Component]:
    """What became of a run that was started here; nothing of one that has its locks and shows its own progress."""
    if started.code is None:
        return [] if study.holder is not None else [html.Span("It begins…", className="muted small", role="status")]
    if started.code in _EXPECTED:
        return []
    return [
        html.Details(
            [
                html.Summary(f"The run that was started here ended with code {started.code}"),
                html.Pre(started.last_lines() or "It printed nothing.", className="log"),
            ],
            open=True,
            className="more",
        )
    ]
