"""What is damaged in a store: its table against itself and against its files. Everything is read, nothing is executed
and nothing is changed; no link is followed, so a store of somebody else can be looked at too."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from archlab.arch_dsl.language import plugins
from archlab.search.data.checksums import Checksums, DamagedData
from archlab.search.data.dataset import HEADER
from archlab.search.store import plugins as plugin_files
from archlab.search.store.lock import is_study_name
from archlab.search.store.rows import fault_in, faults_of, is_key, is_spec_of
from archlab.search.store.store import Store
from archlab.search.utils.files import NO_JSON
from archlab.search.utils.untrusted import has_link, open_regular

MOST_BYTES = 2**28  # of a file that is read as a whole, such as a journal
COPIES = ("mlflow.db", "optuna.db", "shipped.db")
_TABLES = {"study", "trial", "study_trial", "study_trial_key", "event", "event_study", "decision", "memory"}


Mend = Literal[
    "study",
    "member",
    "forget",
    "decision",
    "memory",
    "spec",
    "trial.json",
    "result",
    "result.json",
    "plan",
    "aside",
    "data",
]


@dataclass(frozen=True)
class Damage:
    """Something damaged: a file, whose `place` is its path in the store, or a column of the trial table.

    `mend` names what repairing does about it (None: nothing), `then` says it. `row` are the values by which a row of
    the table is found: the key of a trial, study and key of what a study wants, place and name of what is kept.
    `studies` depend on it, and `train_s` is what training it again costs, in seconds, where that is known.
    """

    place: str
    fault: str
    then: str
    mend: Mend | None = None
    row: tuple[str, ...] = ()
    studies: tuple[str, ...] = ()
    train_s: float = 0.0


@dataclass(frozen=True)
class Looked:
    """How much was read: rows of the trial table, trials' folders, data sets, bytes."""

    rows: int
    folders: int
    data_sets: int
    bytes: int


