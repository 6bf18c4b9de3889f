"""The web application: pages, downloads, and the rule that nothing is loaded from anywhere else."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import dash
import dash_mantine_components as dmc
import flask
from dash import Input, html
from dash.exceptions import DependencyException

from archlab.dashboards import callbacks, downloads, pages, theme
from archlab.dashboards.library import Library
from archlab.dashboards.optuna_mount import Mount
from archlab.dashboards.parts import READ_ONLY, card, frame
from archlab.dashboards.sent import sent_json

POLICY = "; ".join(
    [
        "default-src 'self'",
        "script-src 'self' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "frame-ancestors 'self'",
    ]
)
"""The browser itself refuses what is not from here. A page names the scripts that Dash writes into it, by hashes."""
MOST_BYTES = 8_000_000
"""Of what is sent to it: more than the largest study, or the rows of the largest table."""
LOCAL = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of every answer, but for pages that say something stricter."""
NEEDED_LATER = (
    "/_dash-component-suites/plotly/package_data/plotly.min.js",
    "/_dash-component-suites/dash_ag_grid/async-community.js",
)
"""Scripts that Dash asks for only when the first figure or table has arrived; a study's page loads them at once."""


def make_app(store_root: Path, read_only: bool = False) -> dash.Dash:
    """The dashboard of one store. The store may be absent, broken or growing: pages say so and look again. With
    `read_only` its pages change nothing and start nothing."""
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
    app.server.config["LIBRARY"], app.server.config[READ_ONLY] = library, read_only
    app.server.config["COMPRESS_STREAMS"] = False  # it leaves files open; only our own few assets are streamed
    for file in iter_modules(pages.__path__):
        page = import_module(f"{pages.__name__}.{file.name}")
        if hasattr(page, "register"):  # others are what pages share
            page.register(app, library)
    dash.register_page("not_found_404", layout=_no_page)
    framed = html.Div(frame(dash.page_container, library.root))
    app.layout = dmc.MantineProvider(framed, theme=theme.MANTINE, defaultColorScheme="auto")
    app.clientside_callback("() => window.location.reload()", Input("retry", "n_intervals"), prevent_initial_call=True)
    downloads.register(app.server, library)
    app.server.config["MAX_CONTENT_LENGTH"] = MOST_BYTES
    app.server.before_request(partial(_refuse_malformed, app))
    app.server.register_error_handler(DependencyException, _no_script)
    app.server.after_request(partial(_stay_local, app))
    app.server.wsgi_app = Mount(app.server.wsgi_app, library.root, LOCAL)  # type: ignore[method-assign]
    return app


def _refuse_malformed(app: dash.Dash) -> flask.Response | None:
    """An answer to what calls itself a callback and can be none, at which Dash would stumble."""
    if flask.request.path != callbacks.PATH or callbacks.is_callback(app, sent_json()):
        return None
    return flask.Response("this is no callback of these pages\n", 400, mimetype="text/plain")


def _no_page(**_: object) -> object:
    said = html.P(["There are the ", dash.dcc.Link("studies", href="/"), " and a page for each."])
    return card("No such page", said, kind="missing")


def _no_script(_: Exception) -> flask.Response:
    """In place of a script that no component has."""
    return flask.Response("there is no such script\n", 404, mimetype="text/plain")


def _stay_local(app: dash.Dash, response: flask.Response) -> flask.Response:
    if response.mimetype == "text/html":
        own = " ".join(["script-src 'self'", *app.csp_hashes()])
        response.headers.setdefault("Content-Security-Policy", POLICY.replace("script-src 'self'", own))
    for name, value in LOCAL.items():
        response.headers.setdefault(name, value)
    if flask.request.path.startswith("/study/"):
        response.headers["Link"] = ", ".join(f"<{path}>; rel=preload; as=script" for path in NEEDED_LATER)
    return response
