"""Serves the dashboard on this machine until Ctrl-C."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import threading
import webbrowser
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from werkzeug.serving import BaseWSGIServer, make_server

from dashboards import PortTaken, make_app

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

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
            return _bind(_for_us(app.server, host), host, candidate)
        except PortTaken:
            if port is not None:
                raise
    raise PortTaken(f"ports {first} to {first + TRIES - 1} of {host} are all in use: name a free one with --port")


def _for_us(application: WSGIApplication, host: str) -> WSGIApplication:
    """Answers requests that were meant for this server, others with 403.

    A page of the internet can let its own name lead to this machine, and would then read the answers as its own; so
    the name that a request asks for must be of loopback or the one listened on, or an address where that is any.
    """

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        asked = str(environ.get("HTTP_HOST", "")).lower()
        name = asked[1:].partition("]")[0] if asked.startswith("[") else asked.partition(":")[0]
        if _is_ours(name.rstrip("."), host.lower()):
            return application(environ, start)
        start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"this is the dashboard of archlab, not {name[:100]!r}: use the address that it printed\n".encode()]

    return answer


def _is_ours(name: str, host: str) -> bool:
    if name == host or _is_loopback(name):
        return True
    if not _is_address(host) or not ipaddress.ip_address(host).is_unspecified:
        return False
    return _is_address(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
