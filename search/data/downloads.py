"""A few small corpora by name, pinned by hash: downloaded whole or not at all, and on from where that broke off."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from archlab.search.data.checksums import DataError
from archlab.search.utils.files import make_private

_CHUNK = 1 << 20
_TIMEOUT_S = 60
_TRIES = 5  # in a row without a byte more
_NO_MORE = 416  # what a server answers when there is nothing after the bytes that are held
_BROKEN = (http.client.HTTPException, urllib.error.URLError, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class Download:
    """A file of the web: where it is, its SHA-256 and bytes, what it holds, and for a zip which files are taken out."""

    url: str
    sha256: str
    size: int
    holds: str
    members: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The files that there will be."""
        return tuple(Path(member).name for member in self.members) or (self.url.rpartition("/")[2],)


_WIKI = "good and featured articles of English Wikipedia, raw: rare words kept, punctuation set apart"
_RAW = ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw")
_SHAKESPEARE = (
    "raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare"
)

CORPORA = {
    "enwik8": Download(
        "https://mattmahoney.net/dc/enwik8.zip",
        "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        36_445_475,
        "the first 10^8 bytes of an English Wikipedia dump of 2006, with its markup",
        ("enwik8",),
    ),
    "text8": Download(
        "https://mattmahoney.net/dc/text8.zip",
        "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
        31_344_016,
        "10^8 bytes of the same dump, reduced to the letters a to z and spaces",
        ("text8",),
    ),
    "wikitext-2": Download(
        "https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
        4_721_645,
        _WIKI,
        tuple(f"wikitext-2-raw/{name}" for name in _RAW),
    ),
    "wikitext-103": Download(
        "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
        191_984_949,
        _WIKI,
        tuple(f"wikitext-103-raw/{name}" for name in _RAW),
    ),
    "tinyshakespeare": Download(
        f"https://{_SHAKESPEARE}/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        1_115_394,
        "plays of Shakespeare, 40,000 lines",
    ),
}


def get(download: Download, folder: Path, tell: Callable[[int, int], None] = lambda done, size: None) -> list[Path]:
    """The files of a corpus in `folder`, downloaded and checked if one is not there.

    `tell` is called with the bytes that are there and those that there will be. Raises OSError when the server cannot
    be reached or the disk is full, after which the same call goes on, and DataError for another file than is expected.
    """
    found = [folder / name for name in download.names]
    if all(file.is_file() for file in found):
        return found
    make_private(folder)
    part = folder / f"{download.url.rpartition('/')[2]}.part"
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process downloads the same: it is waited for
        if all(each.is_file() for each in found):
            part.unlink(missing_ok=True)
            return found
        _fill(download, part, tell)
        with part.open("rb") as whole:
            digest = hashlib.file_digest(whole, "sha256").hexdigest()
        if digest != download.sha256:
            part.unlink()
            raise DataError(
                f"{download.url} is not the file it was: its SHA-256 is not {download.sha256}; nothing was kept"
            )
        if download.members:
            _unpack(part, dict(zip(download.members, found, strict=True)))
            part.unlink()
        else:
            part.replace(found[0])
    return found


def _fill(download: Download, part: Path, tell: Callable[[int, int], None]) -> None:
    """Downloads what a part lacks, and asks again for the rest when a connection breaks."""
    failures = 0
    while (held := part.stat().st_size) < download.size:
        try:
            _receive(download, part, held, tell)
        except (http.client.HTTPException, OSError) as error:
            if isinstance(error, urllib.error.HTTPError):
                if error.code == _NO_MORE:
                    return  # the file is shorter than what is expected, which its hash will say
                raise
            if not isinstance(error, _BROKEN):
                raise
            failures = 0 if part.stat().st_size > held else failures + 1
            if failures == _TRIES:
                reason = getattr(error, "reason", None) or str(error) or type(error).__name__
                raise OSError(None, f"{reason} ({held:,} of {download.size:,} bytes are kept)", download.url) from error


def _receive(download: Download, part: Path, held: int, tell: Callable[[int, int], None]) -> None:
    """Appends one answer of the server, from byte `held` on if it can do that."""
    request = urllib.request.Request(download.url, headers={"Range": f"bytes={held}-"} if held else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer, part.open("ab") as file:
        if held and answer.status != 206:
            file.truncate(0)
        while chunk := answer.read1(_CHUNK):
            file.write(chunk)
            tell(file.tell(), download.size)
            if file.tell() > download.size:
                return  # another file than is expected, however long, which its hash will say
        if file.tell() < download.size:
            raise ConnectionResetError("the connection broke off")


def _unpack(archive: Path, members: dict[str, Path]) -> None:
    """Takes members out of a zip file, each to its place when it is whole."""
    with zipfile.ZipFile(archive) as packed:
        for member, file in members.items():
            new = file.with_name(f"{file.name}.new")
            with packed.open(member) as source, new.open("wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
            new.replace(file)
