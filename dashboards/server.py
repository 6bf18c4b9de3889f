"""Serves the dashboard on this machine until Ctrl-C."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import threading
import webbrowser
from pathlib import Path

from werkzeug.serving import BaseWSGIServer, make_server

from dashboards import PortTaken, make_app

DEFAULT_PORT = 8050
TRIES = 50


def serve(store_root: Path, host: str = "127.0.0.1", port: int | None = None, open_browser: bool = False) -> None:
    """Shows a store in the browser: prints the address and serves until Ctrl-C.

    Without `port` the first free one from 8050 on is taken. Raises PortTaken for an explicit one that is in use, and
    OSError for a host that is not of this machine. There is no login: a host other than loopback lets everyone who
    reaches it read the studies.
    """
    server = listen(store_root, host, port)
    url = f"http://{_shown(host)}:{server.port}/"
    print(f"archlab dashboard of {Path(store_root).absolute()}\n  {url}   (Ctrl-C stops it)", flush=True)
    if not _is_loopback(host):
        print("  There is no login: everyone who can reach this address can read the studies.", flush=True)
    if open_browser:
        threading.Timer(0.3, webbrowser.open, [url]).start()
    server.serve_forever()  # returns on Ctrl-C


def listen(store_root: Path, host: str = "127.0.0.1", port: int | None = None) -> BaseWSGIServer:
    """A server that is bound and not yet serving; its `port` says where. Raises as `serve` does."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = make_app(Path(store_root))
    first = DEFAULT_PORT if port is None else port
    for candidate in range(first, first + (TRIES if port is None else 1)):
        try:
            return _bind(app.server, host, candidate)
        except PortTaken:
            if port is not None:
                raise
    raise PortTaken(f"ports {first} to {first + TRIES - 1} of {host} are all in use: name a free one with --port")


def _bind(application: object, host: str, port: int) -> BaseWSGIServer:
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
