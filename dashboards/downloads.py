"""What a reader takes along: the report of a study, its table as it is shown, and where the numbers come from."""

from __future__ import annotations

import io
import json

import flask

from archlab.dashboards.library import Library, NotFound, Study
from archlab.dashboards.pages.table import wanted
from archlab.dashboards.words import command_elsewhere
from archlab.search.store.store import StoreError

DOWNLOADS = {
    "md": ("md", "text/markdown"),
    "csv": ("csv", "text/csv"),
    "tex": ("latex", "application/x-tex"),
    "json": ("json", "application/json"),
}
"""Ending of the address: (format of the report, media type)."""


def register(server: flask.Flask, library: Library) -> None:
    """Adds the addresses below `/download/` to a server."""

    def study_of(name: str) -> Study:
        try:
            study = library.summary(name)
        except (NotFound, StoreError) as error:
            flask.abort(_refused(str(error), 404))
        if study.comparison is None:
            flask.abort(_refused(study.problem or "", 409))
        return study

    @server.get("/download/<name>.<ending>", defaults={"only_table": False})
    @server.get("/download/<name>/table.<ending>", defaults={"only_table": True})
    def text(name: str, ending: str, only_table: bool) -> flask.Response:
        """The text that `archlab report` prints of a study, or its table in the shape that the address asks for."""
        from archlab.search.reporting.report import report

        if ending not in DOWNLOADS:
            return _refused(f"there is no .{ending}: {', '.join(DOWNLOADS)}", 404)
        study, (form, media) = study_of(name), DOWNLOADS[ending]
        if not only_table:
            return _file(report(study.comparison, form), media, f"{name}.{ending}")
        asked, wrong = wanted(flask.request.args, study)
        if wrong:  # a file has no place for a notice
            return _refused("\n".join(wrong), 400)
        try:
            return _file(report(study.comparison, form, asked.shape), media, f"{name}-table.{ending}")
        except ValueError as error:  # a filter that says nothing
            return _refused(str(error), 400)

    @server.get("/download/<name>/provenance.json")
    def provenance(name: str) -> flask.Response:
        """What `archlab figures` says of where the numbers come from, and the command that computes them."""
        from archlab.dashboards.paper.files import (
            provenance as provenance_of,
        )  # with pandas, which a server starts without

        study = study_of(name)
        facts = json.dumps(provenance_of(study, command_elsewhere(study)), indent=2, ensure_ascii=False) + "\n"
        return _file(facts, "application/json", f"{name}-provenance.json")


def _file(text: str, media: str, name: str) -> flask.Response:
    return flask.send_file(io.BytesIO(text.encode()), mimetype=media, as_attachment=True, download_name=name)


def _refused(why: str, status: int) -> flask.Response:
    return flask.Response(f"{why}\n", status, mimetype="text/plain")
