"""Serves the dashboard on this machine until Ctrl-C."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from werkzeug.serving import BaseWSGIServer, make_server

from archlab.dashboards.app import make_app
from archlab.dashboards.door import TOKEN, Door, given_token, is_loopback
from archlab.dashboards.errors import PortTaken
from archlab.dashboards.library import Library

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

DEFAULT_PORT = 8050
TRIES = 50
NO_TLS = (
    "This is HTTP without TLS: whoever can read the network on the way reads the token and the studies. "
    "Rather leave --host out, and reach it by ssh -L {port}:127.0.0.1:{port} THIS_MACHINE."
)


def serve(
    store_root: Path,
    host: str = "127.0.0.1",
    port: int | None = None,
    open_browser: bool = False,
    read_only: bool = False,
) -> None:
    """Shows a store in the browser: prints the address and serves until Ctrl-C.

    Without `port` the first free one from 8050 on is taken. Raises PortTaken for an explicit one that is in use,
    WeakToken for one that is easily guessed, and OSError for a host that is not of this machine. A host other than
    loopback asks for a token: that of the variable ARCHLAB_TOKEN, with which loopback asks for it too, or a new one.
    With `read_only` its pages write nothing and start nothing.
    """
    token = token_for(host)
    app = make_app(Path(store_root), read_only)
    server = _listen(app.server, host, port, token)
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}/"
    if token is not None and TOKEN not in os.environ:  # one that is ours is told
        url += f"?token={token}"
    print(f"archlab dashboard of {Path(store_root).absolute()}\n  {url}   (Ctrl-C stops it)", flush=True)
    if token is not None and TOKEN in os.environ:
        print(f"  It asks for the token in {TOKEN}.", flush=True)
    if not is_loopback(host):
        print(f"  {NO_TLS.format(port=server.port)}", flush=True)
    if open_browser:
        threading.Timer(0.3, webbrowser.open, [url]).start()
    library: Library = app.server.config["LIBRARY"]
    threading.Thread(target=library.prepare, name="prepare", daemon=True).start()  # while a browser loads its scripts
    server.serve_forever()  # returns on Ctrl-C


def token_for(host: str) -> str | None:
    """The token that a server on `host` asks for, None where it asks for none. Raises WeakToken."""
    return given_token() or (None if is_loopback(host) else secrets.token_urlsafe(24))


def listen(
    store_root: Path, host: str = "127.0.0.1", port: int | None = None, token: str | None = None
) -> BaseWSGIServer:
    """A server that is bound and not yet serving; its `port` says where. Raises as `serve` does."""
    return _listen(make_app(Path(store_root)).server, host, port, token)


def _listen(application: WSGIApplication, host: str, port: int | None, token: str | None) -> BaseWSGIServer:
    if token is None and not is_loopback(host):
        raise ValueError(f"a server on {host}, which others can reach, needs a token")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    first = DEFAULT_PORT if port is None else port
    for candidate in range(first, first + (TRIES if port is None else 1)):
        try:
            return _bind(Door(application, host, token), host, candidate)
        except PortTaken:
            if port is not None:
                raise
    raise PortTaken(f"ports {first} to {first + TRIES - 1} of {host} are all in use: name a free one with --port")


def _bind(application: WSGIApplication, host: str, port: int) -> BaseWSGIServer:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                reason = "is in use" if error.errno == errno.EADDRINUSE else "needs more rights"
                raise PortTaken(f"port {port} of {host} {reason}: name another with --port, or leave it out") from error
            raise OSError(error.errno, f"can't listen on {host}: {error.strerror}") from error
        listener.listen(128)
        return make_server(host, port, application, threaded=True, fd=listener.fileno())
