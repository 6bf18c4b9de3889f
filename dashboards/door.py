"""Who may read the dashboard: requests that were meant for it, from its own pages, and where asked with its token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from html import escape
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

LOGIN = "/login"
MOST_BYTES = 4096  # of a form with a token
DAYS = 30
SHORTEST = 16
"""Characters of a token that somebody thought of; ours have 32."""


class Door:
    """A WSGI application that lets requests through to another one, or says why not.

    A page of the internet can let its own name lead to this machine and would read the answers as its own, so the name
    that a request asks for must be of loopback or the one listened on, or an address where that is any. A POST must
    come from a page of ours. With a `token` each request needs it: once in the address or in a form, which sets a
    cookie that scripts can't read and other sites don't send, or as `Authorization: Bearer`.
    """

    def __init__(self, application: WSGIApplication, host: str, token: str | None = None) -> None:
        self._application, self._host = application, host.lower()
        self._token = None if token is None else token.encode()

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        asked = str(environ.get("HTTP_HOST", "")).lower()
        if not is_ours(name_of(asked), self._host):
            said = f"this is the dashboard of archlab, not {name_of(asked)[:100]!r}: use the address that it printed\n"
            return _answer(start, "403 Forbidden", said)
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD", "OPTIONS") and not _from_us(environ, asked):
            return _answer(start, "403 Forbidden", "only pages of this dashboard may send it anything\n")
        if self._token is None:
            return self._application(environ, start)
        return self._guarded(environ, start)

    def _guarded(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Lets those in who show the token or the cookie that stands for it; asks the others."""
        path, query = str(environ.get("PATH_INFO", "/")), str(environ.get("QUERY_STRING", ""))
        if path == LOGIN and environ["REQUEST_METHOD"] == "POST":
            form = dict(parse_qsl(_body(environ)))
            return self._enter(environ, start, form.get("token", ""), form.get("to", "/"))
        given = dict(parse_qsl(query)).get("token")
        if given is not None:
            rest = urlencode([(name, value) for name, value in parse_qsl(query) if name != "token"])
            return self._enter(environ, start, given, quote(path) + (f"?{rest}" if rest else ""))
        bearer = str(environ.get("HTTP_AUTHORIZATION", "")).removeprefix("Bearer ")
        if self._is_token(bearer) or hmac.compare_digest(_cookie(environ).encode(), self._pass().encode()):
            return self._application(environ, start)
        wanted = quote(path) + (f"?{query}" if query else "")
        return self._ask(start, wanted if path != LOGIN else "/")

    def _enter(self, environ: WSGIEnvironment, start: StartResponse, given: str, to: str) -> Iterable[bytes]:
        """Sets the cookie and goes on from a page of ours: a redirect of a foreign link would not bring it along."""
        if not self._is_token(given):
            return self._ask(start, to, "That is not the token.")
        to = to if to.startswith("/") and not to.startswith(("//", "/\\")) else "/"
        secure = "; Secure" if environ.get("wsgi.url_scheme") == "https" else ""
        crumb = f"{_name(environ)}={self._pass()}; Path=/; Max-Age={DAYS * 86400}; HttpOnly; SameSite=Strict{secure}"
        page = (
            f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(to)}"><a href="{escape(to)}">Go on</a>'
        )
        return _answer(start, "200 OK", page, [("Set-Cookie", crumb)])

    def _ask(self, start: StartResponse, to: str, problem: str = "") -> Iterable[bytes]:
        page = _PAGE.format(to=escape(to), problem=escape(problem), login=LOGIN)
        return _answer(start, "401 Unauthorized", page, [("WWW-Authenticate", "Bearer")])

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token)

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


def _answer(start: StartResponse, status: str, text: str, headers: Iterable[tuple[str, str]] = ()) -> Iterable[bytes]:
    kind = "html" if text.startswith("<!") else "plain"
    own = [
        ("Content-Type", f"text/{kind}; charset=utf-8"),
        ("Cache-Control", "no-store"),
        ("Referrer-Policy", "same-origin"),  # under a stricter one a browser sends the form without its origin
        ("X-Content-Type-Options", "nosniff"),
        ("Content-Security-Policy", _POLICY),
    ]
    start(status, [*own, *headers])
    return [text.encode()]


def _from_us(environ: WSGIEnvironment, asked: str) -> bool:
    """Whether what is sent comes from a page of this server, or from no page at all: a program."""
    origin = environ.get("HTTP_ORIGIN")
    if origin is not None:
        return urlsplit(str(origin)).netloc.lower() == asked
    return environ.get("HTTP_SEC_FETCH_SITE", "same-origin") in ("same-origin", "none")


def _body(environ: WSGIEnvironment) -> str:
    try:
        length = min(int(environ.get("CONTENT_LENGTH") or 0), MOST_BYTES)
    except ValueError:
        return ""
    found: bytes = environ["wsgi.input"].read(length)
    return found.decode("utf-8", "replace")


def _name(environ: WSGIEnvironment) -> str:
    """Of the cookie: browsers have one jar for all ports of a host."""
    return f"archlab-{environ.get('SERVER_PORT', '')}"


def _cookie(environ: WSGIEnvironment) -> str:
    try:
        found = SimpleCookie(str(environ.get("HTTP_COOKIE", ""))).get(_name(environ))
    except CookieError:
        return ""
    return "" if found is None else found.value


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
