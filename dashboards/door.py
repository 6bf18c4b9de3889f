"""Who may read the dashboard: requests that were meant for it, from its own pages, and where asked with its token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import socket
import time
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from werkzeug.wrappers import Request, Response

from archlab.dashboards.errors import WeakToken
from archlab.dashboards.rate import REQUESTS, REQUESTS_PER_S, Buckets, Clock, TooOften, Tries, client_of

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

LOGIN = "/login"
TOKEN = "ARCHLAB_TOKEN"
MOST_BYTES = 4096  # of a form with a token
DAYS = 30
SHORTEST = 16
"""Characters of a token that somebody thought of; ours have 32."""


def given_token() -> str | None:
    """The token that the environment gives, None where it gives none. Raises WeakToken."""
    given = os.environ.get(TOKEN)
    if given is not None and len(given) < SHORTEST:
        raise WeakToken(f"{TOKEN} has {len(given)} characters: use at least {SHORTEST}, or unset it to get a new one")
    return given


class Door:
    """A WSGI application that lets requests through to another one, or says why not.

    A page of the internet can let its own name lead to this machine and would read the answers as its own, so the name
    that a request asks for must be of loopback or the one listened on, or an address where that is any. A POST must
    come from a page of ours. With a `token` each request needs it: once in the address or in a form, which sets a
    cookie that scripts can't read and other sites don't send, or as `Authorization: Bearer`. An address that asks too
    often, or has the token wrong too often, has to wait: by the `clock`, which tells seconds.
    """

    def __init__(
        self, application: WSGIApplication, host: str, token: str | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._application, self._host = application, host.lower()
        self._token = None if token is None else token.encode()
        self._requests, self._tries = Buckets(REQUESTS, REQUESTS_PER_S, "too many requests", clock), Tries(clock)

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        try:
            self._requests.take(_client(environ))
            refusal = self._refusal(Request(environ))
        except TooOften as error:
            refusal = _answer(f"{error}\n", 429)
            refusal.headers["Retry-After"] = str(error.wait_s)
        return (refusal or self._application)(environ, start)

    def _refusal(self, request: Request) -> Response | None:
        """What is answered instead; None for a request that may pass."""
        asked = request.environ.get("HTTP_HOST", "").lower()
        if not is_ours(name_of(asked), self._host):
            said = f"this is the dashboard of archlab, not {name_of(asked)[:100]!r}: use the address that it printed\n"
            return _answer(said, 403)
        if request.method not in ("GET", "HEAD", "OPTIONS") and not _from_us(request, asked):
            return _answer("only pages of this dashboard may send it anything\n", 403)
        return None if self._token is None else self._login(request)

    def _login(self, request: Request) -> Response | None:
        """None for those who show the token or the cookie that stands for it; the others are asked."""
        query = request.query_string.decode("latin1")
        if request.path == LOGIN and request.method == "POST":
            form = dict(parse_qsl(request.stream.read(MOST_BYTES).decode("utf-8", "replace")))
            return self._enter(request, form.get("token", ""), form.get("to", "/"))
        path, given = quote(request.environ.get("PATH_INFO", "/")), dict(parse_qsl(query)).get("token")
        if given is not None:
            rest = urlencode([(name, value) for name, value in parse_qsl(query) if name != "token"])
            return self._enter(request, given, path + (f"?{rest}" if rest else ""))
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._is_token(request, bearer) or self._is_pass(request, request.cookies.get(_name(request), "")):
            return None
        return self._ask(path + (f"?{query}" if query else "") if path != LOGIN else "/")

    def _enter(self, request: Request, given: str, to: str) -> Response:
        """Sets the cookie and goes on from a page of ours: a redirect of a foreign link would not bring it along."""
        if not self._is_token(request, given):
            return self._ask(to, "That is not the token.")
        to = escape(to if _PATH.fullmatch(to) else "/")
        page = f'<!doctype html><meta http-equiv="refresh" content="0;url={to}"><a href="{to}">Go on</a>'
        response = _answer(page, 200)
        limits = {"secure": request.is_secure, "httponly": True, "samesite": "Strict"}
        response.set_cookie(_name(request), self._pass(), max_age=DAYS * 86400, **limits)
        return response

    def _ask(self, to: str, problem: str = "") -> Response:
        response = _answer(_PAGE.format(to=escape(to), problem=escape(problem), login=LOGIN), 401)
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    def _is_token(self, request: Request, given: str) -> bool:
        return self._is(request, "token", given, self._token or b"")

    def _is_pass(self, request: Request, given: str) -> bool:
        return self._is(request, "pass", given, self._pass().encode())

    def _is(self, request: Request, kind: str, given: str, right: bytes) -> bool:
        """Whether that is what is right. Raises TooOften for an address that has been wrong too often."""
        return self._tries.is_right(
            _client(request.environ),
            kind,
            given,
            lambda told: hmac.compare_digest(told.encode("utf-8", "surrogateescape"), right),
        )

    def _pass(self) -> str:
        """What the cookie holds: made of the token, which can't be made of it."""
        assert self._token is not None
        return hmac.new(self._token, b"archlab dashboard", hashlib.sha256).hexdigest()


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>archlab</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 26rem; margin: 18vh auto; padding: 0 1rem }}
:root {{ color-scheme: light dark }}
input, button {{ font: inherit; padding: .4rem .6rem }}
input {{ width: 100%; box-sizing: border-box; margin: .5rem 0 }}
</style>
<h1>archlab</h1>
<p>This dashboard asks for the token that <code>archlab dashboard</code> printed where it was started.</p>
<form method="post" action="{login}"><input type="hidden" name="to" value="{to}">
<label>Token<input type="password" name="token" autofocus autocomplete="current-password"></label>
<button>Open</button> <span role="alert">{problem}</span></form></html>
"""


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"


def _answer(text: str, status: int) -> Response:
    headers = {
        "Cache-Control": "no-store",
        "Referrer-Policy": "same-origin",  # under a stricter one a browser sends the form without its origin
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": _POLICY,
    }
    return Response(text, status, headers, mimetype="text/html" if text.startswith("<!") else "text/plain")


def _client(environ: WSGIEnvironment) -> str:
    """Who asks: never what a header says, which anybody can write."""
    return client_of(str(environ.get("REMOTE_ADDR", "")))


def _from_us(request: Request, asked: str) -> bool:
    """Whether what is sent comes from a page of this server, or from no page at all: a program."""
    if request.origin is not None:
        try:
            return urlsplit(request.origin).netloc.lower() == asked
        except ValueError:  # it is no address at all
            return False
    return request.headers.get("Sec-Fetch-Site", "same-origin") in ("same-origin", "none")


_PATH = re.compile(r"/([^/\\\x00-\x20\x7f][^\x00-\x20\x7f]*)?")
"""A path of this server: browsers leave out tabs and line ends, and take two slashes for another server."""


def _name(request: Request) -> str:
    """Of the cookie: browsers have one jar for all ports of a host."""
    return f"archlab-{request.environ.get('SERVER_PORT', '')}"


def name_of(asked: str) -> str:
    """The name in a Host header, without its port."""
    name = asked[1:].partition("]")[0] if asked.startswith("[") else asked.partition(":")[0]
    return name.rstrip(".")


def is_ours(name: str, host: str) -> bool:
    """Whether a server that listens on `host` is meant by that name."""
    if name == host or is_loopback(name):
        return True
    if not _is_address(host) or not ipaddress.ip_address(host).is_unspecified:
        return False
    return _is_address(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
