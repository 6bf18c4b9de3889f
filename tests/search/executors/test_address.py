"""A study on a Ray cluster that is there: code and spec travel, the token stays, machines that differ are refused."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from archlab.search.executors import shipping
from archlab.search.executors.group_end import free_port
from archlab.search.executors.shipping import differs, examine, ours
from tests.search.processes import alive, descendants
from tests.search.study_files import write_study
from tests.search.study_kit import until

BIN = Path(sys.executable).parent


def test_a_machine_with_other_versions_is_refused_by_name():
    assert differs(ours()) == ""
    assert differs(None) == ""
    source, there = ours()["archlab's source"], {**ours(), "torch": "1.0", "archlab's source": "0123"}
    assert differs(there).endswith(
        f"has archlab's source {source} instead of 0123, torch {ours()['torch']} instead of 1.0"
    )


def test_a_machine_that_does_not_see_the_store_is_refused(tmp_path):
    assert "does not see the store" in examine(ours(), str(tmp_path / "elsewhere"), "token")
    (tmp_path / "token").touch()
    assert examine(ours(), str(tmp_path), "token") == ""
    assert "torch" in examine({**ours(), "torch": "1.0"}, str(tmp_path), "token")


def test_the_hash_of_our_source_changes_with_a_line(tmp_path, monkeypatch):
    for name in shipping.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("x = 1\n")
    monkeypatch.setattr(shipping, "_folder", lambda: tmp_path)
    before = ours.__wrapped__()
    (tmp_path / "search" / "__init__.py").write_text("x = 2\n")
    after = ours.__wrapped__()
    assert {name for name in before if before[name] != after[name]} == {"archlab's source"}


@pytest.fixture
def head(tmp_path):
    """A Ray head of two cores that knows nothing of archlab's folder, and the environment of whoever has its token."""
    session = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # sockets must have short names
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    (tmp_path / "elsewhere").mkdir()
    names = ("PYTHONPATH", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    clean |= {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    port = free_port()
    command = [BIN / "ray", "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=2"]
    with open(tmp_path / "head.txt", "w") as output:
        process = subprocess.Popen(
            [*command, "--include-dashboard=false", f"--temp-dir={session}", "--block"],
            cwd=tmp_path / "elsewhere",
            env={**clean, "RAY_AUTH_MODE": "token"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        until(lambda: "Ray runtime started" in (tmp_path / "head.txt").read_text())
        yield f"127.0.0.1:{port}", clean, session
    finally:
        children = [process.pid, *descendants(process.pid)]
        process.send_signal(signal.SIGTERM)
        until(lambda: process.poll() is not None)
        for pid in filter(alive, children):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(session, ignore_errors=True)


@pytest.mark.slow
def test_a_study_runs_on_a_cluster_that_has_neither_its_code_nor_its_folder(head, tmp_path):
    address, environment, session = head
    folder = tmp_path / "study"
    folder.mkdir()
    study = write_study(folder, seeds="seeds: 1")
    command = [BIN / "archlab", "run", study.name, "--store", tmp_path / "store", "--address", address, "--no-track"]
    stranger = {name: value for name, value in environment.items() if name != "RAY_AUTH_TOKEN_PATH"}
    refused = subprocess.run(
        command, cwd=folder, env=stranger | {"HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert refused.returncode == 75, refused
    assert "oken" in refused.stdout + refused.stderr
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done
    results = [json.loads(path.read_text()) for path in (tmp_path / "store" / "trials").rglob("result.json")]
    assert [result["state"] for result in results] == ["complete"] * 2
    sent = Path(next(session.rglob("search/executors/attempt.py"), "nowhere"))
    assert sent.is_file(), "the code was not sent"
    assert secrets_of(tmp_path) == []


def secrets_of(folder):
    """Files of the store that hold the token."""
    token = (folder / "token").read_text()
    return [path for path in (folder / "store").rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
