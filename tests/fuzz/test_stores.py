"""Whatever happened to a store: commands answer or say what is wrong and where, write nothing elsewhere, and lose
nothing that is whole. After `check --repair` a run leads to the table that it would have had, or is refused."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given

from archlab.cli.main import main
from archlab.search.store.rows import tell_left_out
from archlab.search.store.store import Store
from tests.cli.test_cli import TINY
from tests.fuzz.damages import Damage, damages
from tests.fuzz.fuzz_kit import bounded_work, examples, tried
from tests.search.oracle import HISTORY, PLACES, TIMINGS, table_of
from tests.search.study_files import write_study

MOST_CALLS = 30_000_000
"""Function calls that one command may take."""
_HUNG_S = 600  # a command that waits for ever ends the process, which says where
_TRIALS = 4
_CODES = (0, 1, 2, 3, 75)
_STAY = ("result.json", "test_documents.npz", "metrics.jsonl")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A folder with a study, and a store `half` in which two of its four trials are done; and the table of all four."""
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(folder))
        patched.setattr(tempfile, "tempdir", None)
        write_study(folder, **TINY, seeds="seeds: 2")
        assert archlab("run", folder / "study.yaml", "--inline", "--no-track", store=folder / "whole").exit_code == 0
        shutil.copytree(folder / "whole", folder / "half")
        interrupt(folder / "half")
        yield folder, the_table(folder / "whole")


def interrupt(store: Path) -> None:
    """Leaves a store as a driver does that was killed: one of four trials runs and has no result, one was not begun.
    All that happened stands in the table's log, which nobody has folded into its file yet."""
    with Store.open(store, create=False) as opened:
        *done, running, planned = (row["key"] for row in opened.study_trials("gates"))
        (opened.trial_folder(running) / "result.json").unlink()
        shutil.rmtree(opened.trial_folder(planned))
    with closing(sqlite3.connect(store / "trials.db")) as db:
        events = db.execute("SELECT * FROM event").fetchall()
        trials = db.execute("SELECT attempt, owner, result, key FROM trial").fetchall()
        db.execute("DELETE FROM event")
        db.execute("UPDATE trial SET state = 'planned', attempt = 0, result = NULL, owner = NULL")
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        for attempt, owner, result, key in (each for each in trials if each[-1] in (*done, running)):
            state, result = ("running", None) if key == running else ("complete", result)
            values = (state, attempt, owner, result, key)
            db.execute("UPDATE trial SET state = ?, attempt = ?, owner = ?, result = ? WHERE key = ?", values)
            db.commit()
        db.executemany("INSERT INTO event VALUES (?, ?, ?, ?, ?, ?, ?)", events)
        db.execute("DELETE FROM event WHERE key = ? AND kind = 'complete' OR key = ?", (running, planned))
        db.commit()
        for name in ("trials.db", "trials.db-wal"):
            shutil.copyfile(store / name, store / f"{name}.copy")
    for name in ("trials.db", "trials.db-wal"):
        os.replace(store / f"{name}.copy", store / name)


def archlab(*arguments: Any, store: Path) -> Result:
    """A command that ends by itself, well or with an error of its own."""
    tell_left_out.cache_clear()
    with bounded_work(MOST_CALLS):
        result = CliRunner().invoke(main, [*map(str, arguments), "--store", str(store)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in _CODES and "Traceback" not in result.output, result.output
    assert result.exit_code == 0 or result.output.strip()
    return result


def the_table(store: Path) -> Any:
    """All that a report says but for what depends on time and place, and on counts beside the data that may be lost."""
    found = table_of(store, TIMINGS, PLACES, HISTORY, study="gates")
    del found["notes"], found["provenance"]["versions"]
    found["provenance"]["data"].pop("overlap", None)
    return found


def held(folder: Path) -> dict[str, str]:
    """What every file of a folder holds, and where links lead."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def kept(store: Path) -> Counter[str]:
    """How often each content is there, of the files that always stay."""
    found = held(store)
    return Counter(digest for path, digest in found.items() if Path(path).name in _STAY)


def untouched(store: Path, struck: set[str]) -> dict[str, str]:
    """The results of trials in whose folders nothing happened."""
    folders = {str(Path(each).parent) for each in struck}
    found = {}
    for name in _STAY[:2]:
        for path in store.glob(f"trials/*/*/{name}"):
            if str(path.parent.relative_to(store)) not in folders and not path.is_symlink():
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@examples(8)
@given(what=damages)
@example(what=[Damage("cell", 0, 28, None)])  # nobody knows any more who ran a trial
def test_a_store_is_read_mended_and_run_whatever_happened_to_it(what: list[Damage], made: tuple[Path, Any]) -> None:
    source, calm = made
    faulthandler.dump_traceback_later(_HUNG_S, exit=True)
    folder = Path(tempfile.mkdtemp(dir=source))
    try:
        guard = folder / "guard"
        guard.mkdir()
        (guard / "file").write_text('{"version": 3}\n')
        store = folder / "store"
        shutil.copytree(source / "half", store)
        struck = {each.strike(store, guard / "file") for each in what}
        before = held(guard)
        looks_and_cleans(source / "study.yaml", store, folder)
        assert held(guard) == before, "a look or a cleaning wrote elsewhere"
        leads_back(source / "study.yaml", store, struck, calm)
        assert held(guard) == before, "a repair or a run wrote elsewhere"
    finally:
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(folder)


def looks_and_cleans(study: Path, store: Path, folder: Path) -> None:
    """What only looks changes nothing, and what is cleaned away was nobody's."""
    before = held(store)
    for command in (["status"], ["report", study], ["check"], ["gc"]):
        archlab(*command, store=store)
        changed = {path for path, _ in held(store).items() ^ before.items()}
        assert not [path for path in changed if Path(path).name.partition(".")[0] not in ("trials", "store")], command
    archlab("plan", study, store=store)
    copy = folder / "cleaned"
    shutil.copytree(store, copy, symlinks=True, copy_function=_copied)
    archlab("gc", "--apply", store=copy)
    assert not kept(store) - kept(copy)


def _copied(source: str, target: str) -> str:
    """Copies files; makes pipes anew."""
    if Path(source).is_fifo():
        os.mkfifo(target)
        return target
    return str(shutil.copy2(source, target, follow_symlinks=False))


def leads_back(study: Path, store: Path, struck: set[str], calm: Any) -> None:
    """To the table, or to a refusal with everything still there."""
    whole = untouched(store, struck)
    archlab("check", "--repair", store=store)
    ended = archlab("run", study, "--inline", "--no-track", store=store)
    tried(refused=ended.exit_code != 0)
    there = held(store)
    if any(name.startswith("trials.db") or name == "store.json" for name in struck):
        assert not Counter(whole.values()) - Counter(there.values())
    else:
        assert {path: there.get(path) for path in whole} == whole
    if ended.exit_code == 0 and len([*store.glob("trials/*/*/test_documents.npz")]) == _TRIALS:
        assert the_table(store) == calm  # whose intervals need the documents: lost folders are not made again
