"""Who may read the dashboard: the right name, the right origin, and the token where others can reach it."""

import socket
import threading
import urllib.error
import urllib.request

import pytest
from werkzeug.test import Client

from archlab.dashboards import WeakToken
from archlab.dashboards.door import Door
from archlab.dashboards.server import listen, token_for

TOKEN = "correct-horse-battery-staple"


PORT = 8050
FORM = "application/x-www-form-urlencoded"


def inside(environ, start):
    """What stands behind the door."""
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"inside"]


def ask(path="/", method="GET", body=None, asked=f"127.0.0.1:{PORT}", host="127.0.0.1", token=None, **headers):
    """(status, headers, text) of an answer through the door of a server on `host`."""
    told = {f"HTTP_{name.upper()}": value for name, value in headers.items()}
    if body is not None:
        told |= {"CONTENT_TYPE": FORM}
    door = Client(Door(inside, host, token), use_cookies=False)
    answer = door.open(
        path,
        method=method,
        data=body,
        base_url=f"http://127.0.0.1:{PORT}",
        environ_overrides={**told, "HTTP_HOST": asked},
    )
    return answer.status_code, answer.headers, answer.text


@pytest.mark.parametrize(
    ("listening", "asked", "status"),
    [
        ("127.0.0.1", "127.0.0.1:{port}", 200),
        ("127.0.0.1", "localhost:{port}", 200),
        ("127.0.0.1", "[::1]:{port}", 200),
        ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "evil.example:{port}", 403),
        ("127.0.0.1", "127.0.0.1.evil.example", 403),
        ("127.0.0.1", "192.0.2.7", 403),
        ("127.0.0.1", "", 403),
        ("0.0.0.0", "192.0.2.7:{port}", 200),
        ("0.0.0.0", "{own}:{port}", 200),
        ("0.0.0.0", "evil.example", 403),
    ],
)
def test_only_requests_that_are_meant_for_it_are_answered(listening, asked, status):
    name = asked.format(port=PORT, own=socket.gethostname())
    assert ask(asked=name, host=listening)[0] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_only_its_own_pages_may_send_it_something(headers, status):
    own = {name: value.format(port=PORT) for name, value in headers.items()}
    assert ask("/_dash-update-component", "POST", b"{}", **own)[0] == status
    assert ask(**own)[0] == 200, "a page may be looked at from anywhere"


def test_with_a_token_nothing_is_told_without_it():
    for path in ("/", "/study/x", "/download/x.csv", "/_dash-layout", "/assets/archlab.css", "/login"):
        status, headers, text = ask(path, token=TOKEN)
        assert status == 401 and "archlab dashboard" in text and "Set-Cookie" not in headers, path
        assert TOKEN not in text and "form-action 'self'" in headers["Content-Security-Policy"]
    for wrong in ("", "x", TOKEN[:-1], f"{TOKEN}x", "%C3%BC"):
        status, headers, _ = ask(f"/?token={wrong}", token=TOKEN)
        assert status == 401 and "Set-Cookie" not in headers
    assert ask(token=TOKEN, cookie=f"archlab-{PORT}=deadbeef")[0] == 401
    assert ask(token=TOKEN, authorization="Bearer nonsense")[0] == 401
    assert ask(token=TOKEN, authorization=f"Bearer {TOKEN}")[2] == "inside"


@pytest.mark.parametrize("how", ["address", "form"])
def test_the_token_opens_by_a_cookie_that_is_not_the_token(how):
    if how == "address":
        status, headers, text = ask(f"/study/x?token={TOKEN}&err=se", token=TOKEN)
    else:
        body = f"token={TOKEN}&to=%2Fstudy%2Fx%3Ferr%3Dse".encode()
        status, headers, text = ask("/login", "POST", body, token=TOKEN, origin=f"http://127.0.0.1:{PORT}")
    cookie = headers["Set-Cookie"]
    assert status == 200 and "url=/study/x?err=se" in text and headers["Referrer-Policy"] == "same-origin"
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie + text
    crumb = cookie.partition(";")[0]
    assert ask(token=TOKEN, cookie=crumb)[2] == "inside"
    assert ask(token=f"another {TOKEN}", cookie=crumb)[0] == 401


@pytest.mark.parametrize(
    "to",
    [
        "https://evil.example",
        "//evil.example",
        "/%5Cevil.example",
        "/%09/evil.example",
        "/%0D%0A/evil.example",
        "%09//evil.example",
        "javascript:evil",
        "%22%3E%3Cscript%3E",
    ],
)
def test_no_login_leads_elsewhere(to):
    _, _, text = ask("/login", "POST", f"token={TOKEN}&to={to}".encode(), token=TOKEN)
    assert "evil" not in text and "<script" not in text and "url=/" in text
    _, _, wrong = ask("/login", "POST", f"token=no&to={to}".encode(), token=TOKEN)
    assert "<script" not in wrong and "not the token" in wrong


def test_a_host_that_others_reach_has_a_token(tmp_path, monkeypatch):
    monkeypatch.delenv("ARCHLAB_TOKEN", raising=False)
    assert token_for("127.0.0.1") is None and token_for("localhost") is None and token_for("::1") is None
    assert len(token_for("0.0.0.0")) == 32 and token_for("0.0.0.0") != token_for("0.0.0.0")
    with pytest.raises(ValueError, match="needs a token"):
        listen(tmp_path, "0.0.0.0", port=0)
    monkeypatch.setenv("ARCHLAB_TOKEN", TOKEN)
    assert token_for("0.0.0.0") == token_for("127.0.0.1") == TOKEN
    monkeypatch.setenv("ARCHLAB_TOKEN", "short")
    with pytest.raises(WeakToken, match="use at least 16"):
        token_for("0.0.0.0")


def test_a_server_of_a_store_stands_behind_its_door(tmp_path):
    server = listen(tmp_path, "0.0.0.0", port=0, token=TOKEN)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.port}/"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(base, timeout=240)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(urllib.request.Request(base, headers={"Host": "evil.example"}), timeout=240)
        opened = urllib.request.urlopen(f"{base}?token={TOKEN}", timeout=240)
        crumb = opened.headers["Set-Cookie"].partition(";")[0]
        assert crumb.startswith(f"archlab-{server.port}=")
        page = urllib.request.urlopen(urllib.request.Request(base, headers={"Cookie": crumb}), timeout=240)
        assert "<title>" in page.read().decode() and "default-src 'self'" in page.headers["Content-Security-Policy"]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@pytest.mark.browser
def test_a_reader_who_types_the_token_arrives_where_they_wanted_to(store, visit):
    server = listen(store, port=0, token=TOKEN)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    wanted = f"http://127.0.0.1:{server.port}/study/gate-position/runs?q=seed=0"
    try:
        page = visit.page
        page.goto(wanted)
        page.fill("input[type=password]", f"not {TOKEN}")
        page.click("button")
        page.wait_for_selector("text=That is not the token.")
        page.fill("input[type=password]", TOKEN)
        page.click("button")
        page.wait_for_selector("#runs .ag-row")
        assert page.url == wanted
        assert visit.problems and all("401" in said for said in visit.problems), "it was asked for the token"
        visit.problems.clear()
    finally:
        server.shutdown()
        server.server_close()
