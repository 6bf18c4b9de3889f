"""Studies in a browser: what `search` stored, shown by pages that train nothing and load nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from archlab.dashboards.errors import PortTaken, WeakToken

if TYPE_CHECKING:
    import dash

__all__ = ["PortTaken", "WeakToken", "make_app", "serve"]


def make_app(store_root: Path, read_only: bool = False) -> dash.Dash:
    """The dashboard of one store as a Dash application (its `server` is a WSGI application)."""
    from archlab.dashboards.app import make_app as make

    return make(store_root, read_only)


def serve(
    store_root: Path,
    host: str = "127.0.0.1",
    port: int | None = None,
    open_browser: bool = False,
    read_only: bool = False,
) -> None:
    """Prints the address of the dashboard and serves it until Ctrl-C; see `archlab.dashboards.server.serve`."""
    from archlab.dashboards.server import serve as run

    run(store_root, host, port, open_browser, read_only)
