"""The study as one page to keep or to send, and its figures for a paper."""

from __future__ import annotations

import shlex
import threading
from typing import TYPE_CHECKING

import dash
import flask
from dash import html
from dash.development.base_component import Component

from archlab.dashboards import words
from archlab.dashboards.library import Library, NotFound, Study
from archlab.dashboards.pages.shell import REPORT, Chosen, needs_comparison, refusal, register_tab
from archlab.dashboards.parts import command_line, here, section
from archlab.search.store.store import StoreError

if TYPE_CHECKING:  # which a server starts without
    from archlab.search.results.comparison import Comparison


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/report`, and what it shows at `/report/<name>.html`."""
    register_tab(app, library, REPORT, lambda _: [], content)
    lock = threading.Lock()
    made: dict[str, tuple[str, str]] = {}

    @app.server.get("/report/<name>.html")
    def report(name: str) -> flask.Response:
        """The page that `archlab report --html` writes, made once per result."""
        from archlab.dashboards.paper.page import POLICY, page

        try:
            study = library.study(name)
        except (NotFound, StoreError) as error:
            return refusal(str(error), 404)
        if study.comparison is None:
            return refusal(str(study.problem), 409)
        version = REPORT.version(study)
        with lock:
            if made.get(name, ("",))[0] != version:
                with library.reading():
                    text = page(study, words.command_elsewhere(study))
                made[name] = version, text
            response = flask.Response(made[name][1], mimetype="text/html")
        response.headers["Content-Security-Policy"] = f"{POLICY}; frame-ancestors 'self'; sandbox"
        if "download" in flask.request.args:
            response.headers["Content-Disposition"] = f"attachment; filename={name}.html"
        return response


@needs_comparison
def content(study: Study, _: Comparison, __: Chosen) -> list[Component]:
    """The report as it will be read, and what writes it and the figures."""
    figures = shlex.join(["archlab", "figures", study.name, "--width", "3.25", *here()])
    page = shlex.join(["archlab", "report", study.name, "--html", f"{study.name}.html", *here()])
    link = html.A("download it", href=f"/report/{study.name}.html?download")
    lead = "One page with the tables, figures, diagrams, method and provenance, which opens without a network: "
    frame = html.Iframe(
        src=f"/report/{study.name}.html?version={REPORT.version(study)}",
        title=f"Report of {study.name}",
        className="report-frame",
        sandbox="",
    )
    files = html.P("Each figure as PDF, SVG and PNG with its numbers as CSV, the tables, and provenance.json.")
    return [
        html.P([lead, link, "."], className="lead"),
        html.Div(frame, className="report-box"),
        section("Write it", command_line(page)),
        section("For a paper", files, command_line(figures)),
    ]
