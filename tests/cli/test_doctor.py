"""The doctor says what is true of this machine, and finds what would stop a study."""

from __future__ import annotations

import base64
import http.server
import json
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from archlab.arch_dsl import SpecError
from archlab.cli.doctor import doctor, filesystem_of, unmet
from archlab.search.executors.resources import resources_in
from archlab.search.hardware import facts as machine
from archlab.search.hardware.compiler import cannot_compile
from archlab.search.store.servers import servers

GIB = 2**30


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """By name, for a store that does not exist yet."""
    found = doctor(tmp_path_factory.mktemp("doctor") / "store")
    assert len({finding.name for finding in found}) == len(found)
    return {finding.name: finding for finding in found}


def test_every_finding_has_a_detail_and_a_meaning(findings):
    assert all(f.status in ("ok", "warn", "fail") and f.detail and f.meaning for f in findings.values())


def test_facts_are_those_of_this_machine(findings):
    assert platform.python_version() in findings["python"].detail
    assert torch.__version__ in findings["torch"].detail
    assert f"usable of {os.cpu_count()}" in findings["cores"].detail
    assert 1 <= machine.usable_cores() <= os.cpu_count()
    assert ("gpu 0" in findings) == torch.cuda.is_available()
    assert ("gpu" in findings) != torch.cuda.is_available()


def test_the_compiler_is_the_one_that_training_takes(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    cannot_compile.cache_clear()
    found = next(each for each in machine.machine() if each.name == "compiler")
    cannot_compile.cache_clear()
    assert found.status == "warn" and "no-such-compiler" in found.detail


def test_services_are_reported_with_the_version_that_is_installed(findings):
    from importlib.metadata import version

    assert {name: findings[name].detail for name in ("ray", "optuna", "mlflow")} == {
        name: version(name) for name in ("ray", "optuna", "mlflow")
    }


def test_this_environment_stops_no_study(findings):
    assert [f for f in findings.values() if f.status == "fail"] == []


def test_doctor_creates_nothing(tmp_path):
    doctor(tmp_path / "deep" / "store")
    assert list(tmp_path.iterdir()) == []


def test_doctor_imports_none_of_the_services():
    code = (
        "import sys, pathlib; from archlab.cli.doctor import doctor; doctor(pathlib.Path('nowhere'));"
        "print(sorted({'ray', 'optuna', 'mlflow', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        pytest.param({"version": 1}, "ok", "version 1", id="ours"),
        pytest.param({"version": 99}, "fail", "newer archlab", id="newer"),
        pytest.param({"version": "1"}, "fail", "newer archlab", id="not-a-number"),
        pytest.param({}, "fail", "cannot be read", id="no-version"),
        pytest.param([], "fail", "cannot be read", id="not-a-mapping"),
        pytest.param("{", "fail", "cannot be read", id="broken-json"),
        pytest.param("[" * 100_000, "fail", "cannot be read", id="too-deep"),
        pytest.param(None, "warn", "no store.json", id="not-a-store"),
    ],
)
def test_a_store_is_judged_by_its_version(tmp_path, content, status, says):
    if content is not None:
        (tmp_path / "store.json").write_text(content if isinstance(content, str) else json.dumps(content))
    store = next(f for f in doctor(tmp_path) if f.name == "store")
    assert store.status == status
    assert says in f"{store.detail} {store.meaning}"


def test_a_file_in_place_of_the_store_is_found(tmp_path):
    (tmp_path / "store").write_text("")
    store = next(f for f in doctor(tmp_path / "store") if f.name == "store")
    assert store.status == "fail"


@pytest.mark.parametrize(
    ("requirement", "installed", "problem"),
    [
        pytest.param("ray>=2.60,<2.62", "2.60.0", None, id="within"),
        pytest.param("torch>=2.11,<2.14", "2.13.0+cpu", None, id="local-version"),
        pytest.param("ray>=2.60,<2.62", "2.62.0", "ray 2.62.0 is not <2.62,>=2.60", id="too-new"),
        pytest.param("ray>=2.60", None, "ray is missing", id="missing"),
        pytest.param('pytest>=9; extra == "dev"', None, None, id="extra-is-optional"),
        pytest.param('triton>=3.6; platform_system == "Nowhere"', None, None, id="other-platform"),
    ],
)
def test_unmet_names_what_is_missing_or_out_of_bounds(requirement, installed, problem):
    assert unmet([requirement], lambda name: installed) == ([problem] if problem else [])


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/data/store", "nfs4"), ("/data", "nfs4"), ("/database", "ext4"), ("/with space/x", "cifs"), ("/", "ext4")],
)
def test_filesystem_is_that_of_the_innermost_mount(path, kind):
    mounts = "/dev/a / ext4 rw 0 0\nhost:/d /data nfs4 rw 0 0\nhost:/s /with\\040space cifs rw 0 0\n"
    assert filesystem_of(Path(path), mounts) == kind


