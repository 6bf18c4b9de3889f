"""What may happen to a store: to its files, to the cells of its trial table, to the file that has that table."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.fuzz_kit import EXTREMES

TABLES = ("study", "trial", "study_trial", "event", "decision", "memory")
_HEAD = 4096  # bytes of a file in which most of what is read first lies


@dataclass(frozen=True)
class Damage:
    """One thing that happens: of which kind, to which file, where in it, and what is put there."""

    kind: str
    file: int
    place: int
    value: Any

    def strike(self, store: Path, elsewhere: Path) -> str:
        """Does it to a store, and says to which file. `elsewhere` is a file that links lead to."""
        files = sorted(each for each in store.rglob("*") if each.is_file() and not each.is_symlink())
        if self.kind in _TABLE:
            path = store / "trials.db"
            if path.is_file() and not path.is_symlink():
                _TABLE[self.kind](path, self)
        elif files:
            path = files[self.file % len(files)]
            if self.kind in ("link", "swap"):
                _exchange(self, path, elsewhere, files)
            else:
                _FILES[self.kind](path, self)
        else:
            return ""
        return str(path.relative_to(store))


def _flip(path: Path, how: Damage) -> None:
    held = bytearray(path.read_bytes())
    if held:
        at = how.place % min(len(held), _HEAD) if how.file % 2 else how.place % len(held)
        held[at] ^= 1 << how.place % 8
        path.write_bytes(held)


def _truncate(path: Path, how: Damage) -> None:
    os.truncate(path, how.place % (path.stat().st_size + 1))


def _empty(path: Path, _: Damage) -> None:
    path.write_bytes(b"")


def _garbage(path: Path, how: Damage) -> None:
    path.write_bytes(random.Random(how.place).randbytes(how.place % 5000))


def _other_json(path: Path, how: Damage) -> None:
    """JSON of another kind than what the file held."""
    path.write_text(json.dumps(how.value, default=repr))


def _changed_json(path: Path, how: Damage) -> None:
    """One value of what the file held."""
    try:
        held = json.loads(path.read_text())
    except ValueError:
        return
    if isinstance(held, dict) and held:
        held[sorted(held)[how.place % len(held)]] = how.value
        path.write_text(json.dumps(held, default=repr))


def _newer(path: Path, how: Damage) -> None:
    """As a newer archlab would have left the store."""
    marker = path
    while marker.name != "trials" and not (marker / "store.json").exists() and marker != marker.parent:
        marker = marker.parent
    marker = marker / "store.json"
    if marker.is_file():
        marker.write_text(json.dumps({"version": 1 + how.place % 6}))


def _delete(path: Path, _: Damage) -> None:
    path.unlink()


def _pipe(path: Path, _: Damage) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, how: Damage) -> None:
    path.unlink()
    path.mkdir()
    if how.place % 2:
        (path / "file").write_text("x")


def _no_folder(path: Path, how: Damage) -> None:
    """A file in the place of a folder, but for the store's own."""
    if not path.with_name("store.json").exists() and path.name != "trials.db":
        shutil.rmtree(path.parent)
        path.parent.write_text("x")


def _unreadable(path: Path, _: Damage) -> None:
    path.chmod(0o000)


def _exchange(how: Damage, path: Path, elsewhere: Path, files: list[Path]) -> None:
    """A link to a file elsewhere, or to one of the store, in the place of a file; or two files swapped."""
    other = files[how.place % len(files)]
    if how.kind == "swap":
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
        return
    target = {0: elsewhere, 1: elsewhere.with_name("absent"), 2: elsewhere.parent}.get(how.place % 4, other)
    if target != path:
        path.unlink()
        path.symlink_to(target)


def _cell(path: Path, how: Damage) -> None:
    """Any value in one cell, whatever the table's own rules say of it."""
    table = TABLES[how.file % len(TABLES)] if how.file % 3 else TABLES[1 + how.file % 2]
    with closing(sqlite3.connect(path)) as db:
        try:
            db.execute("PRAGMA foreign_keys = OFF")
            db.execute("PRAGMA ignore_check_constraints = ON")
            rows = [row[0] for row in db.execute(f"SELECT rowid FROM {table} ORDER BY rowid")]
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            if rows:
                column = columns[how.place % len(columns)]
                row = rows[how.place // len(columns) % len(rows)]
                db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (_stored(how.value), row))
                db.commit()
        except sqlite3.Error:
            db.rollback()  # what SQLite itself does not take, or can't do with a file that is damaged already


