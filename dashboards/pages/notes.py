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


def register(app: dash.Dash, library: Library) -> None:
    """Adds what keeps a note when it has been written."""
    text, tags, said = ({"note": MATCH, "part": part} for part in ("text", "tags", "said"))

    @app.callback(
        Output(said, "children"),
        Output(tags, "value"),
        Input(text, "value"),
        Input(tags, "value"),
        prevent_initial_call=True,
    )
    def keep(text: str | None, tags: list[str] | None) -> Any:
        if reads_only():
            return "This dashboard only reads.", no_update
        kind, _, name = dash.ctx.outputs_list[0]["id"]["note"].partition(" ")
        changed = {each["part"] for each in dash.ctx.triggered_prop_ids.values()}
        if not library.knows(**{kind: name}):
            return html.Span(f"Not kept: there is no {kind} {name!r}.", className="problem"), no_update
        try:
            library.write(
                text or "" if "text" in changed else None, tags or [] if "tags" in changed else None, **{kind: name}
            )
        except (ValueError, StoreError) as error:
            refused = html.Span(f"Not kept: {error}", className="problem")
            return refused, library.tags(**{kind: name}) if "tags" in changed else no_update
        return "Kept.", no_update


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
        debounce=600,
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
