"""A store that something has damaged: commands go on, `check` says where, `check --repair` leads back to the table."""

import hashlib
import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from archlab.cli.main import main
from archlab.search.running import garbage, repair
from archlab.search.store.lock import in_use
from archlab.search.store.rows import keyed, tell_left_out
from archlab.search.store.store import Store, StoreError
from tests.cli.test_cli import TINY
from tests.search.study_files import write_study

FIRST = "key = (SELECT min(key) FROM trial)"


def archlab(*arguments):
    """A command that ends, well or with its own error."""
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory):
    """A finished study of two variants and one seed: its folder, its store beside it."""
    folder = tmp_path_factory.mktemp("undamaged")
    write_study(folder, **TINY, seeds="seeds: 1")
    ended = archlab("run", folder / "study.yaml", "--inline", "--no-track", "--store", folder / "store")
    assert ended.exit_code == 0, ended.output
    return folder


@pytest.fixture
def study(undamaged, tmp_path, monkeypatch):
    """A copy that may be damaged, and no private folders of others in sight. Its text is the same, so its trials
    are too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    shutil.copytree(undamaged / "store", tmp_path / "store")
    return tmp_path


def statement(sql):
    def damaged(store):
        with closing(sqlite3.connect(store / "trials.db")) as table:
            table.execute("PRAGMA foreign_keys = OFF")
            for each in sql.split(";"):
                assert table.execute(each).rowcount > 0
            table.commit()

    return damaged


def flipped(pattern, place=0):
    """The low bit of a byte of a file of the first trial."""

    def damaged(store):
        path = sorted(store.glob(pattern))[0]
        held = bytearray(path.read_bytes())
        held[place] ^= 1
        path.write_bytes(held)

    return damaged


def spoiled_spec(store):
    """In the table and in the folder."""
    flipped("trials/*/*/trial.json", 9)(store)
    statement(f"UPDATE trial SET spec = '[' WHERE {FIRST}")(store)


# of each: what does it, and where `check` says that it is
CASES = {
    "cut_result": (statement(f"UPDATE trial SET result = substr(result, 1, 40) WHERE {FIRST}"), "result"),
    "foreign_key": (
        statement(
            f"UPDATE study_trial SET key = '../../x' WHERE {FIRST}; UPDATE trial SET key = '../../x' WHERE {FIRST}"
        ),
        "'../../x'",
    ),
    "spec": (statement(f"UPDATE trial SET spec = '{{}}' WHERE {FIRST}"), "spec"),
    "checkpoint": (flipped("trials/*/*/checkpoint-*.pt", 100), ".pt"),
    "deep_result": (
        statement(f"UPDATE trial SET result = replace(hex(zeroblob(9999)), '0', '[') WHERE {FIRST}"), "result"
    ),
    "another_result": (
        statement(f"UPDATE trial SET result = replace(result, '\"tokens\": ', '\"tokens\": 1') WHERE {FIRST}"),
        "result.json",
    ),
    "no_utf8": (statement(f"UPDATE trial SET reason = CAST(x'ff41' AS TEXT), updated = 'x' WHERE {FIRST}"), "updated"),
    "trial_key": (statement(f"UPDATE trial SET key = 'zz' || substr(key, 3) WHERE {FIRST}"), "no trial's key" ),
    "orphaned": (statement(f"UPDATE study_trial SET orphaned = 'x' WHERE {FIRST}"), "orphaned"),
    "both_specs": (spoiled_spec, "spec"),
    "attempt": (statement(f"UPDATE trial SET attempt = 'many' WHERE {FIRST}"), "attempt"),
    "settings": (statement(f"UPDATE study_trial SET settings = '[]' WHERE {FIRST}"), "settings"),
    "seed": (statement(f"UPDATE study_trial SET seed = 'x' WHERE {FIRST}"), "seed"),
    "record": (statement("UPDATE study SET record = '[]'"), "record"),
    "name": (
        statement("UPDATE study SET name = '../../x'; UPDATE study_trial SET study = '../../x'"), "no study's name"
    ),
    "decision": (statement("UPDATE decision SET value = '{'"), "decision"),
    "other decision": (statement("UPDATE decision SET value = '[1]' WHERE name = 'precision and compile'"), "decision"),
    "result_of_another_shape": (statement(f"UPDATE trial SET result = '[1]' WHERE {FIRST}"), "result"),
    "result_without_a_loss": (
        statement(f"UPDATE trial SET result = json_remove(result, '$.test.loss') WHERE {FIRST}"), "result"
    ),
    "result_with_a_text": (
        statement(f"UPDATE trial SET result = json_set(result, '$.validation.loss', '2.5') WHERE {FIRST}"), "result"
    ),
    "result_gone": (statement(f"UPDATE trial SET result = NULL WHERE {FIRST}"), "result"),
    "rate": (statement(f"UPDATE study_trial SET settings = '{{\"lr\": \"x\"}}' WHERE {FIRST}"), "settings"),
    "event": (statement("UPDATE event SET detail = '{\"spent\": {\"tokens\": \"x\"}}' WHERE id = 1"), "event 1 detail"),
    "time of an event": (statement("UPDATE event SET time = 'x' WHERE id = 1"), "event 1 time"),
    "dates": (statement("UPDATE study SET updated = 1e300"), "updated"),
    "finding": (
        statement("INSERT INTO memory VALUES ('measure ' || (SELECT min(key) FROM trial), 'x', '[]', 0)"), "memory"
    ),
    "note": (statement("INSERT INTO memory VALUES ('note study', 'gates', '{\"text\": 5, \"tags\": 5}', 0)"), "memory"),
    "result_json_of_another_shape": (
        lambda store: sorted(store.glob("trials/*/*/result.json"))[0].write_text('{"state": "complete"}'), "result.json"
    ),
    "timings": (
        lambda store: [(store / "timings").mkdir(), (store / "timings" / "a.json").write_text('{"ratio": 0}')],
        "timings",
    ),
    "trial_json": (flipped("trials/*/*/trial.json", 9), "trial.json"),
    "result_json": (flipped("trials/*/*/result.json"), "result.json"),
    "documents": (flipped("trials/*/*/test_documents.npz", 60), "test_documents.npz"),
    "record_bit": (statement("UPDATE study SET record = replace(record, 'variants', 'variantz')"), "record"),
    "reason": (statement(f"UPDATE trial SET reason = 'x' WHERE {FIRST}"), "reason"),
    "owner": (statement(f"UPDATE trial SET owner = '../x' WHERE {FIRST}"), "owner"),
    "nobody_runs": (statement(f"UPDATE trial SET state = 'running', owner = NULL WHERE {FIRST}"), "owner"),
    "no_documents": (lambda store: sorted(store.glob("trials/*/*/test_documents.npz"))[0].unlink(), "documents.npz"),
    "overlap": (lambda store: next(store.glob("data/*/overlap.json")).write_text("["), "data/"),
    "data": (flipped("data/*/train.bin", 500), "data/"),
}  # fmt: skip
SOON = {"cut_result", "foreign_key", "spec", "result_without_a_loss", "event", "dates", "note"}


def results(store):
    """What the trials found, without what is a timing."""
    with Store.open(store, create=False) as opened:
        rows = opened.study_trials("gates")
    kept = ("state", "tokens", "test", "validation", "step")
    found = {row["key"]: {name: (row["result"] or {}).get(name) for name in kept} for row in rows}
    return {**found, "reused": [row["key"] for row in rows if row["reused"]]}


def held(folder):
    """The digest of every file, but for what SQLite writes beside a table that is read."""
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-wal", "-shm"))
    }


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SOON else [pytest.mark.slow]) for n in CASES])
def test_a_damaged_store_is_read_told_and_mended(undamaged, study, name):
    harm, place = CASES[name]
    store, wanted = study / "store", results(undamaged / "store")
    harm(store)
    for command in (["status"], ["report", undamaged / "study.yaml"], ["gc"]):
        assert archlab(*command, "--store", store).exit_code in (0, 1, 2), command
    before = held(store)
    told = archlab("check", "--store", store)
    assert (told.exit_code, held(store)) == (1, before)
    assert any(place in line for line in told.output.splitlines() if not line.startswith(" ")), told.output

    mended = archlab("check", "--repair", "--store", store)
    run = ["run", undamaged / "study.yaml", "--inline", "--no-track", "--store", store]
    assert mended.exit_code == (1 if name.startswith("record") else 0), mended.output  # which the next run stores anew
    assert archlab(*run).exit_code == 0
    assert results(store) == wanted
    if name == "both_specs":  # the table has its spec from the run, the folder from the table
        assert archlab("check", "--repair", "--store", store).exit_code == 0
    assert archlab("check", "--store", store).output.endswith("nothing is damaged\n")


def test_what_is_replaced_is_kept(study):
    store = study / "store"
    flipped("trials/*/*/checkpoint-*.pt", 100)(store)
    statement(f"UPDATE trial SET result = '{{' WHERE {FIRST}")(store)
    damaged = sorted(store.glob("trials/*/*/checkpoint-*.pt"))[0]
    was = damaged.read_bytes()
    told = json.loads(archlab("check", "--repair", "--json", "--store", store).stdout)
    assert {each["mend"] for each in told["damaged"]} == {"aside", "result"}
    (aside,) = (store / "damaged").iterdir()
    assert (aside / damaged.relative_to(store)).read_bytes() == was
    assert "{" in [json.loads(line)["result"] for line in (aside / "rows.jsonl").read_text().splitlines()]


def test_nothing_is_mended_while_a_study_runs(study):
    store = study / "store"
    statement(f"UPDATE trial SET result = '{{' WHERE {FIRST}")(store)
    before = held(store)
    with Store.open(store, create=False) as opened, in_use(store), pytest.raises(StoreError, match="under way"):
        repair.repair(opened)
    assert held(store) == before


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE study_trial SET orphaned = 'x'",
        "UPDATE study_trial SET key = 'zz'",
        "UPDATE study SET name = 'go/od'",
        "UPDATE study SET record = '['",
        "UPDATE trial SET key = 'zz' || substr(key, 3)",
        "UPDATE trial SET spec = '['",
    ],
)
def test_nothing_goes_that_a_damaged_row_may_want(study, sql):
    """Nor what its study has still to ask for again, once it is mended."""
    store = study / "store"
    with Store.open(store, create=False) as opened:
        assert garbage.look(opened).waste == []
    statement(f"{sql} WHERE rowid = (SELECT min(rowid) FROM {sql.split()[1]})")(store)
    with Store.open(store, create=False) as opened:
        assert garbage.look(opened).waste == []
        repair.repair(opened)
        assert garbage.look(opened).waste == []


def test_what_has_a_result_is_not_trained_for_the_sake_of_another_column(study):
    store = study / "store"
    wanted = results(store)
    statement(f"UPDATE trial SET updated = 'x', attempt = 'y' WHERE {FIRST}")(store)
    assert archlab("check", "--repair", "--store", store).exit_code == 0
    assert results(store) == wanted


def test_what_can_not_even_be_read_is_told_with_the_rest(study):
    """A link instead of a trial.json, an archive of which a bit is wrong under a result that is no JSON."""
    store = study / "store"
    first, second = sorted(path for path in store.glob("trials/*/*") if path.is_dir())
    (first / "trial.json").rename(study / "elsewhere")
    (first / "trial.json").symlink_to(study / "elsewhere")
    flipped("trials/*/*/test_documents.npz", 6)(store)
    statement("UPDATE trial SET result = '{bad'; UPDATE study SET name = CAST(name AS BLOB)")(store)
    told = json.loads(archlab("check", "--json", "--store", store).stdout)["damaged"]
    places = [each["place"] for each in told]
    assert any(place.endswith("trial.json") for place in places)
    assert sum(place.endswith(" result") for place in places) == 2
    assert any("b'gates'" in place for place in places)
    assert second.is_dir()


def test_a_strangers_store_is_looked_at_without_following_it(study):
    """A link instead of a trial's folder, a pipe instead of a journal, a table with a trigger."""
    store = study / "store"
    folders = sorted(path for path in store.glob("trials/*/*") if path.is_dir())
    secret = study / "secret"
    shutil.move(folders[0], secret)
    folders[0].symlink_to(secret)
    (folders[1] / "metrics.jsonl").unlink()
    os.mkfifo(folders[1] / "metrics.jsonl")
    with closing(sqlite3.connect(store / "trials.db")) as table:
        table.execute("CREATE TRIGGER t AFTER UPDATE ON trial BEGIN DELETE FROM study; END")
    told = archlab("check", "--store", store)
    lines = [line for line in told.output.splitlines() if not line.startswith(" ")]
    assert told.exit_code == 1
    assert "trials.db: 't' is in it, which archlab does not make" in lines
    assert f"trials/{folders[0].parent.name}/{folders[0].name}: a link leads there" in lines
    assert any(Path(line.partition(":")[0]).name == "metrics.jsonl" and "no regular file" in line for line in lines)


