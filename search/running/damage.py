"""What is damaged in a store: its table against itself and against its files. Everything is read, nothing is executed
and nothing is changed; no link is followed, so a store of somebody else can be looked at too."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archlab.arch_dsl.language import plugins
from archlab.search.data.checksums import SUMS, Checksums, DamagedData
from archlab.search.data.dataset import HEADER, OVERLAP
from archlab.search.running.table_damage import Damage, key_of, of_events, of_kept, of_members, of_studies
from archlab.search.store import plugins as plugin_files
from archlab.search.store.folders import DISPUTED
from archlab.search.store.kept import COORDINATES, RATIO
from archlab.search.store.rows import fault_in, faults_of, is_key, is_spec_of, parsed
from archlab.search.store.store import Store
from archlab.search.trial.metrics import LINE
from archlab.search.trial.outcome_files import fault_of_result
from archlab.search.utils.files import NO_JSON
from archlab.search.utils.shapes import fault_of
from archlab.search.utils.untrusted import has_link, open_regular

MOST_BYTES = 2**28  # of a file that is read as a whole, such as a journal
DOCUMENTS = "test_documents.npz"
COPIES = ("mlflow.db", "optuna.db", "shipped.db")
_TABLES = {"study", "trial", "study_trial", "study_trial_key", "event", "event_study", "decision", "memory"}


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
        self.keys = {row["key"] for row in self.rows}
        self.runs = any(row["state"] == "running" for row in self.rows)

    def looked(self) -> Looked:
        """So far."""
        return Looked(len(self.rows), self.folders, self.data_sets, self.bytes)

    def damage(self) -> Iterator[Damage]:
        """All of it, what others depend on first."""
        yield from self._databases()
        yield from of_studies(self.store)
        yield from of_members(self.store)
        for row in self.rows:
            yield from _told(f"trials/{str(row['key'])[:2]}/{row['key']}", self._trial(row))
        yield from of_kept(self.store)
        yield from of_events(self.store)
        for folder in self._inside("data"):
            yield from _told(f"data/{folder.name}", self._data(folder))
        for name in ("stages", "prefixes"):
            for folder in self._inside(name):
                yield from _told(f"{name}/{folder.name}", self._beginnings(folder))
        yield from self._measurements()
        for path in self._inside(plugin_files.FOLDER):
            yield from _told(f"{plugin_files.FOLDER}/{path.name}", self._plugin(path))

    def _inside(self, name: str) -> list[Path]:
        """What lies in a folder of the store, links left out."""
        root = self.store.root / name
        there = root.is_dir() and not root.is_symlink()
        return sorted(path for path in root.iterdir() if not path.is_symlink()) if there else []

    # the table

    def _databases(self) -> Iterator[Damage]:
        for name in ("trials.db", *COPIES):
            path = self.store.root / name
            if not path.is_file() or path.is_symlink():
                continue
            self.bytes += path.stat().st_size
            again = "remove it: the next `archlab sync` writes it again"
            if fault := _sqlite_fault(path, _TABLES if name == "trials.db" else None):
                yield Damage(name, fault, again if name in COPIES else "restore it from a copy")

    # a trial

    def _trial(self, row: dict[str, Any]) -> Iterator[Damage]:
        key, of = str(row["key"]), tuple(sorted(self.wanted.get(str(row["key"]), ())))
        if not is_key(row["key"]):
            true = key_of(row["spec"])
            found = true is not None and true not in self.keys and self.store.trial_folder(true).is_dir()
            then = "it is restored from its spec" if found else "the row goes"
            values = (row["key"], true) if found else (row["key"],)
            place = f"trial table: trial {key[:12]!r}"
            yield Damage(place, "it is no trial's key", then, "key" if found else "drop", values, of)
            return
        folder, at = self.store.trial_folder(key), f"trials/{key[:2]}/{key}"
        if folder.exists() and has_link(folder / "any", self.store.root):
            yield Damage(at, "a link leads there", "it is not looked at: who made it?", None, (key,), of)
            return
        files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        self.folders += bool(files)
        text = self._bytes(folder / "trial.json") if "trial.json" in files else None
        whole = text is not None and hashlib.sha256(text).hexdigest() == key
        if not is_spec_of(row["spec"], key):
            back = "it is taken from its trial.json" if whole else "the next run of its study writes it again"
            fault = "its sha256 is not the key"
            yield Damage(f"trial table: trial {key[:12]} spec", fault, back, "spec" if whole else "members", (key,), of)
        elif files - {"writer.lock"} and not whole:
            fault = "its sha256 is not the key" if "trial.json" in files else "it is missing"
            yield Damage(f"{at}/trial.json", fault, "it is written again", "trial.json", (key,), of)
        if row["state"] != "running":  # whose files change meanwhile
            yield from self._result(row, at, folder, files, of)
            yield from self._files(row, at, folder, files, of)
            return
        for column, fault in faults_of(row).items():
            yield Damage(f"trial table: trial {key[:12]} {column}", fault, "it is planned again", "columns", (key,), of)

    def _result(
        self, row: dict[str, Any], at: str, folder: Path, files: set[str], of: tuple[str, ...]
    ) -> Iterator[Damage]:
        """The result in the row against that in the folder, which is the same but for what was measured later."""
        key, faults = row["key"], faults_of(row)
        if DISPUTED in files:
            fault = "a repair was ended that takes its result back"
            yield self._again(f"{at}/{DISPUTED}", fault, key, of, _mapping(row["result"]) or {})
            return
        file, wrong = self._result_file(folder) if "result.json" in files else (None, None)
        held = None if "result" in faults else _mapping(row["result"])
        for column, fault in faults.items():
            place = f"trial table: trial {key[:12]} {column}"
            known = file is not None and held is not None and _apart(file) == _apart(held)
            if column == "result" and file is not None and file.get("state") == row["state"]:
                yield Damage(place, fault, "it is taken from its result.json", "result", (key,), of)
            elif column == "result" or (column == "state" and not known):
                yield self._again(place, fault, key, of, held or file or {})
            else:
                yield Damage(place, fault, "it is set anew; its result stays", "columns", (key,), of)
        if "state" in faults or held is None or row["state"] not in ("complete", "diverged"):
            return
        if "reason" not in faults and row["reason"] != held.get("reason"):
            fault = f"it says {str(row['reason'])[:40]!r}, its result {str(held.get('reason'))[:40]!r}"
            yield Damage(
                f"trial table: trial {key[:12]} reason", fault, "it is taken from its result", "columns", (key,), of
            )
        if "result.json" not in files:
            if files:
                yield Damage(
                    f"{at}/result.json", "it is missing", "it is written from the table", "result.json", (key,), of
                )
        elif file is None:
            yield Damage(f"{at}/result.json", str(wrong), "it is written from the table", "result.json", (key,), of)
        elif _apart(held) != _apart(file):
            absent = "nothing"
            names = sorted(_apart(held).keys() | _apart(file))
            differ = next(name for name in names if held.get(name, absent) != file.get(name, absent))
            one, other = (str(each.get(differ, absent))[:40] for each in (file, held))
            fault = f"it says {differ} = {one}, the trial table {other}"
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
            elif name == DOCUMENTS and (fault := self._documents(folder / name)):
                yield self._again(f"{at}/{name}", fault, key, of, _mapping(row["result"]) or {})
        evaluated = row["state"] == "complete" and any(name.endswith(".pt") for name in files)
        if evaluated and DOCUMENTS not in files and (_mapping(row["result"]) or {}).get("test"):
            yield self._again(f"{at}/{DOCUMENTS}", "it is missing", key, of, _mapping(row["result"]) or {})

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
        read = ((number, *parsed(line, dict)) for number, line in enumerate(lines[:-1], 1))
        bad = [(number, fault) for number, line, value_fault in read if (fault := value_fault or fault_of(line, LINE))]
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"line {bad[0][0]}: {bad[0][1]}{more}" if bad else None

    def _documents(self, path: Path) -> str | None:
        try:
            with open_regular(path) as file, zipfile.ZipFile(file) as packed:
                damaged = packed.testzip() if all(each.file_size < MOST_BYTES for each in packed.infolist()) else None
                self.bytes += path.stat().st_size
        except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            return f"it can't be read: {getattr(error, 'strerror', None) or error}"
        return f"{damaged} in it is damaged" if damaged else None

    # what trials share

    def _data(self, folder: Path) -> Iterator[Damage]:
        if not (folder / HEADER).exists():
            return
        self.data_sets += 1
        try:
            for name in (HEADER, SUMS):
                if (folder / name).is_symlink():
                    raise DamagedData(f"{name} is a link")
            sums = Checksums(folder, mark=False)
            for name in (HEADER, *json.loads(self._read(folder / HEADER))["files"]):
                path = folder / name
                if Path(name).name != name or path.is_symlink() or not path.is_file():
                    raise DamagedData(f"{name!r} is no file of it")
                sums.check(name)
                self.bytes += path.stat().st_size
        except (*NO_JSON, OSError, KeyError, TypeError) as error:
            then = "the next run makes it again from its source"
            yield Damage(f"data/{folder.name}", str(error), then, "data", studies=self._studies_with(folder.name))
        if (folder / OVERLAP).exists() and (fault := fault_in(self._read(folder / OVERLAP), dict)):
            yield Damage(f"data/{folder.name}/{OVERLAP}", fault, "it is put aside; the next run counts again", "aside")

    def _beginnings(self, folder: Path) -> Iterator[Damage]:
        """Weights at the end of a stage, or the states of one kind from which longer trials go on."""
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        for each in [folder, *(path for path in inside if path.is_dir() and not path.is_symlink())]:
            for path in sorted(each.glob("checkpoint-*.pt")):
                if self.runs and not path.with_name(f"{path.name}.sha256").exists():
                    continue  # it is being written
                if fault := self._checkpoint(each, path.name):
                    then = "it is put aside; trials that begin with it train it again"
                    yield Damage(str(path.relative_to(self.store.root)), fault, then, "aside")

    def _measurements(self) -> Iterator[Damage]:
        """Ratios of step times, and coordinates of widths."""
        again = "it is put aside, and measured again"
        kinds = (
            ("timings", RATIO, f"{again}: variants that were matched by it may become others"),
            ("coordinates", COORDINATES, again),
        )
        for name, check, then in kinds:
            for path in self._inside(name):
                if path.suffix == ".json" and not path.name.startswith("."):
                    found, fault = parsed(self._bytes(path), dict)
                    if fault := fault or fault_of(found, check):
                        yield Damage(f"{name}/{path.name}", fault, then, "aside")

    def _plugin(self, path: Path) -> Iterator[Damage]:
        if path.suffix == ".py" and plugins.digest_of(self._read(path)) != path.stem.rpartition("-")[2]:
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

    def _bytes(self, path: Path) -> bytes | None:
        try:
            return self._read(path)
        except (OSError, ValueError):
            return None

    def _result_file(self, folder: Path) -> tuple[dict[str, Any] | None, str | None]:
        """The result.json of a trial, or what is wrong with it."""
        try:
            found, fault = parsed(self._read(folder / "result.json"), dict)
        except (OSError, ValueError) as error:
            return None, f"it can't be read: {getattr(error, 'strerror', None) or error}"
        fault = fault or fault_of_result(found, found.get("state"))
        return (None, fault) if fault else (found, None)


def _told(place: str, found: Iterator[Damage]) -> Iterator[Damage]:
    """What was found; what could not be read at all is damage too, and the rest is looked at."""
    try:
        yield from found
    except Exception as error:
        yield Damage(place, f"it can't be read: {str(error) or type(error).__name__}", "it is left as it is")


def _mapping(text: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = parsed(text, dict)[0] if text is not None else None
    return found


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
