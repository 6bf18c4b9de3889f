"""Speaks the Model Context Protocol over HTTP, on loopback, to those who show the token."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import uvicorn

from archlab.cli.referee_server.desk import Desk
from archlab.cli.referee_server.serve import Answers, server_of
from archlab.cli.referee_server.worker import Worker
from archlab.dashboards.door import TOKEN, given_token
from archlab.dashboards.errors import PortTaken
from archlab.dashboards.rate import TooOften, Tries

HOST, PATH = "127.0.0.1", "/mcp"
_MOST_CLIENTS = 100
_BEARER = "Bearer "


class TokenDoor:
    """An ASGI application that lets through to another one who shows the token, as `Authorization: Bearer`. Who shows
    wrong ones too often has to wait. That a page of the internet asks is for the other one to see: by the host and the
    origin that a request names."""

    def __init__(self, application: Any, token: str) -> None:
        self._application, self._token = application, token.encode()
        self._tries = Tries(time.monotonic)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            shown = dict(scope["headers"]).get(b"authorization", b"").decode("latin1")
            try:
                if not self._is_token(scope, shown.removeprefix(_BEARER) if shown.startswith(_BEARER) else ""):
                    said = f"this server asks for its token, as a header: Authorization: {_BEARER}TOKEN"
                    await _answer(send, 401, said, (b"www-authenticate", b"Bearer"))
                    return
            except TooOften as error:
                await _answer(send, 429, str(error), (b"retry-after", str(error.wait_s).encode()))
                return
        await self._application(scope, receive, send)

    def _is_token(self, scope: Any, shown: str) -> bool:
        """Raises TooOften."""
        address = (scope.get("client") or [""])[0]
        found: bool = self._tries.is_right(
            address, "token", shown, lambda told: hmac.compare_digest(told.encode("latin1"), self._token)
        )
        return found


async def _answer(send: Any, status: int, said: str, header: tuple[bytes, bytes]) -> None:
    headers = [header, (b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{said}\n".encode()})


def serve_http(desk: Desk, port: int) -> None:
    """Until Ctrl-C. What runs then writes checkpoints, and the queue stays as it is.

    The token is that of the variable ARCHLAB_TOKEN, or a new one, which is printed. Raises WeakToken for one that is
    easily guessed, PortTaken.
    """
    given = given_token()
    token = given or secrets.token_urlsafe(24)
    with _listener(port) as listener:
        shown = f"the token in {TOKEN}" if given else token
        print(f"archlab mcp of {desk.job.study}\n  http://{HOST}:{port}{PATH}   (Ctrl-C stops it)", flush=True)
        print(f"  Authorization: {_BEARER}{shown}", flush=True)
        with suppress(KeyboardInterrupt):  # which the server raises again when it has ended
            asyncio.run(_serve(desk, token, listener))
    sys.stderr.flush()
    os._exit(0)  # a question that is still looked at would keep it


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(_MOST_CLIENTS)  # who reads the address may ask at once
    except OSError as error:
        listener.close()
        raise PortTaken(f"can't listen on port {port} of {HOST}: {error.strerror}; name another with --port") from error
    return listener


async def _serve(desk: Desk, token: str, listener: socket.socket) -> None:
    worker = Worker(desk)
    application = server_of(Answers(desk, worker)).streamable_http_app(
        streamable_http_path=PATH, host=HOST, max_sessions=_MOST_CLIENTS
    )
    config = uvicorn.Config(
        TokenDoor(application, token), log_level="critical", ws="none", timeout_graceful_shutdown=1, server_header=False
    )
    await uvicorn.Server(config).serve(sockets=[listener])
    worker.let_go()
