"""Optuna's own dashboard on the same port: of the store's copy of its trials, which it reads and cannot change."""

from __future__ import annotations

import importlib.util
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from werkzeug.wrappers import Response

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

PAGES = "/dashboard"
PATHS = (f"{PAGES}/", "/api/", "/static/", "/csv/")
"""Its pages know no other addresses; none of them is one of ours."""


class Mount:
    """A WSGI application that hands what is asked of Optuna's dashboard to it, and all else to another one.

    It is made with the first request. Only reading is let through, and its connection to the database can do no more.
    """

    def __init__(self, application: WSGIApplication, root: Path, headers: dict[str, str]) -> None:
        self._application, self._root, self._headers = application, root, headers

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = str(environ.get("PATH_INFO", ""))
        if path != PAGES and not path.startswith(PATHS):
            return self._application(environ, start)
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return self._refusal("archlab shows Optuna's dashboard to read, not to write", 405)(environ, start)
        if (why := absent(self._root)) is not None:
            return self._refusal(why, 404)(environ, start)

        def answer(status: str, headers: list[tuple[str, str]], *error: Any) -> Any:
            return start(status, [*headers, *self._headers.items()], *error)

        environ.setdefault("HTTP_ACCEPT_ENCODING", "")  # which it takes for granted
        file = self._root / "optuna.db"
        return _application(file, file.stat().st_ino)(environ, answer)

    def _refusal(self, why: str, status: int) -> Response:
        return Response(f"{why}\n", status, self._headers, mimetype="text/plain")


@lru_cache(maxsize=4)
def _application(file: Path, inode: int) -> WSGIApplication:
    """Optuna's application on the database that is there now; another file of that name has another inode."""
    import optuna
    from optuna.storages import RDBStorage
    from optuna_dashboard import wsgi

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = RDBStorage(f"sqlite:///file:{quote(str(file))}?mode=ro&uri=true", skip_table_creation=True)
    found: WSGIApplication = wsgi(storage)
    return found


def absent(root: Path) -> str | None:
    """Why Optuna's dashboard is not here; None where it is."""
    if importlib.util.find_spec("optuna_dashboard") is None:
        return "Optuna's dashboard is not installed: pip install optuna-dashboard"
    if not (root / "optuna.db").exists():
        return "nothing was sent to Optuna in this store yet, or it is kept on a server"
    return None


def pages_of(root: Path, study: str) -> dict[str, str]:
    """The pages that Optuna has of a study, by name; none where its dashboard is not here."""
    if absent(root) is not None:
        return {}
    try:
        with closing(sqlite3.connect(f"{(root / 'optuna.db').as_uri()}?mode=ro", uri=True, timeout=1.0)) as database:
            wanted = "SELECT study_name, study_id FROM studies WHERE study_name IN (?, ?) ORDER BY study_id"
            rows = database.execute(wanted, (study, f"{study}/repeats")).fetchall()
    except sqlite3.Error:  # a copy that is being made, or locked: the page itself says what is wrong
        return {}
    return {name: f"{PAGES}/studies/{number}" for name, number in rows}
