"""The note and the tags of a study or a trial, where a reader writes them: kept as soon as they have been written."""

from __future__ import annotations

from typing import Any

import dash
import dash_mantine_components as dmc
from dash import MATCH, Input, Output, html, no_update
from dash.development.base_component import Component

from archlab.dashboards.library import Library
from archlab.dashboards.parts import reads_only
from archlab.search.store.notes import Note
from archlab.search.store.store import StoreError

KEPT = "Kept."


def register(app: dash.Dash, library: Library) -> None:
    """Adds what keeps a note when it has been written."""
    text, tags, said = ({"note": MATCH, "part": part} for part in ("text", "tags", "said"))
    answer = Output(said, "children", allow_duplicate=True)

    # one callback each: of a callback that is asked for again, a browser may drop the request before
    @app.callback(answer, Input(text, "value"), prevent_initial_call=True)
    def keep_text(text: str | None) -> Any:
        return _kept(library, text=text or "")

    @app.callback(answer, Output(tags, "value"), Input(tags, "value"), prevent_initial_call=True)
    def keep_tags(tags: list[str] | None) -> Any:
        said = _kept(library, tags=tags or [])
        return said, no_update if said == KEPT or reads_only() else library.tags(**_place())


def _place() -> dict[str, str]:
    """What the note that is written is of: {"study": its name} or {"trial": its key}."""
    outputs = dash.ctx.outputs_list
    first = outputs[0] if isinstance(outputs, list) else outputs
    kind, _, name = first["id"]["note"].partition(" ")
    return {kind: name}


def _kept(library: Library, text: str | None = None, tags: list[str] | None = None) -> Any:
    """Keeps one part of the note, and says so, or why not."""
    if reads_only():
        return "This dashboard only reads."
    place = _place()
    try:
        if not library.knows(**place):
            raise ValueError("there is no {} {!r}".format(*place.popitem()))
        library.write(text, tags, **place)
    except (ValueError, StoreError) as error:
        return html.Span(f"Not kept: {error}", className="problem")
    return KEPT


def note_box(note: Note, study: str = "", trial: str = "") -> Component:
    """The note and the tags of a study or a trial, to read and to write."""
    if reads_only():
        text = html.P(note.text, className="note-text") if note.text else None
        return html.Div([tags_of(note), text] if note else [], className="note")
    name = f"study {study}" if study else f"trial {trial}"
    own = {part: {"note": name, "part": part} for part in ("text", "tags", "said")}
    text = dmc.Textarea(
        id=own["text"],
        value=note.text,
        placeholder="What did you find, what comes next?",
        autosize=True,
        minRows=1,
        maxRows=12,
        debounce=300,
        size="sm",
        **{"aria-label": "Note"},
    )
    tags = dmc.TagsInput(
        id=own["tags"],
        value=[*note.tags],
        placeholder="" if note.tags else "Add a tag",
        size="sm",
        **{"aria-label": "Tags"},
    )
    said = html.Span(id=own["said"], className="muted small", role="status")
    return html.Div([text, tags, said], className="note")


def tags_of(note: Note) -> Component | None:
    """The tags as badges, None without one."""
    tags = [html.Span(tag, className="tag") for tag in note.tags]
    return html.Span(tags, className="tags") if tags else None
