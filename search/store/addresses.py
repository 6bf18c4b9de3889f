"""Where a store's servers are: from the environment or from files that nobody else can read, and never repeated."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

from archlab.search.store.database import StoreRefused
from archlab.search.utils.files import NO_JSON
from archlab.search.utils.untrusted import read_regular

DATABASE, MLFLOW = "ARCHLAB_DATABASE", "ARCHLAB_MLFLOW"
TENSORBOARD, WANDB = "ARCHLAB_TENSORBOARD", "ARCHLAB_WANDB"  # a folder; a project
_FILES = {DATABASE: "database.url", MLFLOW: "mlflow.url"}
STORE = ".archlab"
UNREADABLE = "a URL that can't be read"


def store_root(given: str | Path | None = None) -> Path:
    """The store folder: as given, else ARCHLAB_STORE, else the nearest store at or above the current folder, as git
    finds its own (above the home folder none is looked for), else `.archlab` here."""
    if said := given or os.environ.get("ARCHLAB_STORE"):
        return Path(said)
    here, home = Path.cwd(), Path.home()
    for folder in (here, *here.parents):
        if (folder / STORE / "store.json").exists():
            return Path(STORE) if folder == here else folder / STORE
        if folder == home:
            break
    return Path(STORE)


def address(root: Path, variable: str) -> str | None:
    """What the variable holds, else the file in the store, else None. Raises StoreRefused for a file others can read.

    A URL may hold a password, so it is given no other way: an argument would be seen by every user of the machine.
    """
    if given := os.environ.get(variable, "").strip():
        return given
    path = root / _FILES[variable]
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreRefused(f"{path} can't be read ({error.strerror}): it should be a file with one URL") from error
    with open(descriptor, encoding="utf-8") as file:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & 0o077:
            raise StoreRefused(f"{path} holds a password and others can read it (mode {mode:04o}): chmod 600 {path}")
        text = file.read(10_000).strip()
    if not text or len(text.split()) > 1:
        raise StoreRefused(f"{path} should hold one URL and nothing else")
    return text


def shown(url: str) -> str:
    """A URL that may be told: user, hosts and path, never a password nor the query.

    PostgreSQL takes several hosts with commas between them, of which one leads.
    """
    try:
        parts = urlsplit(url)
        account, _, hosts = parts.netloc.rpartition("@")
        for host in hosts.split(","):
            _ = urlsplit(f"//{host}").port  # raises ValueError
    except ValueError:
        return UNREADABLE
    if not parts.scheme or "@" in parts.path + parts.query + parts.fragment:  # of a password with a bare / ? or #
        return UNREADABLE
    name, _, password = account.partition(":")
    user = f"{name}:***@" if password else f"{name}@" if name else ""
    return f"{parts.scheme}://{user}{hosts.lower()}{parts.path}"


def kind_of(root: Path) -> str:
    """Where a store's trial table is, as store.json says: "sqlite" or "postgresql"."""
    try:
        said = json.loads(read_regular(root / "store.json"))
    except (OSError, *NO_JSON):
        return "sqlite"
    return str(said.get("database", "sqlite")) if isinstance(said, dict) else "sqlite"


def server_of(root: Path) -> str | None:
    """The URL of the server that has a store's trial table; None where it is a file."""
    if kind_of(root) != "postgresql":
        return None
    url = address(root, DATABASE)
    if url is None:
        raise StoreRefused(
            f"the trial table of {root} is on a PostgreSQL server: set {DATABASE}, or write its URL into "
            f"{root}/{_FILES[DATABASE]} (mode 0600)"
        )
    return url
