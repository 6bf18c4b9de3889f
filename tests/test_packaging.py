"""What is installed is what the code needs, and an installed archlab has every file that the checkout has."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.slow_tests import listed

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("arch_dsl", "kernels", "search", "dashboards")  # which archlab/ links to
PACKAGES = (*FOLDERS, "archlab/cli")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Part of the interface of a dependency, which chooses their version: dash's app is a Flask app, optuna's storage an
# SQLAlchemy engine.
COMES_WITH = {"flask": "dash", "werkzeug": "dash", "sqlalchemy": "optuna"}


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


@cache
def third_party_imports(folder: Path) -> dict[str, str]:
    """Top-level name of each import from outside, and one file that has it."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            else:
                continue
            for top in {module.partition(".")[0] for module in modules}:
                if top not in sys.stdlib_module_names and top != "archlab":
                    found.setdefault(top, path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_a_declared_dependency(package):
    extras = PROJECT["optional-dependencies"]
    optional = [text for name in extras.keys() - {"dev"} for text in extras[name]]
    declared = names(PROJECT["dependencies"] + optional)
    providers = packages_distributions()
    undeclared = {
        f"{module} ({where})"
        for module, where in third_party_imports(ROOT / package).items()
        if COMES_WITH.get(module) not in declared
        and not declared & {canonicalize_name(name) for name in providers.get(module, [module])}
    }
    assert sorted(undeclared) == []


# Used on our behalf: what Dash compresses with, the plotly.js that the figures were written for, Optuna's CMA-ES.
USED_BY_OTHERS = {"flask-compress", "plotly", "cmaes"}


def test_every_dependency_is_imported():
    """A dependency that nothing uses costs every user its installation."""
    providers = packages_distributions()
    imported = {
        canonicalize_name(distribution)
        for package in PACKAGES
        for module in third_party_imports(ROOT / package)
        for distribution in providers.get(module, [])
    }
    assert sorted(names(PROJECT["dependencies"]) - imported - USED_BY_OTHERS) == []


@pytest.mark.parametrize("text", PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"])
def test_this_environment_is_within_the_bounds(text):
    from importlib.metadata import version

    requirement = Requirement(text)
    if requirement.marker is None or requirement.marker.evaluate():
        assert requirement.specifier.contains(version(requirement.name), prereleases=True)


def test_the_command_exists():
    module, _, function = PROJECT["scripts"]["archlab"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_wheel_has_every_file_of_the_packages(tmp_path):
    """Data files (YAML, assets, py.typed) as well as code; and nothing of tests, studies or benchmarks."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("archlab-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", "-z", *FOLDERS, "archlab"], capture_output=True, text=True, cwd=ROOT)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    files = {name for name in tracked.stdout.split("\0") if name and (ROOT / name).is_file()}
    assert {name if name.startswith("archlab/") else f"archlab/{name}" for name in files} <= packed
    assert {name.partition("/")[0] for name in packed} == {"archlab"}
    assert {"archlab/py.typed", "archlab/study.schema.json"} <= packed


def test_the_locked_versions_are_allowed_and_all_have_hashes():
    """Of what archlab declares; what that needs in turn was chosen with it. torch is installed before."""
    entries = (ROOT / ".ci" / "locked.txt").read_text().replace("\\\n", " ").splitlines()
    locked = {}
    for entry in (line for line in entries if not line.startswith("#")):
        name, _, version = entry.split(maxsplit=1)[0].partition("==")
        assert "--hash=sha256:" in entry, entry
        locked[canonicalize_name(name)] = version
    for text in PROJECT["dependencies"]:
        wanted = Requirement(text)
        if wanted.name != "torch":
            assert locked[canonicalize_name(wanted.name)] in wanted.specifier, text


def test_the_list_of_slow_tests_names_tests_that_there_are():
    for name in listed():
        file, _, rest = name.partition("::")
        assert f"def {rest.partition('[')[0]}(" in (ROOT / file).read_text(), name
