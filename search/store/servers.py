"""Whether the servers of a store answer: PostgreSQL with trials, MLflow with curves. Passwords are never told."""

from __future__ import annotations

import base64
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit

from archlab.search.hardware.facts import Finding, Status
from archlab.search.store.addresses import DATABASE, MLFLOW, address, shown
from archlab.search.store.database import StoreRefused

_PATIENCE_S = 5


def servers(root: Path) -> list[Finding]:
    """A finding for each server; one that is not configured is no fault."""
    found = []
    for name, variable, ask, without in (
        ("postgresql", DATABASE, _postgresql, "trials are in SQLite files, for drivers on one machine"),
        ("mlflow server", MLFLOW, _mlflow, "curves are in a file of the store"),
    ):
        try:
            url = address(root, variable)
            if url is None:
                found.append(Finding(name, "ok", "none configured", f"{without}; {variable} names one"))
                continue
            found.append(Finding(name, "ok", f"{shown(url)} answers: {ask(url)}", "studies of this store use it"))
        except StoreRefused as error:
            found.append(Finding(name, "fail", str(error), "the store is not opened until that is mended"))
        except Exception as error:  # of whichever library or system: it is what is told
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            meaning = "no study runs without it" if variable == DATABASE else "studies run, and deliver later"
            status: Status = "fail" if variable == DATABASE else "warn"
            found.append(Finding(name, status, f"{shown(url or '')}: {_without_secrets(reason, url or '')}", meaning))
    return found


def _postgresql(url: str) -> str:
    import psycopg

    with psycopg.connect(url, connect_timeout=_PATIENCE_S) as connection:
        version = connection.info.server_version
    return f"version {version // 10000}.{version % 10000}"


def _mlflow(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError("it must be an http or https URL")
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=f"{parts.path.rstrip('/')}/version", query="")
    request = urllib.request.Request(plain.geturl())
    if parts.username:
        both = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        request.add_header("Authorization", f"Basic {base64.b64encode(both.encode()).decode()}")
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
        return f"version {answer.read(100).decode(errors='replace')}"


def _without_secrets(text: str, url: str) -> str:
    """An error's text without the password that a library may have put into it."""
    try:
        secret = urlsplit(url).password
    except ValueError:
        secret = url
    return text.replace(secret, "***") if secret else text
