"""What a reader takes along: the report of a study, its table as it is shown, and where the numbers come from."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import flask

from archlab.dashboards.library import Library, NotFound, Study
from archlab.dashboards.pages.table import wanted
from archlab.dashboards.words import command_elsewhere
from archlab.search.store.store import StoreError

if TYPE_CHECKING:  # which a server starts without
    from archlab.search.results.comparison import Comparison

DOWNLOADS = {
    "md": ("md", "text/markdown"),
    "csv": ("csv", "text/csv"),
    "tex": ("latex", "application/x-tex"),
    "json": ("json", "application/json"),
}
"""Ending of the address: (format of the report, media type)."""


def register(server: flask.Flask, library: Library) -> None:
    """Adds the addresses below `/download/` to a server."""

    def found(name: str, ending: str) -> tuple[Study, Comparison]:
        if ending not in DOWNLOADS:
            flask.abort(_refused(f"there is no .{ending}: {', '.join(DOWNLOADS)}", 404))
        try:
            study = library.summary(name)
        except (NotFound, StoreError) as error:
            flask.abort(_refused(str(error), 404))
        if study.comparison is None:
            flask.abort(_refused(study.problem or "", 409))
        return study, study.comparison

    @server.get("/download/<name>.<ending>")
    def whole(name: str, ending: str) -> flask.Response:
        """The report of a study, the same text that `archlab report` prints."""
        from archlab.search.reporting.report import report

        _, comparison = found(name, ending)
        form, media = DOWNLOADS[ending]
        return _file(report(comparison, form), media, f"{name}.{ending}")

    @server.get("/download/<name>/table.<ending>")
    def table(name: str, ending: str) -> flask.Response:
        """The ablation table in the shape that the address asks for."""
        from archlab.search.reporting.report import report

        study, comparison = found(name, ending)
        form, media = DOWNLOADS[ending]
        asked, wrong = wanted(flask.request.args, study)
        if wrong:  # a file has no place for a notice
            return _refused("\n".join(wrong), 400)
        try:
            return _file(report(comparison, form, asked.shape), media, f"{name}-table.{ending}")
        except ValueError as error:  # a filter that says nothing
            return _refused(str(error), 400)

    @server.get("/download/<name>/provenance.json")
    def provenance(name: str) -> flask.Response:
        """What `archlab figures` says of where the numbers come from, and the command that computes them."""
        from archlab.dashboards.paper.files import provenance as told  # with matplotlib, which a server starts without

        study, _ = found(name, "json")
        text = json.dumps(told(study, command_elsewhere(study)), indent=2, ensure_ascii=False) + "\n"
        return _file(text, "application/json", f"{name}-provenance.json")


def _file(text: str, media: str, name: str) -> flask.Response:
    return flask.send_file(io.BytesIO(text.encode()), mimetype=media, as_attachment=True, download_name=name)


def _refused(why: str, status: int) -> flask.Response:
    return flask.Response(f"{why}\n", status, mimetype="text/plain")
