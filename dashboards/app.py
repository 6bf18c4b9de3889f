"""The web application: pages, downloads, and the rule that nothing is loaded from anywhere else."""

from __future__ import annotations

import io
from pathlib import Path

import dash
import dash_mantine_components as dmc
import flask
from dash import Input, html

from dashboards import theme
from dashboards.library import Library, NotFound
from dashboards.pages import studies, study
from dashboards.parts import card, frame
from search.reporting import report
from search.store import StoreError

DOWNLOADS = {
    "md": ("md", "text/markdown"),
    "csv": ("csv", "text/csv"),
    "tex": ("latex", "application/x-tex"),
    "json": ("json", "application/json"),
}
"""Ending of the address: (format of the report, media type)."""

POLICY = "; ".join(
    [
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "frame-ancestors 'self'",
    ]
)
"""The browser itself refuses what is not from here; Dash needs inline scripts."""


NEEDED_LATER = (
    "/_dash-component-suites/plotly/package_data/plotly.min.js",
    "/_dash-component-suites/dash_ag_grid/async-community.js",
)
"""Scripts that Dash asks for only when the first figure or table has arrived; a study's page loads them at once."""


def make_app(store_root: Path) -> dash.Dash:
    """The dashboard of one store. The store may be absent, broken or growing: pages say so and look again."""
    library = Library(Path(store_root))
    app = dash.Dash(
        "archlab",
        title="archlab",
        update_title="",
        use_pages=True,
        pages_folder="",
        assets_folder=str(Path(__file__).parent / "assets"),
        suppress_callback_exceptions=True,
        serve_locally=True,
        compress=True,
        add_log_handler=False,
    )
    app.server.config["LIBRARY"] = library
    app.server.config["COMPRESS_STREAMS"] = False  # it leaves files open; only our own few assets are streamed
    studies.register(app, library)
    study.register(app, library)
    dash.register_page("not_found_404", layout=_no_page)
    page = frame(dash.page_container, library.root)
    app.layout = dmc.MantineProvider(html.Div(page), theme=theme.MANTINE, defaultColorScheme="light")
    app.clientside_callback("() => window.location.reload()", Input("retry", "n_intervals"), prevent_initial_call=True)
    _serve_downloads(app.server, library)
    app.server.after_request(_stay_local)
    return app


def _no_page(**_: object) -> object:
    return card(
        "No such page",
        html.P(["There are the ", dash.dcc.Link("studies", href="/"), " and a page for each."]),
        kind="missing",
    )


def _stay_local(response: flask.Response) -> flask.Response:
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["Referrer-Policy"] = "no-referrer"
    response.headers["X-Content-Type-Options"] = "nosniff"
    if flask.request.path.startswith("/study/"):
        response.headers["Link"] = ", ".join(f"<{path}>; rel=preload; as=script" for path in NEEDED_LATER)
    return response


def _serve_downloads(server: flask.Flask, library: Library) -> None:
    @server.get("/download/<name>.<ending>")
    def download(name: str, ending: str) -> flask.Response:
        """The report of a study as a file, the same text that `archlab report` prints."""
        if ending not in DOWNLOADS:
            return flask.Response(f"there is no .{ending}: {', '.join(DOWNLOADS)}\n", 404, mimetype="text/plain")
        form, media = DOWNLOADS[ending]
        try:
            found = library.summary(name)
        except (NotFound, StoreError) as error:
            return flask.Response(f"{error}\n", 404, mimetype="text/plain")
        if found.comparison is None:
            return flask.Response(f"{found.problem}\n", 409, mimetype="text/plain")
        text = io.BytesIO(report(found.comparison, form).encode())
        return flask.send_file(text, mimetype=media, as_attachment=True, download_name=f"{name}.{ending}")
