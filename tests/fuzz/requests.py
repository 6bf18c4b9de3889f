"""Requests as no browser sends them: paths, queries, headers and callbacks of a dashboard, with any values in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from logging import Handler, LogRecord, getLogger
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from hypothesis import strategies as st

from tests.dashboards.generate import Plan, make_store, make_study
from tests.fuzz.fuzz_kit import EXTREMES, texts, values

PORT = 8050
NAMES = ("tiny", "ladder", "nope", "Tiny", "..", "%2e%2e", "", "a" * 300, "<b>", "tiny/../..", "\x00", "tiny\n", "%ff")
_TABS = [
    "", "runs", "curves", "compare", "table", "inspect", "architecture", "report", "search", "stability", "scaling",
    "timeline", "factor", "context", "across", "notes", "nothing",
]  # fmt: skip
_KEYS = [
    "q", "err", "cols", "sort", "metric", "x", "y", "smooth", "trials", "by", "lines", "scale", "zoom", "variants",
    "places", "study", "file", "measure", "layer", "pick", "pin", "hide", "unit", "name", "key", "token", "shape",
    "factor", "from", "to", "all", "step", "rung", "seed",
]  # fmt: skip
_FILTERS = [
    "seed=0", "lr>0", "lr>=x", "and", "((", "not seed=0", "seed=0 or", "a.b.c=1", "lr=1e999", "'", '"', "~", "!=",
]  # fmt: skip
_PLACES = [
    "/", "/compare", "/write", "/run/nope", "/login", "/_dash-layout", "/_dash-dependencies", "/_favicon.ico",
    "/_reload-hash", "/_dash-component-suites/dash/x.js", "/_dash-component-suites/x/y.js", "/assets/archlab.css",
    "/assets/../app.py", "/dashboard", "/api/studies", "/csv/1", "/static/x", "/write/complete", "//", "/%00",
    "/.archlab/trials.db",
]  # fmt: skip


def small_store(root: Path) -> Path:
    """A store with one finished study of a few trials."""
    with make_store(root) as made:
        effects = {"baseline": 0.0, "G1": -0.05}
        make_study(
            made, Plan("tiny", "Does a gate help?", effects, rates=(1e-3,), seeds=(0, 1, 2), best_rate={}, points=8)
        )
    return root


@contextmanager
def no_traceback() -> Iterator[None]:
    """Fails where anything logs an exception meanwhile."""
    found: list[BaseException] = []

    class Listener(Handler):
        def emit(self, record: LogRecord) -> None:
            if record.exc_info and record.exc_info[1]:
                found.append(record.exc_info[1])

    listener, root = Listener(), getLogger()
    loggers = [root, *(log for log in (getLogger("archlab"), getLogger("archlab.dashboard")) if not log.propagate)]
    for log in loggers:
        log.addHandler(listener)
    try:
        yield
    finally:
        for log in loggers:
            log.removeHandler(listener)
    if found:
        raise found[0]


_texts = st.one_of(st.sampled_from([e for e in EXTREMES if isinstance(e, str)]), texts, st.sampled_from(_FILTERS))
queries = st.one_of(
    st.dictionaries(st.sampled_from(_KEYS), _texts, max_size=3).map(urlencode),
    _texts.map(quote),
    st.sampled_from(["q=%", "q=%ff", "&&=&", "=", "q=a&q=b", "a" * 3000, "%00=%00", ";", "q[]=1"]),
).map(lambda each: f"?{each}" if each else "")
"""What stands behind a path."""
paths = st.one_of(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(_TABS)).map(lambda each: "/study/" + "/".join(each).rstrip("/")),
    st.tuples(
        st.sampled_from(["/download/{}.{}", "/download/{}/table.{}", "/diagram/{}.{}", "/report/{}.{}"]),
        st.sampled_from(NAMES) | texts,
        st.sampled_from(["md", "csv", "tex", "json", "html", "svg", "dot", "exe", ""]),
    ).map(lambda each: each[0].format(*each[1:])),
    st.sampled_from(NAMES).map("/download/{}/provenance.json".format),
    st.sampled_from(_PLACES),
    texts.map("/{}".format),
)
"""Addresses of pages and files: ours, nearly ours, and any."""
_header = st.one_of(_texts, st.text(st.characters(codec="latin-1"), max_size=20)).map(
    lambda each: "".join(c for c in each if c not in "\r\n\x00").encode("latin-1", "replace").decode("latin-1")[:500]
)
_OURS = f"127.0.0.1:{PORT}"
_HEADERS = {
    "HTTP_HOST": [_OURS, "localhost", "[::1]:8050", "[", "]", "[::", "evil.example", "", ":", "@", "127.0.0.1:x"],
    "HTTP_ORIGIN": [f"http://{_OURS}", "null", "http://[", "http://evil.example"],
    "CONTENT_TYPE": ["application/json", "application/json; charset=x", "text/plain", "multipart/form-data",
                     "multipart/form-data; boundary=", "application/x-www-form-urlencoded"],
    "HTTP_COOKIE": ["a=b", "=", ";;", f"archlab-{PORT}=x", 'a="', "a=\\777"],
    "HTTP_ACCEPT_ENCODING": ["gzip", "br;q=x", "*;q=0", ""],
    "HTTP_RANGE": ["bytes=0-", "bytes=5-1", "bytes=x", "bytes=99999-", "x=1-2"],
    "HTTP_IF_NONE_MATCH": ["*", '"', "W/x"],
    "HTTP_IF_MODIFIED_SINCE": ["x", "Thu, 99 Nov 9999 99:99:99 GMT", "0"],
    "HTTP_AUTHORIZATION": ["Bearer", "Basic x", "Basic Og==", "Digest a=b", " "],
    "HTTP_SEC_FETCH_SITE": ["cross-site", "none", "same-origin"],
}  # fmt: skip
headers = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.sampled_from(some) | _header for name, some in _HEADERS.items()},
        "CONTENT_LENGTH": st.sampled_from(["0", "-1", "x", "99999999999", "1e3", ""]),
        "HTTP_TRANSFER_ENCODING": st.just("chunked"),
    },
)
"""What stands above a request, as a server hands it on."""
methods = st.sampled_from(["GET", "GET", "GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "X"])
bodies = st.one_of(
    st.binary(max_size=60),
    values.map(lambda each: json.dumps(each).encode()),
    st.sampled_from([b"", b"{", b"[" * 100_000, b"\xff", b'{"a":1e999}', b'{"a":NaN}', b'"\\ud800"', b"1" * 5000]),
)
"""What is sent: bytes, and JSON."""


@st.composite
def callbacks(draw: st.DrawFn, known: dict[str, Any]) -> dict[str, Any]:
    """The body of a callback of these pages, in which the values are any, and up to two parts are others."""
    output = draw(st.sampled_from(sorted(name for name, each in known.items() if "callback" in each)))
    each = known[output]
    several = isinstance(each["output"], list | tuple)
    outputs = [
        {"id": _own(one.component_id_str()), "property": one.component_property}
        for one in (each["output"] if several else [each["output"]])
    ]
    inputs, state = ([_part(draw, part) for part in each[name]] for name in ("inputs", "state"))
    changed = [f"{_id_text(part['id'])}.{part['property']}" for part in each["inputs"]]
    body = {
        "output": output, "outputs": outputs if several else outputs[0], "inputs": inputs, "state": state,
        "changedPropIds": draw(st.lists(st.sampled_from(changed) | texts, max_size=2)) if changed else [],
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=2)):
        if draw(st.booleans()):
            body[name] = draw(values)
    return body


def _own(name: str) -> Any:
    """An id as a browser sends it: of a pattern one that fits."""
    if not name.startswith("{"):
        return name
    fits = {"action": "stop", "note": "study tiny"}
    return {key: fits.get(key, "tiny") if isinstance(each, list) else each for key, each in json.loads(name).items()}


def _id_text(name: str) -> str:
    """An id as it stands in what has changed."""
    return json.dumps(_own(name), separators=(",", ":")) if name.startswith("{") else name


def _part(draw: st.DrawFn, part: dict[str, str]) -> Any:
    """An input with some value; of a pattern with ALL a list of them."""
    plain = st.one_of(st.sampled_from(["tiny", "study", "0", "baseline", {"name": "tiny"}]), _texts, values)
    known = {"id": _own(part["id"]), "property": part["property"]}
    if '["ALL"]' in part["id"]:
        return [{**known, "value": each} for each in draw(st.lists(plain, max_size=2))]
    return {**known, "value": draw(plain)}
