"""What a store, a study or a stranger could do to a machine: leave the folder, run code, be listened to, be read."""

import ast
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from functools import cache

import pytest
from click.testing import CliRunner

from archlab.cli.main import main
from archlab.dashboards.trials import tail
from archlab.search.store.lock import lock_path
from archlab.search.store.store import Store
from tests.cli.test_cli import TINY
from tests.search.processes import descendants, listeners
from tests.search.study_files import write_study
from tests.search.study_kit import ROOT, make_store, rows_of, toy, until

NAMES = ["../../x", "a/../../x", "/tmp/x", "", "x" * 600, "é", "a\0b", "..", "-rf", ".hidden", "a b"]
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def archlab(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def everything_below(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:20]))
def test_no_study_is_named_so_that_it_leaves_the_store(tmp_path, name):
    place = tmp_path / "inside"
    place.mkdir()
    study = write_study(place, **TINY | {"study": f"study: {name!r}" if "\0" not in name else 'study: "a\\0b"'})
    before = everything_below(tmp_path)
    result = archlab("run", study, "--inline", "--no-track", "--store", place / "store")
    assert result.exit_code == 2, result.output
    assert [path for path in everything_below(tmp_path) if path.parts[:2] != ("inside", "store")] == before
    with pytest.raises(ValueError, match="study name"):
        lock_path(place, name)


@pytest.mark.parametrize("verb", ["status", "watch", "stop", "retry", "report"])
def test_no_verb_follows_a_name_out_of_the_store(tmp_path, verb):
    store = tmp_path / "store"
    make_store(store, rows=rows_of(toy())).close()
    (tmp_path / "x.lock").write_text("theirs")
    before = everything_below(tmp_path)
    result = archlab(verb, "../../x", "--store", store)
    assert result.exit_code == 2 and "no study" in result.output, result.output
    assert everything_below(tmp_path) == before and (tmp_path / "x.lock").read_text() == "theirs"