def test_what_is_left_out_is_told_once(caplog):
    tell_left_out.cache_clear()
    for _ in range(2):
        assert keyed([{"key": "../x"}, {"key": "ab" * 32}]) == [{"key": "ab" * 32}]
    assert [record.getMessage() for record in caplog.records] == [
        "the trial table has a row whose key is no trial's: it is left out; archlab check says what can be done"
    ]


class Killed(BaseException):
    """The process ends here."""


def killed_at(step, patched):
    """A repair is killed before the so-and-so-many-th time that it changes something."""
    done = 0

    def counted(change):
        def before(*arguments, **options):
            nonlocal done
            done += 1
            if done == step:
                raise Killed
            return change(*arguments, **options)

        return before

    patched.setattr(repair, "write_whole", counted(repair.write_whole))
    patched.setattr(repair.os, "replace", counted(os.replace))
    for name in ("_set", "_write", "_keep_row", "_remove_rows"):
        patched.setattr(repair._Mending, name, counted(getattr(repair._Mending, name)))


DISPUTES = {
    "result": CASES["another_result"],
    "spec": (statement(f"UPDATE trial SET spec = '{{}}', state = 'planned', result = NULL WHERE {FIRST}"), "spec"),
    "both_specs": CASES["both_specs"],
    "trial_json": CASES["trial_json"],
    "documents": CASES["documents"],
}


