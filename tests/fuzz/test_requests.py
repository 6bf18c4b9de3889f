"""Whatever a request holds, the dashboard answers it: never with a failure of its own, always under its rules."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import dash
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from werkzeug.test import Client

from archlab.dashboards import make_app
from archlab.dashboards.app import LOCAL
from archlab.dashboards.door import Door
from archlab.dashboards.drafts import Drafts
from tests.fuzz.fuzz_kit import bounded_work, examples, tried
from tests.fuzz.requests import PORT, bodies, callbacks, headers, methods, no_traceback, paths, queries, small_store

MOST_CALLS = 30_000_000
"""Function calls that one answer may take."""
_CALLBACK = "/_dash-update-component"
_JSON = {"CONTENT_TYPE": "application/json"}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dash.Dash]:
    """The dashboard of a small store in the current folder, which it only reads, and which checks no drafts."""
    folder, before = tmp_path_factory.mktemp("requests"), Path.cwd()
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            Drafts,
            "_answer",
            lambda *_: {"name": None, "problems": [], "plan": {"more": "", "variants": [], "lines": []}},
        )
        made = make_app(small_store(folder / ".archlab"), read_only=True)
        made.server.test_client().get("/")
        yield made
    os.chdir(before)


def answered(app: dash.Dash, path: str, method: str = "GET", body: bytes | None = None, **environ: str) -> int:
    """The status of an answer, which is none of a failure, and has the headers of every page."""
    door = Client(Door(app.server.wsgi_app, "127.0.0.1"), use_cookies=False)
    given = {"HTTP_HOST": f"127.0.0.1:{PORT}", **environ}
    before = _files()
    with no_traceback(), bounded_work(MOST_CALLS):
        answer = door.open(path, method=method, data=body, environ_overrides=given)
        text = answer.get_data().decode(errors="replace")
        answer.close()
    assert answer.status_code < 500, text[:2000]
    assert "Traceback (most recent call last)" not in text
    assert not [name for name in LOCAL if name not in answer.headers], answer.status
    assert _files() == before
    tried(refused=answer.status_code >= 400)
    return answer.status_code


def _files() -> list[Path]:
    """All files of the current folder, without those that SQLite has while it reads."""
    return sorted(each for each in Path.cwd().rglob("*") if not each.name.endswith(("-wal", "-shm")))


@examples(120)
@given(path=paths, query=queries, method=methods, above=headers, body=st.none() | bodies)
@example(path="/csv/1", query="", method="GET", above={}, body=None)
@example(path="/dashboard", query="", method="POST", above={}, body=None)
@example(path="/_dash-component-suites/dash/x.js", query="", method="GET", above={}, body=None)
def test_a_request_of_any_shape_is_answered(
    path: str, query: str, method: str, above: dict[str, str], body: bytes | None, app: dash.Dash
) -> None:
    answered(app, f"{path}{query}", method, body, **above)


@examples(60)
@given(path=paths, query=queries)
def test_an_address_of_any_shape_has_a_page(path: str, query: str, app: dash.Dash) -> None:
    shown = quote(path, safe="/%")  # as a browser tells it
    asked = [("pathname", shown), ("search", query)]
    location = [{"id": "_pages_location", "property": name, "value": value} for name, value in asked]
    outputs = [{"id": i, "property": p} for i, p in (("_pages_content", "children"), ("_pages_store", "data"))]
    output = next(each for each in app.callback_map if "_pages_content" in each)
    body = {"output": output, "outputs": outputs, "inputs": location, "changedPropIds": ["_pages_location.pathname"]}
    assert answered(app, _CALLBACK, "POST", json.dumps(body).encode(), **_JSON) == 200


@examples(100)
@given(data=st.data())
def test_a_callback_with_any_values_is_answered(data: st.DataObject, app: dash.Dash) -> None:
    body = json.dumps(data.draw(callbacks(app.callback_map))).encode()
    answered(app, _CALLBACK, "POST", body, **_JSON)


@examples(60)
@given(body=bodies)
@example(body=b"[" * 100_000)
@example(body=b'{"text": "", "position": ' + b"1" * 5000 + b"}")
def test_a_body_of_any_bytes_is_answered(body: bytes, app: dash.Dash) -> None:
    assert answered(app, _CALLBACK, "POST", body, **_JSON) == 400
    answered(app, "/write/complete", "POST", body, **_JSON)
