"""Servers of one store, each in a process of its own: our dashboard, MLflow's, optuna-dashboard."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUDY = "gate-position"
PATIENCE_MS = 300_000


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass(frozen=True)
class Up:
    """A server that answers: its process, and how many seconds its first answer took."""

    pid: int
    seconds: float

    def cpu(self) -> float:
        """Processor seconds that it has taken so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(command: list[str], url: str) -> Iterator[Up]:
    """Runs a server until the block ends."""
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, **quiet},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not _answers(url):
            if process.poll() is not None or time.perf_counter() - began > PATIENCE_MS / 1000:
                raise RuntimeError(f"{' '.join(command[:5])} ... did not come up")
            time.sleep(0.02)
        yield Up(process.pid, time.perf_counter() - began)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # MLflow's has children
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ours(root: Path, port: int) -> tuple[list[str], str]:
    """The command of our server, and what it answers first."""
    code = "from archlab.cli.main import main; main()"
    command = [sys.executable, "-c", code, "dashboard", "--store", str(root), "--port", str(port)]
    return command, f"http://127.0.0.1:{port}/assets/archlab.css"


def of_mlflow(root: Path, port: int) -> tuple[list[str], str, str]:
    """The command of MLflow's server, what it answers first, and the list of the study's runs."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{root / 'mlflow.db'}"
    found = next(e for e in MlflowClient(uri).search_experiments() if e.name != "Default")
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--port", str(port)]
    base = f"http://127.0.0.1:{port}"
    return [*command, "--workers", "1"], f"{base}/health", f"{base}/#/experiments/{found.experiment_id}/runs"


def runs_in_mlflow(root: Path) -> int:
    """How many trials MLflow's list is of."""
    with closing(sqlite3.connect(f"{(root / 'mlflow.db').as_uri()}?mode=ro", uri=True)) as database:
        return int(database.execute("SELECT count(*) FROM runs").fetchone()[0])


def of_optuna(root: Path, port: int) -> tuple[list[str], str, str]:
    """The command of optuna-dashboard, what it answers first, and the page of the study."""
    import optuna
    import optuna_dashboard  # noqa: F401  # or say that it is missing

    uri = f"sqlite:///{root / 'optuna.db'}"
    study = next(each for each in optuna.get_all_study_summaries(uri) if each.study_name == STUDY)
    code = "import sys; from optuna_dashboard._cli import main; sys.argv = ['optuna-dashboard', *sys.argv[1:]]; main()"
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", code, uri, "--port", str(port), "--host", "127.0.0.1"]
    return command, f"{base}/dashboard", f"{base}/dashboard/studies/{study._study_id}"


THEIRS: dict[str, Callable[[Path, int], tuple[list[str], str, str]]] = {
    "MLflow run list": of_mlflow,
    "optuna-dashboard": of_optuna,
}