@pytest.mark.parametrize("name", DISPUTES)
def test_a_repair_that_is_killed_at_any_step_is_repeated(undamaged, study, name):
    store, wanted = study / "store", results(undamaged / "store")
    DISPUTES[name][0](store)
    shutil.copytree(store, study / "damaged")
    run = ["run", undamaged / "study.yaml", "--inline", "--no-track", "--store", store]
    for step in range(1, 20):
        shutil.rmtree(store)
        shutil.copytree(study / "damaged", store)
        with pytest.MonkeyPatch.context() as patched, Store.open(store, create=False) as opened:
            killed_at(step, patched)
            try:
                repair.repair(opened)
            except Killed:
                ended = False
            else:
                ended = True
        for _ in range(2):  # what the first run wrote into the table of a spoiled trial goes into its folder
            assert archlab("check", "--repair", "--store", store).exit_code == 0
            assert archlab(*run).exit_code == 0
        assert archlab("check", "--store", store).output.endswith("nothing is damaged\n"), step
        assert results(store) == wanted, step
        if ended:
            assert step > 2
            return
    raise AssertionError("it never ended")


def test_a_trial_whose_spec_is_damaged_does_not_keep_the_others_from_training(undamaged, study):
    """It is a failed row that says what to do, and is trained after that."""
    store, wanted = study / "store", results(undamaged / "store")
    run = ["run", undamaged / "study.yaml", "--inline", "--no-track", "--store", store]
    statement("UPDATE trial SET state = 'planned', result = NULL")(store)
    statement(f"UPDATE trial SET spec = '{{' WHERE {FIRST}")(store)
    for folder in store.glob("trials/*/*"):
        shutil.rmtree(folder)
    assert archlab(*run).exit_code == 1
    with Store.open(store, create=False) as opened:
        first, second = sorted(opened.study_trials("gates"), key=lambda row: row["key"])
    assert (first["state"], second["state"]) == ("failed", "complete")
    assert "archlab check --repair" in first["reason"]
    assert archlab("check", "--repair", "--store", store).exit_code == 0
    assert archlab(*run).exit_code == 0
    assert results(store) == wanted