def _other_value(path: Path, how: Damage) -> None:
    """Valid JSON of another shape in the place of a value of the trial table, or of a part of it."""
    columns = [("trial", "result"), ("study_trial", "settings"), ("decision", "value"), ("memory", "value")]
    table, column = [*columns, ("event", "detail"), ("trial", "result")][how.file % 6]
    with closing(sqlite3.connect(path)) as db:
        try:
            found = f"SELECT rowid, {column} FROM {table} WHERE {column} IS NOT NULL ORDER BY rowid"
            rows = db.execute(found).fetchall()
            if rows:
                row, held = rows[how.place // 7 % len(rows)]
                now = json.dumps(_within(json.loads(held), how.place, how.value), default=repr)
                db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (now, row))
                db.commit()
        except (sqlite3.Error, ValueError, RecursionError):
            db.rollback()


def _within(held: Any, place: int, value: Any) -> Any:
    """The same with another value somewhere in it, or without something; or the other value as a whole."""
    if not isinstance(held, dict) or not held or place % 4 == 0:
        return value
    name = sorted(held)[place % len(held)]
    if place % 4 == 1:
        return {key: each for key, each in held.items() if key != name}
    return held | {name: _within(held[name], place // 4, value)}


def _stored(value: Any) -> Any:
    if isinstance(value, bool | int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value if value is None or isinstance(value, int | float | bytes | str) else json.dumps(value, default=repr)


def _row_gone(path: Path, how: Damage) -> None:
    table = TABLES[how.file % len(TABLES)]
    with closing(sqlite3.connect(path)) as db:
        try:
            db.execute(f"DELETE FROM {table} WHERE rowid = (SELECT rowid FROM {table} LIMIT 1 OFFSET {how.place % 4})")
            db.commit()
        except sqlite3.Error:
            db.rollback()


def _log_cut(path: Path, how: Damage) -> None:
    """The newest transactions lost, or a part of them."""
    log = path.with_name("trials.db-wal")
    if log.is_file():
        os.truncate(log, how.place % (log.stat().st_size + 1))


def _log_gone(path: Path, _: Damage) -> None:
    path.with_name("trials.db-wal").unlink(missing_ok=True)


def _table_version(path: Path, how: Damage) -> None:
    with closing(sqlite3.connect(path)) as db:
        try:
            db.execute(f"PRAGMA user_version = {how.place % 6}")
        except sqlite3.Error:
            db.rollback()


def _read_only(path: Path, _: Damage) -> None:
    path.chmod(0o400)


_FILES: dict[str, Callable[[Path, Damage], None]] = {
    "flip": _flip, "truncate": _truncate, "empty": _empty, "garbage": _garbage, "other_json": _other_json,
    "changed_json": _changed_json, "newer": _newer, "delete": _delete, "pipe": _pipe, "folder": _folder,
    "no_folder": _no_folder, "unreadable": _unreadable,
}  # fmt: skip
_TABLE: dict[str, Callable[[Path, Damage], None]] = {
    "cell": _cell, "other_value": _other_value,
    "row_gone": _row_gone, "table_flip": _flip, "table_cut": _truncate, "log_cut": _log_cut,
    "log_gone": _log_gone, "table_version": _table_version, "read_only": _read_only,
}  # fmt: skip
_OFTEN = ["other_value", "cell"] * 3
_KINDS = [*_FILES, *_TABLE, *_OFTEN, "link", "swap", "flip", "link", "table_flip"]
_values = st.one_of(
    st.sampled_from(EXTREMES),
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.sampled_from(["planned", "running", "paused", "complete", "pruned", "failed", "diverged", "ab" * 32, "{}"]),
)
damages = st.lists(
    st.builds(Damage, st.sampled_from(_KINDS), st.integers(0, 10**4), st.integers(0, 10**6), _values),
    min_size=1,
    max_size=3,
)
"""One to three of them."""
