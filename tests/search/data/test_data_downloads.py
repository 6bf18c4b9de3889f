"""A corpus is there whole, with the hash that it should have, or not at all; no byte is asked for twice."""

from __future__ import annotations

import hashlib
import io
import random
import threading
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from archlab.search.data.checksums import DataError
from archlab.search.data.downloads import CORPORA, Download, get

CONTENT = random.Random(0).randbytes(300_000)


@dataclass
class Server:
    """A server on this machine, which breaks off every answer after `breaks` bytes and may know no ranges."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    breaks: int | None = None
    ranges: bool = True
    asked: list[str | None] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.asked.append(asked)
            data = state.files.get(self.path)
            if data is None:
                self.send_error(404)
                return
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and state.ranges else 0
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            end = len(data) if state.breaks is None else min(start + state.breaks, len(data))
            with suppress(ConnectionError):  # who asked may have enough
                self.wfile.write(data[start:end])

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    state.url = f"http://127.0.0.1:{served.server_port}"
    yield state
    served.shutdown()
    thread.join()
    served.server_close()


def of(server: Server, data: bytes, name: str = "a.txt", members: tuple[str, ...] = ()) -> Download:
    server.files[f"/{name}"] = data
    return Download(f"{server.url}/{name}", hashlib.sha256(data).hexdigest(), len(data), "noise", members)


def test_a_file_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    wanted = of(server, CONTENT)
    for _ in range(2):
        assert get(wanted, tmp_path / "new" / "folder", lambda *now: told.append(now)) == [
            tmp_path / "new/folder/a.txt"
        ]
    assert (tmp_path / "new/folder/a.txt").read_bytes() == CONTENT
    assert server.asked == [None] and told[-1] == (300_000, 300_000)
    assert [file.name for file in (tmp_path / "new/folder").iterdir()] == ["a.txt"]


def test_an_archive_is_unpacked_and_goes(server: Server, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("wiki/train", "wiki/test", "wiki/licence"):
            archive.writestr(name, name * 1000)
    found = get(of(server, packed.getvalue(), "wiki.zip", ("wiki/train", "wiki/test")), tmp_path)
    assert [file.name for file in found] == ["train", "test"]
    assert found[1].read_text() == "wiki/test" * 1000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["test", "train"]


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_a_broken_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path, ranges: bool) -> None:
    wanted = of(server, CONTENT)
    server.breaks, server.ranges = 120_000, ranges
    if ranges:
        (file,) = get(wanted, tmp_path)
        assert server.asked == [None, "bytes=120000-", "bytes=240000-"]
    else:
        with pytest.raises(OSError, match="120,000 of 300,000 bytes are kept"):
            get(wanted, tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["a.txt.part"]
        server.breaks = None
        (file,) = get(wanted, tmp_path)
        assert server.asked[-1] == "bytes=120000-"
    assert file.read_bytes() == CONTENT
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_that_does_not_end_is_left_off(server: Server, tmp_path: Path) -> None:
    told: list[int] = []
    wanted = of(server, CONTENT)
    server.files["/a.txt"] = CONTENT * 100
    with pytest.raises(DataError, match="is not the file it was"):
        get(wanted, tmp_path, lambda done, size: told.append(done))
    assert max(told) < 2 * len(CONTENT) + (1 << 20) and not list(tmp_path.iterdir())


def test_what_an_interrupted_run_left_is_taken_up(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.txt.part").write_bytes(CONTENT[:1234])
    assert get(of(server, CONTENT), tmp_path)[0].read_bytes() == CONTENT
    assert server.asked == ["bytes=1234-"]


def test_another_file_than_expected_is_not_kept(server: Server, tmp_path: Path) -> None:
    wanted = replace(of(server, CONTENT), sha256="0" * 64)
    with pytest.raises(DataError, match=r"a\.txt is not the file it was: its SHA-256 is not 0{64}; nothing was kept"):
        get(wanted, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.txt.part").write_bytes(b"of another file" * 20_000)
    with pytest.raises(DataError):
        get(of(server, CONTENT), tmp_path)
    assert get(of(server, CONTENT), tmp_path)[0].read_bytes() == CONTENT, "and the next time it is fetched afresh"


def test_a_server_that_does_not_have_it_or_is_not_there_is_said(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = of(server, CONTENT)
    server.files.clear()
    server.files["/a.txt"] = CONTENT[:1000]
    with pytest.raises(OSError, match=r"broke off \(1,000 of 300,000 bytes are kept\)"):
        get(wanted, tmp_path)
    server.files.clear()
    with pytest.raises(OSError, match="404"):
        get(wanted, tmp_path)
    with pytest.raises(OSError, match=r"\(1,000 of 300,000 bytes are kept\): 'http://127\.0\.0\.1:9/a\.txt'"):
        get(replace(wanted, url="http://127.0.0.1:9/a.txt"), tmp_path)


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_is_pinned(name: str) -> None:
    corpus = CORPORA[name]
    assert len(corpus.sha256) == 64 and int(corpus.sha256, 16) and corpus.size > 1_000_000
    assert corpus.url.startswith("https://") and corpus.names
    assert corpus.url.endswith(".zip") == bool(corpus.members)