def link(path, elsewhere):
    path.symlink_to(elsewhere)


def pipe(path, _):
    os.mkfifo(path)


@pytest.mark.parametrize("put", [link, pipe])
def test_no_trial_is_trained_where_it_would_write_through_a_link_or_wait_for_a_pipe(undamaged, study, put):
    store = study / "store"
    (study / "elsewhere").write_text("mine")
    statement("UPDATE trial SET state = 'planned', result = NULL")(store)
    first, second = sorted(path for path in store.glob("trials/*/*") if path.is_dir())
    for folder in (first, second):
        (folder / "result.json").unlink()
    (first / "load.jsonl").unlink(missing_ok=True)
    put(first / "load.jsonl", study / "elsewhere")
    ended = archlab("run", undamaged / "study.yaml", "--inline", "--no-track", "--store", store)
    assert ended.exit_code == 1
    with Store.open(store, create=False) as opened:
        rows = {row["key"]: row for row in opened.study_trials("gates")}
    assert f"{first / 'load.jsonl'} is no regular file" in rows[first.name]["reason"]
    assert rows[second.name]["state"] == "complete"
    assert (study / "elsewhere").read_text() == "mine"


def test_a_row_whose_trial_is_lost_is_counted_and_told(undamaged, study):
    store, wanted = study / "store", results(undamaged / "store")
    statement(f"DELETE FROM trial WHERE {FIRST}")(store)
    assert "2 trials: 1 complete, 1 failed" in archlab("status", "--store", store).output
    with Store.open(store, create=False) as opened:
        (lost,) = (row for row in opened.study_trials("gates") if row["state"] == "failed")
    assert "key: there is no such trial" in lost["reason"]
    assert archlab("check", "--repair", "--store", store).exit_code == 0
    assert archlab("run", undamaged / "study.yaml", "--inline", "--no-track", "--store", store).exit_code == 0
    assert results(store) == wanted


@pytest.mark.parametrize("place", ["stages/ab-cd", "prefixes/ab/4-cd-ef"])
def test_what_trials_begin_with_is_checked_too(study, place):
    store = study / "store"
    shared = store / place
    shared.mkdir(parents=True)
    for path in sorted(store.glob("trials/*/*/checkpoint-*.pt*"))[:2]:
        shutil.copy(path, shared)
    assert archlab("check", "--store", store).exit_code == 0
    flipped(f"{place}/checkpoint-*.pt", 100)(store)
    told = archlab("check", "--store", store)
    assert told.exit_code == 1 and f"{place}/checkpoint-4.pt: its sha256 is another one" in told.output
    assert archlab("check", "--repair", "--store", store).exit_code == 0
    assert archlab("check", "--store", store).exit_code == 0
    assert len([*store.glob(f"damaged/*/{place}/checkpoint-4.pt")]) == 1


@pytest.mark.parametrize("apply", [[], ["--apply"]])
def test_gc_asks_once_whether_the_table_is_whole(study, apply, monkeypatch):
    asked = []
    monkeypatch.setattr(garbage, "is_whole", lambda store: asked.append(store) or True)
    assert archlab("gc", *apply, "--store", study / "store").exit_code == 0
    assert len(asked) == 1