class Look:
    """One look at a store."""

    def __init__(self, store: Store) -> None:
        self.store, self.bytes = store, 0
        self.folders = self.data_sets = 0
        self.rows = store.database.query("SELECT key, spec, state, attempt, owner, reason, result, updated FROM trial")
        self.wanted: dict[str, set[str]] = {}
        for row in store.database.query("SELECT DISTINCT key, study FROM study_trial WHERE orphaned = 0"):
            self.wanted.setdefault(str(row["key"]), set()).add(str(row["study"]))

    def looked(self) -> Looked:
        """So far."""
        return Looked(len(self.rows), self.folders, self.data_sets, self.bytes)

    def damage(self) -> Iterator[Damage]:
        """All of it, what others depend on first."""
        yield from self._databases()
        yield from self._studies()
        yield from self._members()
        for row in self.rows:
            yield from self._trial(row)
        yield from self._kept()
        yield from self._data()
        yield from self._plugins()

    # the table

    def _databases(self) -> Iterator[Damage]:
        for name in ("trials.db", *COPIES):
            path = self.store.root / name
            if not path.is_file():
                continue
            self.bytes += path.stat().st_size
            again = "remove it: the next `archlab sync` writes it again"
            if fault := _sqlite_fault(path, _TABLES if name == "trials.db" else None):
                yield Damage(name, fault, again if name in COPIES else "restore it from a copy")

    def _studies(self) -> Iterator[Damage]:
        for row in self.store.database.query("SELECT name, record FROM study ORDER BY name"):
            if not is_study_name(row["name"]):
                then = "its rows go; the next run of its file stores it anew, and finds its trials"
                place = f"trials.db study {str(row['name'])[:40]!r}"
                yield Damage(place, "it is no study's name", then, "study", (row["name"],))
            elif fault := fault_in(row["record"], dict):
                then = "run its file again, which stores it anew; no trial is trained again"
                yield Damage(f"trials.db study '{row['name']}' record", fault, then, studies=(str(row["name"]),))

    def _members(self) -> Iterator[Damage]:
        for row in self.store.database.query(
            "SELECT study, key, variant, role, settings, seed, until FROM study_trial"
        ):
            if not is_study_name(row["study"]):
                continue
            faults = faults_of(row)
            if not is_key(row["key"]):
                faults["key"] = "it is no trial's key"
            for column, fault in faults.items():
                place = f"trials.db study_trial {str(row['key'])[:12]!r} {column}"
                then = "the row goes; the next run of the study plans it again and finds its result"
                yield Damage(place, fault, then, "member", (row["study"], row["key"]), (str(row["study"]),))

    def _kept(self) -> Iterator[Damage]:
        tables: tuple[Mend, ...] = ("decision", "memory")
        for table in tables:
            for row in self.store.database.query(f"SELECT place, name, value FROM {table}"):
                if fault := fault_in(row["value"], object):
                    place = f"trials.db {table} '{row['place']}' '{row['name']}'"
                    yield Damage(
                        place,
                        fault,
                        "it goes, and is found anew when it is asked for",
                        table,
                        (row["place"], row["name"]),
                    )

    # a trial

    def _trial(self, row: dict[str, Any]) -> Iterator[Damage]:
        key, of = str(row["key"]), tuple(sorted(self.wanted.get(str(row["key"]), ())))
        if not is_key(row["key"]):
            yield Damage(f"trials.db trial {key[:12]!r}", "it is no trial's key", "the row goes", "forget", (key,), of)
            return
        folder, at = self.store.trial_folder(key), f"trials/{key[:2]}/{key}"
        if folder.exists() and has_link(folder / "any", self.store.root):
            yield Damage(at, "a link leads there", "it is not looked at: who made it?", None, (key,), of)
            return
        files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        self.folders += bool(files)
        text = self._read(folder / "trial.json") if "trial.json" in files else None
        whole = text is not None and hashlib.sha256(text).hexdigest() == key
        if not is_spec_of(row["spec"], key):
            back = "its spec is taken from its trial.json" if whole else "the row goes; the next run plans it again"
            fault = "its sha256 is not the key"
            yield Damage(f"trials.db trial {key[:12]} spec", fault, back, "spec" if whole else "forget", (key,), of)
        elif text is not None and not whole:
            yield Damage(
                f"{at}/trial.json", "its sha256 is not the key", "it is written again", "trial.json", (key,), of
            )
        if row["state"] != "running":  # whose files change meanwhile
            yield from self._result(row, at, folder, files, of)
            yield from self._files(row, at, folder, files, of)

    def _result(
        self, row: dict[str, Any], at: str, folder: Path, files: set[str], of: tuple[str, ...]
    ) -> Iterator[Damage]:
        """The result in the row against that in the folder, which is the same but for what was measured later."""
        key, faults = row["key"], faults_of(row)
        file = self._json(folder / "result.json") if "result.json" in files else None
        if "result" in faults:
            place, fault = f"trials.db trial {key[:12]} result", faults.pop("result")
            if isinstance(file, dict) and file.get("state") == row["state"]:
                yield Damage(place, fault, "it is taken from its result.json", "result", (key,), of)
            else:
                yield self._again(place, fault, key, of, {})
        for column, fault in faults.items():
            yield self._again(f"trials.db trial {key[:12]} {column}", fault, key, of, {})
        if (
            faults
            or row["result"] is None
            or fault_in(row["result"], dict)
            or row["state"] not in ("complete", "diverged")
        ):
            return
        held: dict[str, Any] = json.loads(row["result"])
        if "result.json" not in files:
            if files:
                yield Damage(
                    f"{at}/result.json", "it is missing", "it is written from the table", "result.json", (key,), of
                )
        elif not isinstance(file, dict):
            yield Damage(
                f"{at}/result.json", "it is no JSON", "it is written from the table", "result.json", (key,), of
            )
        elif _apart(held) != _apart(file):
            differ = next(iter(sorted(k for k in _apart(held).keys() | _apart(file) if held.get(k) != file.get(k))))
            fault = f"it says {differ} = {str(file.get(differ))[:40]}, the trial table {str(held.get(differ))[:40]}"
            yield self._again(f"{at}/result.json", fault, key, of, held)

    def _again(self, place: str, fault: str, key: str, of: tuple[str, ...], held: dict[str, Any]) -> Damage:
        took = held.get("train_s")
        cost = float(took) if isinstance(took, (int, float)) else 0.0
        then = "it is planned again, and goes on from its newest checkpoint"
        return Damage(place, fault, then, "plan", (key,), of, cost)

    def _files(
        self, row: dict[str, Any], at: str, folder: Path, files: set[str], of: tuple[str, ...]
    ) -> Iterator[Damage]:
        key = row["key"]
        for name in sorted(files):
            if name.startswith("checkpoint-") and name.endswith(".pt"):
                if fault := self._checkpoint(folder, name):
                    yield Damage(f"{at}/{name}", fault, "it is put aside; an older one counts", "aside", (key,), of)
            elif name == "metrics.jsonl":
                if fault := self._journal(folder / name):
                    yield Damage(f"{at}/{name}", fault, "it is left out of curves", None, (key,), of)
            elif name == "test_documents.npz" and (fault := self._documents(folder / name)):
                yield self._again(f"{at}/{name}", fault, key, of, json.loads(row["result"] or "{}"))

    def _checkpoint(self, folder: Path, name: str) -> str | None:
        try:
            told = self._read(folder / f"{name}.sha256").decode("ascii").split()
            with open_regular(folder / name) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                self.bytes += file.tell()
        except (OSError, ValueError) as error:
            return f"it can't be held against its sha256: {getattr(error, 'strerror', None) or error}"
        return None if told[:1] == [found] else "its sha256 is another one than that beside it"

    def _journal(self, path: Path) -> str | None:
        try:
            lines = self._read(path).split(b"\n")
        except (OSError, ValueError) as error:
            return f"it can't be read: {getattr(error, 'strerror', None) or error}"
        bad = [number for number, line in enumerate(lines[:-1], 1) if fault_in(line, dict)]
        return f"line {bad[0]} is no JSON{f', and {len(bad) - 1} more' if len(bad) > 1 else ''}" if bad else None

    def _documents(self, path: Path) -> str | None:
        try:
            with open_regular(path) as file, zipfile.ZipFile(file) as packed:
                damaged = packed.testzip() if all(each.file_size < MOST_BYTES for each in packed.infolist()) else None
                self.bytes += path.stat().st_size
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
            return f"it can't be read: {getattr(error, 'strerror', None) or error}"
        return f"{damaged} in it is damaged" if damaged else None

    # what trials share

    def _data(self) -> Iterator[Damage]:
        root = self.store.root / "data"
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if folder.is_symlink() or not (folder / HEADER).is_file():
                continue
            self.data_sets += 1
            of = self._studies_with(folder.name)
            try:
                sums = Checksums(folder, mark=False)
                for name in (HEADER, *json.loads(self._read(folder / HEADER))["files"]):
                    if Path(name).name != name or (folder / name).is_symlink():
                        raise DamagedData(f"{name!r} leads out of it")
                    sums.check(name)
                    self.bytes += (folder / name).stat().st_size
            except (*NO_JSON, OSError, KeyError, TypeError) as error:
                then = "the next run makes it again from its source"
                yield Damage(f"data/{folder.name}", str(error), then, "data", studies=of)

    def _plugins(self) -> Iterator[Damage]:
        root = self.store.root / plugin_files.FOLDER
        for path in sorted(root.glob("*-*.py")) if root.is_dir() else ():
            digest = path.stem.rpartition("-")[2]
            if plugins.digest_of(self._read(path)) != digest:
                then = "its studies ask for it as it was; run one with its own copy, which puts it there"
                yield Damage(f"{plugin_files.FOLDER}/{path.name}", "its source is not that of its name", then, "aside")

    def _studies_with(self, data: str) -> tuple[str, ...]:
        own = f'"data":"{data}"'
        keys = [row["key"] for row in self.rows if isinstance(row["spec"], str) and own in row["spec"]]
        return tuple(sorted({study for key in keys for study in self.wanted.get(key, ())}))

    def _read(self, path: Path) -> bytes:
        """Raises OSError for what is no regular file, ValueError for one that is too large."""
        with open_regular(path) as file:
            found = file.read(MOST_BYTES + 1)
        if len(found) > MOST_BYTES:
            raise ValueError(f"{path.name} holds more than {MOST_BYTES:,} bytes")
        self.bytes += len(found)
        return found

    def _json(self, path: Path) -> Any:
        try:
            return json.loads(self._read(path))
        except (OSError, *NO_JSON):
            return None


def _apart(result: dict[str, Any]) -> dict[str, Any]:
    """A result without what was measured later, which the table keeps elsewhere."""
    return {name: value for name, value in result.items() if name != "measures"}


def _sqlite_fault(path: Path, tables: set[str] | None) -> str | None:
    """What SQLite says of a file, and what is in it that no archlab makes."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            db.execute("PRAGMA trusted_schema = OFF")
            said = [str(row[0]) for row in db.execute("PRAGMA integrity_check(1)")]
            names = {str(row[0]) for row in db.execute("SELECT name FROM sqlite_master")}
    except sqlite3.Error as error:
        return str(error)
    foreign = sorted(name for name in names - (tables or names) if not name.startswith("sqlite_"))
    if said != ["ok"]:
        return said[0]
    return f"{foreign[0]!r} is in it, which archlab does not make" if foreign else None


def look(store: Store) -> tuple[list[Damage], Looked]:
    """What is damaged, and how much was read. Raises StoreError where the table itself can't be read."""
    looking = Look(store)
    found = list(looking.damage())
    return found, looking.looked()
