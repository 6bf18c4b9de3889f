"""The doctor says what is true of this machine, and finds what would stop a study."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from search import machine
from search.doctor import doctor, filesystem_of, foreign_providers, unmet

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
        "import sys, pathlib; from search.doctor import doctor; doctor(pathlib.Path('nowhere'));"
        "print(sorted({'ray', 'optuna', 'mlflow', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
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


def test_another_distribution_with_one_of_our_names_is_found():
    found = foreign_providers({"kernels": ["archlab", "kernels"], "search": ["archlab"], "numpy": ["numpy"]})
    assert found == {"kernels": ["kernels"]}


def test_an_installed_package_named_kernels_is_a_warning(tmp_path):
    """A real distribution on the path, with the metadata that an installer would leave."""
    info = tmp_path / "kernels-0.18.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    (info / "top_level.txt").write_text("kernels\n")
    code = (
        "import pathlib; from search.doctor import doctor;"
        "print([(f.name, f.status) for f in doctor(pathlib.Path('nowhere')) if f.name.startswith('import')])"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.stdout.strip() == "[('import kernels', 'warn')]"


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