@pytest.mark.parametrize(("major", "status"), [(7, "warn"), (8, "ok"), (9, "ok")])
def test_a_gpu_is_judged_by_its_capability(major, status):
    properties = SimpleNamespace(name="card", major=major, minor=0, total_memory=80 * GIB)
    finding = machine._gpu(0, properties)
    assert (finding.status, finding.detail) == (status, f"card, sm_{major}0, 80 GiB")


def test_interpreted_triton_is_a_warning(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert machine._triton(gpu=False).status == "warn"


class Server(http.server.BaseHTTPRequestHandler):
    """Says a version at /version to whoever has the password."""

    def do_GET(self):
        allowed = self.headers["Authorization"] == "Basic " + base64.b64encode(b"lab:s3cret").decode()
        self.send_response(200 if allowed and self.path == "/ml/version" else 401)
        self.end_headers()
        self.wfile.write(b"3.17.0" if allowed else b"no")

    def log_message(self, *_):
        """Tests are quiet."""


def test_servers_that_answer_and_servers_that_do_not_are_told_without_their_passwords(tmp_path, monkeypatch):
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as there:
        thread = threading.Thread(target=there.serve_forever)
        thread.start()
        monkeypatch.setenv("ARCHLAB_MLFLOW", f"http://lab:s3cret@127.0.0.1:{there.server_port}/ml")
        monkeypatch.setenv("ARCHLAB_DATABASE", "postgresql://lab:s3cret@127.0.0.1:1/trials")
        found = {each.name: each for each in servers(tmp_path)}
        there.shutdown()
        thread.join()
    assert (found["mlflow server"].status, "version 3.17.0" in found["mlflow server"].detail) == ("ok", True)
    assert found["postgresql"].status == "fail"
    assert "refused" in found["postgresql"].detail
    assert not any("s3cret" in str(each) for each in found.values())
    (tmp_path / "mlflow.url").write_text("http://127.0.0.1:1")
    (tmp_path / "mlflow.url").chmod(0o644)
    monkeypatch.delenv("ARCHLAB_MLFLOW")
    assert "others can read it" in next(each for each in servers(tmp_path) if each.name == "mlflow server").detail
    (tmp_path / "mlflow.url").chmod(0o600)
    assert next(each for each in servers(tmp_path) if each.name == "mlflow server").status == "warn"


def test_slots_are_those_of_the_studys_resources(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text("resources: {cpus: 1, parallel: {data: 999}}\n")
    slots = {each.name: each for each in doctor(tmp_path, resources_in(str(file)))}["slots"]
    assert slots.status == "fail"
    assert slots.detail.startswith("each trial asks for 1 core for each of 999 processes; this machine has")
    file.write_text("study: x\n")
    slots = {each.name: each for each in doctor(tmp_path, resources_in(str(file)))}["slots"]
    assert slots.detail.startswith(f"{machine.usable_cores()} trial")
    file.write_text("resources: {gpus: 1.5}\n")
    with pytest.raises(SpecError, match=r"study.yaml:1:19: resources.gpus: must be a share of one GPU"):
        resources_in(str(file))


V2 = {"memory.max": "4000\n", "memory.current": "3000\n", "memory.stat": "anon 5\nactive_file 700\ninactive_file 300\n"}
V1 = {
    "memory.limit_in_bytes": "4000\n",
    "memory.usage_in_bytes": "3000\n",
    "memory.stat": "active_file 1\ntotal_active_file 700\ntotal_inactive_file 300\n",
}


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        pytest.param(
            "0::/a/b\n", {"a/b": {"memory.max": "max\n"}, "a": V2 | {"cpu.max": "150000 100000\n"}}, 1, id="v2"
        ),
        pytest.param("0::/\n", {"": V2}, None, id="a container, v2"),
        pytest.param("4:memory:/a/b\n1:cpu:/a\n", {"memory/a/b": V1}, None, id="v1"),
        pytest.param(
            "4:memory:/docker/1\n1:cpu:/docker/1\n",
            {"memory": V1, "cpu": {"cpu.cfs_quota_us": "100000\n", "cpu.cfs_period_us": "100000\n"}},
            1,
            id="a container, v1, by the path of the machine",
        ),
    ],
)
def test_memory_and_cores_are_what_control_groups_leave(groups, files, cpus, tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.write_text(groups)
    for folder, found in files.items():
        for name, text in found.items():
            place = tmp_path / "groups" / folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    allowed = machine.usable_cores()
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "_GROUPS_OF", own)
    assert machine.memory() == (2000, 4000)
    assert machine.usable_cores() == (cpus or len(os.sched_getaffinity(0)))
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "none")
    assert machine.memory()[1] > 4000 and machine.usable_cores() >= allowed
