"""Trackers on real servers: Optuna's tables on PostgreSQL, and an `mlflow server` that dies and comes back."""

import os
import signal
import subprocess
import sys
import urllib.request

import optuna
import pytest

from archlab.search.executors.group_end import free_port
from archlab.search.store.addresses import DATABASE, MLFLOW
from archlab.search.store.store import Store
from archlab.search.trackers import mlflow_sink
from archlab.search.trackers.database import has_optuna, open_optuna
from archlab.search.trackers.shipper import Shipper, sync, unsent
from tests.search.study_kit import ROOT, done, until
from tests.search.trackers.test_track import POINTS, RECORD, finished, lines, points_of, row, write

pytestmark = [
    pytest.mark.slow,
    # mlflow and what it imports warn about each other
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*noload"),
    pytest.mark.filterwarnings("ignore:.*sqlite3.Connection:ResourceWarning"),
]


class MlflowServer:
    """`mlflow server` as the documentation starts it: one worker, on loopback."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()

    def start(self):
        """Starts it and waits until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self.answers)

    def answers(self):
        """Whether it is up."""
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def kill(self):
        """All of it at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(tmp_path):
    """One that is not running yet."""
    (tmp_path / "mlflow").mkdir()
    made = MlflowServer(tmp_path / "mlflow")
    yield made
    if made.process.poll() is None:
        made.kill()


@pytest.fixture
def storages():
    """Opens Optuna's tables, and closes them in the end."""
    opened = []

    def open_one(root):
        opened.append(open_optuna(root))
        return opened[-1]

    yield open_one
    for storage in opened:
        storage.remove_session()
        storage.engine.dispose()


def test_an_mlflow_server_that_dies_costs_delay_and_no_point(tmp_path, server, monkeypatch):
    for name, value in mlflow_sink.SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.delenv(MLFLOW, raising=False)
    with Store.open(tmp_path / "store") as store:
        address = store.root / "mlflow.url"
        address.touch(mode=0o600)
        address.write_text(f"http://user:s3cret@127.0.0.1:{server.port}\n")
        store.save_study("gates", RECORD, "study: gates")
        server.start()
        first = finished(store, row(0))
        assert sync(store.root) == {"gates": 0}
        server.kill()
        growing = row(1)
        store.add_trials("gates", [growing])
        key, attempt = growing.trial.key, store.claim(growing.trial.key, "gates")
        write(store, key, lines(1, 3))
        shipper = Shipper(store.root, "gates", interval_s=0.1)
        shipper.start()
        shipper.notice(key)
        until(lambda: shipper.trouble is not None)
        assert "s3cret" not in shipper.trouble
        write(store, key, lines(4, 6))
        store.finish(key, attempt, "complete", done(step=6))
        assert shipper.close(timeout=60.0) > 0
        server.start()
        assert sync(store.root) == {"gates": 0} and unsent(store.root, "gates") == 0
        assert not (store.root / "mlflow.db").exists()
        found = points_of(server.folder / "server.db")
        curves = {"loss", "tokens", "lr", "grad_norm", "tokens_per_s", "validation_loss"}
        wanted = [(name, step) for name, step, _, _ in found if name in curves]
        assert len(wanted) == 2 * POINTS == 2 * len(set(wanted))  # each point once in each of the two runs
        assert {step for name, step in wanted if name == "loss"} == set(range(1, 7))
        assert first != key
        assert not [path for path in store.root.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()
                    and path != address]  # fmt: skip
        assert b"s3cret" not in (server.folder / "server.db").read_bytes()


def test_optuna_has_its_tables_beside_the_trial_table_of_a_server(tmp_path, postgres, storages, monkeypatch):
    monkeypatch.setenv(DATABASE, postgres.emptied())
    monkeypatch.setenv(MLFLOW, "off")
    with Store.open(tmp_path / "store") as store:
        store.save_study("gates", RECORD, "study: gates")
        for seed in range(3):
            finished(store, row(seed))
        assert not has_optuna(store.root)
        assert sync(store.root) == {"gates": 0}
        assert sync(store.root) == {"gates": 0}
        storage = storages(store.root)
        trials = optuna.load_study(study_name="gates", storage=storage).trials
        assert sorted(trial.params["seed"] for trial in trials) == [0, 1, 2]
        assert "sesame" not in str(storage.url) + repr(storage.engine)
        postgres.stop()
        postgres.start()
        assert len(optuna.get_all_study_summaries(storage)) == 1  # the connection of the pool was asked before its use
        postgres.run("lab", "DROP SCHEMA archlab_optuna CASCADE")
        assert sync(store.root) == {"gates": 0}
        assert len(optuna.load_study(study_name="gates", storage=storages(store.root)).trials) == 3
        assert not (store.root / "optuna.db").exists() and not (store.root / "shipped.db").exists()


def test_optunas_tables_are_made_once_by_many_and_whole_after_a_kill(tmp_path, postgres, storages, monkeypatch):
    monkeypatch.setenv(DATABASE, postgres.emptied())
    store = Store.open(tmp_path / "store")
    code = "import sys; from pathlib import Path; from archlab.search.trackers.database import open_optuna;"
    code += "open_optuna(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(store.root)]
    killed = subprocess.Popen(command, cwd=ROOT)
    half = "SELECT to_regnamespace('archlab_optuna_new') IS NOT NULL"
    until(lambda: postgres.run("lab", half)[0][0] or has_optuna(store.root))
    killed.kill()
    killed.wait()
    started = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) for _ in range(3)]
    errors = [process.communicate(timeout=240)[1].decode() for process in started]
    assert errors == [""] * 3
    assert not postgres.run("lab", half)[0][0]
    study = optuna.create_study(study_name="s", storage=storages(store.root))
    study.add_trial(optuna.trial.create_trial(value=1.0))
    assert len(study.trials) == 1
    store.close()
