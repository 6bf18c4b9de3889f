"""The Python side of the command line: five functions, loaded when asked for, on the same store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import search
from arch_dsl.errors import SpecError
from search.store import StoreError
from tests.search.study_files import write_study


def test_package_has_five_names_and_no_others() -> None:
    assert search.__all__ == ["compare", "load_study", "plan", "report", "run"]
    for name in search.__all__:
        assert callable(getattr(search, name))
    with pytest.raises(AttributeError, match="module 'search' has no attribute 'compere'"):
        search.compere  # noqa: B018


def test_importing_the_store_and_the_lock_is_light() -> None:
    code = """
import sys
import search, search.store, search.lock, search.trial, search.status
sys.exit(sorted({"torch", "ray", "optuna", "mlflow", "pandas", "numpy"} & set(sys.modules)) or 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, cwd=Path(__file__).parents[2])


def test_study_is_planned_run_compared_and_reported(tmp_path: Path) -> None:
    study = search.load_study(write_study(tmp_path), {"train.tokens": 256, "train.context": 16, "model.d_model": 16})
    store = tmp_path / "store"
    with pytest.raises(StoreError, match="no store at"):
        search.compare(study, store)
    frame = search.plan(study, store).frame()
    assert list(frame["variant"]) == ["baseline", "gated"]
    assert search.run(study, store, executor="inline", track=False).exit_code == 0
    comparison = search.compare("gates", store)
    assert list(comparison.table["variant"]) == ["baseline", "gated"]
    assert comparison.table["n"].tolist() == [2, 2]
    assert comparison.table["parameters"].tolist() == frame["parameters"].tolist()
    assert "gated" in search.report(comparison, "md")


def test_planning_prepares_data_and_trains_nothing(tmp_path: Path) -> None:
    search.plan(write_study(tmp_path), tmp_path / "store")
    assert [each.name for each in (tmp_path / "store").iterdir()] == ["data"]


def test_store_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHLAB_STORE", str(tmp_path / "elsewhere"))
    search.plan(write_study(tmp_path))
    assert (tmp_path / "elsewhere" / "data").is_dir()


def test_mistakes_of_a_study_are_spec_errors(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"report\.baseline: 'none' is not a variant"):
        search.run(write_study(tmp_path, report="report: {baseline: none}"), tmp_path / "store", executor="inline")
    assert not (tmp_path / "store").exists()
