"""A page to write a study: words that may stand at the cursor, what is wrong, the plan as it would be now, and Run."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import dash
import dash_mantine_components as dmc
import flask
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from archlab.dashboards.drafts import Drafts
from archlab.dashboards.launch import Launcher
from archlab.dashboards.library import Library
from archlab.dashboards.pages.actions import is_what_was_run
from archlab.dashboards.pages.shell import crumbs, notice
from archlab.dashboards.parts import guarded, reads_only
from archlab.dashboards.sent import sent_json
from archlab.search.store.store import StoreError
from archlab.search.study.completion import complete
from archlab.search.study.files import from_here, new_study, studies_in
from archlab.search.utils.files import write_whole

FILE = re.compile(r"(\w[\w.-]{0,100}/){0,4}\w[\w.-]{0,100}\.ya?ml")
"""A study's file in this folder, or in folders of it."""
NEW = "my_study.yaml"
_FEW = 6  # files that are listed without a click


class Refused(ValueError):
    """Why a text was not written."""


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/write`, its callbacks, and what completes a word."""
    dash.register_page("write", path="/write", title="Write a study · archlab", layout=layout)
    folder = Path.cwd()
    drafts = Drafts(library.root, folder)

    @app.server.post("/write/complete")
    def completed() -> flask.Response:
        asked = sent_json()
        kinds = {name: type(value) for name, value in asked.items()} if isinstance(asked, dict) else {}
        if kinds != {"text": str, "position": int}:
            return flask.Response("a text and a position are asked for\n", 400, mimetype="text/plain")
        start, found = complete(asked["text"], asked["position"])
        return flask.jsonify(start=start, words=[[each.word, each.doc, each.then] for each in found])

    @app.callback(
        Output("write-found", "children"),
        Output("write-marks", "children"),
        Output("write-run", "disabled"),
        Input("write-text", "value"),
        State("write-file", "value"),
        State("write-writer", "data"),
    )
    def check(text: str | None, file: str | None, writer: str) -> Any:
        found = drafts.newest(text or "", file or NEW, writer)
        if found is None:
            return [no_update] * 3
        lines = sorted({each["line"] for each in found["problems"]})
        return _found(found), ",".join(map(str, lines)), bool(found["problems"])

    @app.callback(
        Output("write-said", "children"),
        Output("write-before", "data"),
        Output("write-opened", "children"),
        Input("write-save", "n_clicks"),
        Input("write-run", "n_clicks"),
        State("write-text", "value"),
        State("write-file", "value"),
        State("write-before", "data"),
        prevent_initial_call=True,
    )
    def keep(_: int, __: int, text: str | None, file: str | None, before: dict[str, str]) -> Any:
        if reads_only():
            return "This dashboard only reads.", no_update, no_update
        try:
            path = save(folder, file or "", text or "", before)
        except (Refused, OSError) as error:
            return html.Span(f"Not saved: {error}", className="problem", role="alert"), no_update, no_update
        now = {"file": file, "digest": _digest(text or "")}
        if dash.ctx.triggered_id == "write-save":
            return f"Saved as {path}.", now, json.dumps(now)
        return _begun(drafts, file or "", text or ""), now, json.dumps(now)

    app.clientside_callback(
        "() => ''",
        Output("write-said", "children", allow_duplicate=True),
        Input("write-text", "value"),
        Input("write-file", "value"),
        prevent_initial_call=True,
    )  # what was said was said of another text or name


def _begun(drafts: Drafts, file: str, text: str) -> Any:
    """Starts what was saved, if nothing is wrong with it."""
    found = drafts.check(text, file)
    if found["problems"]:
        return html.Span("Saved, and not run: there are problems.", className="problem", role="alert")
    launcher: Launcher = flask.current_app.config["ACTIONS"].launcher
    before = launcher.of(found["name"])
    if before is not None and before.code is None:
        said = f"Saved, and not run: {found['name']} still runs as it was before. Stop it on its page first."
        return html.Span(said, className="problem", role="alert")
    started = launcher.run(found["name"], file, Path.cwd())
    link = dcc.Link(found["name"], href=f"/study/{found['name']}")
    return html.Span(["Running as process ", str(started.pid), ": ", link, " shows it."])


def save(folder: Path, file: str, text: str, before: dict[str, str]) -> Path:
    """Writes a study's text into a folder. `before` is the file that was opened, and the digest of what it held.

    Raises Refused for a name that is none of a study file, and rather than overwrite what was not opened here.
    """
    if not FILE.fullmatch(file):
        raise Refused(f"{file[:80]!r} is no name of a study file: letters, digits, '.', '_', '-', and .yaml at its end")
    path = folder / file
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise Refused(f"{file} leads out of this folder by a link")
    if not _is_utf8(text):
        raise Refused("half of a surrogate pair is no character")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        try:
            held = _digest(path.read_text())
        except UnicodeDecodeError as error:
            raise Refused(f"{file} is not UTF-8 text: choose another name") from error
        if held == _digest(text):
            return path
        if before.get("file") != file:
            raise Refused(f"{file} exists: choose another name, or open it first")
        if before.get("digest") != held:
            raise Refused(f"{file} has changed on disk since it was opened: open it again, or choose another name")
    write_whole(path, text)
    return path


def _is_utf8(text: str) -> bool:
    try:
        return text.encode() is not None
    except UnicodeEncodeError:
        return False


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


@guarded
def layout(library: Library, study: object = "", file: object = "", **_: Any) -> Component:
    """The page, with a file of the folder, what a stored study was run with, or the template."""
    name, text, before, said = _opened(library, str(study), str(file))
    if off := reads_only():
        said = "This dashboard only reads: what you write here is checked, and can be copied, not saved or run."
    controls = [
        dmc.TextInput(id="write-file", value=name, size="sm", className="file-name", **{"aria-label": "File"}),
        dmc.Button("Save", id="write-save", size="sm", variant="default", disabled=off),
        dmc.Button("Save and run", id="write-run", size="sm", disabled=True, display="none" if off else None),
        html.Span(id="write-said", className="small", role="status"),
    ]
    text_box = dmc.Textarea(
        id="write-text", value=text, debounce=350, className="code-input", autosize=False,
        **{"aria-label": "The study", "aria-describedby": "write-help"},
    )  # fmt: skip
    help_ = "Ctrl+Space shows what may stand at the cursor; Enter or Tab takes it, Escape closes the list."
    editor = html.Div([html.Pre(className="code-lines", **{"aria-hidden": "true"}), text_box], className="code")
    return html.Div(
        [
            crumbs("Write a study"),
            html.H1("Write a study"),
            notice(said) if said else None,
            html.Div(
                ["Your text, which was not saved yet. ", html.Button("Drop it", className="linked")],
                className="notice draft", hidden=True, role="status",
            ),
            html.Div(controls, className="controls"),
            html.Div([html.Div(_starts(library), className="muted small"), html.Span(help_, id="write-help")],
                     className="write-help muted small"),
            html.Div(
                [editor, html.Div("Being checked…", id="write-found", className="found", role="status")],
                className="write",
            ),
            html.Span(id="write-marks", hidden=True),
            dcc.Store(id="write-before", data=before),
            html.Span(json.dumps(before), id="write-opened", hidden=True),  # the same, where a draft finds it
            dcc.Store(id="write-writer", data=uuid4().hex),
        ],
        className="study",
    )  # fmt: skip


def _opened(library: Library, study: str, file: str) -> tuple[str, str, dict[str, str], str]:
    """(name of the file, text, what was opened, a remark) of what an address asks for."""
    path = Path.cwd() / file if FILE.fullmatch(file) else None
    said = f"There is no study file {file[:80]!r} in {Path.cwd()}."
    if path is not None and path.is_file() and path.resolve().is_relative_to(Path.cwd().resolve()):
        try:
            text = path.read_text()
            return file, text, {"file": file, "digest": _digest(text)}, ""
        except UnicodeDecodeError:
            said = f"{file} is not UTF-8 text."
    if file:
        named = file if path else NEW
        return named, new_study(Path.cwd() / named), {}, said
    if study:
        try:
            with library.open() as store:
                text, record = store.study_yaml(study), store.study(study)
        except StoreError as error:
            return NEW, new_study(Path.cwd() / NEW), {}, str(error)
        run_as = from_here(record.get("file") or f"{study}.yaml", library.root)
        named = run_as if FILE.fullmatch(run_as) else Path(run_as).name
        own = Path.cwd() / named
        same = own.is_file() and is_what_was_run(own, text)
        text = own.read_text() if same else text  # what it includes stays in files of its own
        opened = {"file": named, "digest": _digest(text)} if same else {}
        changed = own.is_file() and not opened
        said = f"This is what was run; {named} has changed since: open that by ?file={named}." if changed else ""
        return named, text, opened, said
    return NEW, new_study(Path.cwd() / NEW), {}, ""


def _starts(library: Library) -> list[Any]:
    """Links to what can be opened: the study files of the folder and of folders in it, and what was run."""
    files = [name for each in studies_in(Path.cwd(), below=True) if FILE.fullmatch(name := str(each))]
    shown: list[Any] = ["Start from ", dcc.Link("the template", href="/write")]
    try:
        stored = [row["name"] for row in library.listing()][:12]
    except StoreError:  # the page of studies says what is wrong with the store
        stored = []
    for name in stored:
        shown += [" · ", dcc.Link(f"{name} as it was run", href=f"/write?study={name}")]
    links = [dcc.Link(each, href=f"/write?file={each}") for each in files]
    if len(links) <= _FEW:
        return [*shown, *(part for link in links for part in (" · ", link))]
    summary = html.Summary(f"or from one of {len(links)} files here")
    return [*shown, html.Details([summary, html.Div(links, className="files")], className="more")]


def _plan(plan: dict[str, Any]) -> list[Component]:
    """What is said of the trials, then a row per variant, its changes below its name."""
    heads = ["variant", "parameters", plan["more"], "FLOPs/token"]
    rows = []
    for row in plan["variants"]:
        changes = [html.Div(each, className="change-line") for each in row["changes"]]
        numbers = [html.Td(row[each], className="to-r") for each in ("parameters", "more", "flops")]
        rows.append(html.Tr([html.Td([row["name"], *changes]), *numbers]))
    head = html.Tr([html.Th(each, className="to-r" if i else None) for i, each in enumerate(heads)])
    table = html.Table([html.Thead(head), html.Tbody(rows)], className="searched plan-table")
    lines = html.Ul([html.Li(each, className="inner" if each[:1] == " " else None) for each in plan["lines"]])
    return [html.Div(lines, className="plan-lines"), *([table] if rows else [])]


def _found(found: dict[str, Any]) -> list[Component]:
    """The problems, each with its line, or the plan."""
    if not found["problems"]:
        return [html.H2("Plan"), *_plan(found["plan"])]
    many = len(found["problems"])
    items = []
    for each in found["problems"]:
        place = {"data-line": str(each["line"]), "data-column": str(each["column"])}
        where = [html.Button(f"line {each['line']}", className="to-line", **place), " "] if each["line"] else []
        items.append(html.Li([*where, each["message"]]))
    return [html.H2(f"{many} problem{'s' * (many > 1)}"), html.Ul(items, className="problems")]