@pytest.fixture
def theirs(tmp_path):
    """A folder beside the store, of somebody else: what looks like waste of a store, and a secret."""
    folder = tmp_path / "theirs"
    for name in (f"{'0' * 32}-0123/checkpoint-4.pt", "kind/checkpoint-4.pt", "0123456789abcdef/data.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("theirs")
    (folder / "secret.txt").write_text("a secret\n")
    return folder


@pytest.mark.parametrize("name", ["stages", "prefixes", "data", "trials"])
def test_nothing_is_deleted_through_a_link(tmp_path, theirs, name):
    root = tmp_path / "store"
    store = make_store(root, rows=rows_of(toy()))
    if name == "trials":  # the checkpoints of one that diverged are waste
        key = toy().key
        store.claim(key, "s")
        store.finish(key, 1, "diverged", {"state": "diverged"})
        (theirs / key[:2] / key).mkdir(parents=True)
        (theirs / key[:2] / key / "checkpoint-4.pt").write_text("theirs")
    store.close()
    before = everything_below(theirs)
    if (root / name).is_dir():
        (root / name).rename(root / "away")
    (root / name).symlink_to(theirs)
    result = archlab("gc", "--apply", "--store", root)
    assert result.exit_code == 0 and "a link leads there" in result.output, result.output
    assert everything_below(theirs) == before


@pytest.mark.parametrize("verb", ["gc", "report"])
def test_no_key_of_the_table_leads_out_of_the_store(tmp_path, theirs, verb):
    """A row of ../theirs is no trial: its checkpoints would be deleted, its files read."""
    study = write_study(tmp_path, **TINY, seeds="seeds: 1")
    root, before = tmp_path / "store", everything_below(theirs)
    assert archlab("run", study, "--inline", "--no-track", "--store", root).exit_code == 0
    with sqlite3.connect(root / "trials.db") as db:
        (key,) = db.execute("SELECT key FROM trial LIMIT 1").fetchone()
        for table in ("trial", "study_trial"):
            db.execute(f"UPDATE {table} SET key = '../../theirs' WHERE key = ?", (key,))
    result = archlab(*{"gc": ["gc", "--apply"], "report": ["report", "gates"]}[verb], "--store", root)
    assert result.exit_code == 0, result.output
    assert "rows of the trial table are damaged" in result.output or "incomplete" in result.output
    assert everything_below(theirs) == before


def test_the_dashboard_shows_no_file_that_a_link_leads_to(tmp_path, theirs):
    root = tmp_path / "store"
    store = make_store(root, rows=rows_of(toy()))
    folder = store.trial_folder(toy().key)
    store.close()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "output.txt").symlink_to(theirs / "secret.txt")
    assert "secret" not in tail(folder / "output.txt", folders=2)
    os.mkfifo(folder / "pipe.txt")
    assert "is no regular file" in tail(folder / "pipe.txt", folders=2)
    (folder / "output.txt").unlink()
    (folder / "output.txt").write_text("ours\n")
    assert tail(folder / "output.txt", folders=2) == "ours"
    folder.rename(theirs / folder.name)
    folder.symlink_to(theirs / folder.name)
    assert "ours" not in tail(folder / "output.txt", folders=2)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_study_that_is_no_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "study.yaml"
    {"pipe": os.mkfifo, "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    result = archlab("plan", path)
    said = f"cannot read {path}: it is no regular file\n\nnothing was trained\n"
    assert (result.exit_code, result.output) == (2, said)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    """Else who can write there once could have any file of ours emptied, as a lock is emptied when it is freed."""
    study = write_study(tmp_path, **TINY)
    make_store(tmp_path / "store").close()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.symlink(victim, lock_path(tmp_path / "store", "gates"))
    result = archlab("run", study, "--inline", "--no-track", "--store", tmp_path / "store")
    assert result.exit_code == 75, result.output
    assert victim.read_text() == "precious"


def test_all_that_a_run_leaves_is_for_its_owner_alone(tmp_path):
    study = write_study(tmp_path, **TINY)
    before = os.umask(0)
    try:
        assert archlab("run", study, "--inline", "--no-track", "--store", tmp_path / "store").exit_code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    open_to_all = [path for path in (tmp_path / "store").iterdir() if path.is_file() and path.stat().st_mode & 0o077]
    assert open_to_all == []


@cache
def calls():
    """(file, line, dotted name, call) of every call in our packages."""
    return list(_calls())


def _calls():
    for package in ("arch_dsl", "kernels", "search", "dashboards", "archlab/cli"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield path.relative_to(ROOT), node.lineno, ast.unparse(node.func), node


def says(call, name, value):
    return any(each.arg == name and getattr(each.value, "value", None) is value for each in call.keywords)


def test_nothing_that_is_read_can_run_code():
    """No pickle, no tag of YAML, no eval; the two places that execute Python execute a plug-in that was allowed."""
    forbidden = {
        "eval",
        "pickle.load",
        "pickle.loads",
        "marshal.loads",
        "cloudpickle.loads",
        "yaml.load",
        "yaml.unsafe_load",
    }
    found = [f"{file}:{line}: {name}" for file, line, name, _ in calls() if name in forbidden]
    found += [
        f"{file}:{line}"
        for file, line, name, call in calls()
        if name == "torch.load" and not says(call, "weights_only", True)
    ]
    found += [
        f"{file}:{line}" for file, line, name, call in calls() if name == "np.load" and says(call, "allow_pickle", True)
    ]
    assert found == []
    executes = {
        str(file) for file, _, name, _ in calls() if name in ("exec", "os.system") or name.endswith("exec_module")
    }
    assert executes <= {"arch_dsl/language/plugins.py", "search/executors/attempt.py"}, executes


def test_the_dashboard_listens_on_loopback_alone(tmp_path):
    Store.open(tmp_path / "store").close()
    code = "from archlab.cli.main import main; main()"
    command = [sys.executable, "-c", code, "dashboard", "--store", tmp_path / "store", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stdout if "http://" in line)
            assert "http://127.0.0.1:" in line
            found = until(lambda: listeners({process.pid, *descendants(process.pid)}))
            assert found <= LOOPBACK
        finally:
            process.send_signal(signal.SIGKILL)


def test_nothing_of_a_run_is_told_to_anybody(tmp_path):
    """Telemetry is off before what would send it is imported."""
    code = (
        "import os, sys; from archlab.search.executors import ray_start;"
        "import archlab.search.trackers.mlflow_sink as sink;"
        "ray_start.set_environment(local=True); assert not {'ray', 'mlflow'} & set(sys.modules);"
        "print(sink.SETTINGS['MLFLOW_DISABLE_TELEMETRY'], os.environ.get('RAY_USAGE_STATS_ENABLED'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["true", "0"]
