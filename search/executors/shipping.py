"""Our code on the machines of a cluster: sent through Ray with a study, and checked there before a trial starts."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from archlab.search.trial.fingerprint import COMMIT, commit, version_of

# What a trial needs; the command line and the dashboard stay where they are.
PACKAGES = ("arch_dsl", "kernels", "search")
# What trains must be the same everywhere, as trials of one study are compared with each other.
_SAME = ("torch", "numpy", "ray")


def runtime_environment() -> dict[str, Any]:
    """What `ray.init` sends to the machines of a cluster: the packages that a trial needs, as they are here."""
    return {
        "py_modules": [str(_folder())],
        "excludes": ["__pycache__", "*.pyc", "archlab/cli", "archlab/dashboards"],
        "env_vars": {COMMIT: commit(Path(__file__).resolve().parents[2])},
    }


@cache
def ours() -> dict[str, str]:
    """What must be the same on every machine: a hash of our source, and the versions of what computes."""
    found = hashlib.sha256()
    for folder in [_folder() / name for name in PACKAGES]:
        for file in sorted(folder.resolve().rglob("*.py")):
            name = f"{folder.name}/{file.relative_to(folder.resolve())}"
            found.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return {
        "archlab's source": found.hexdigest()[:16],
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: version_of(name) or "none" for name in _SAME},
    }


def differs(there: dict[str, str] | None) -> str:
    """What of this machine is not as on the driver's, in a sentence; "" where all is, or nobody asks."""
    mine = ours() if there else {}
    wrong = [
        f"{name} {mine.get(name, 'none')} instead of {value}"
        for name, value in (there or {}).items()
        if mine.get(name) != value
    ]
    return f"{platform.node()} has {', '.join(wrong)}" if wrong else ""


def examine(there: dict[str, str], store: str, token: str) -> str:
    """Why this machine cannot run trials of a study, in a sentence; "" where it can.

    It needs what the driver's machine has, and the store's folder if there is one, where the driver has left `token`.
    """
    if (wrong := differs(there)) or not store:
        return wrong
    try:
        found = (Path(store) / token).is_file()
    except OSError as error:
        return f"{platform.node()} cannot read the store {store}: {error.strerror}"
    return "" if found else f"{platform.node()} does not see the store {store}: it must be a folder that all share"


def _folder() -> Path:
    """Where `archlab` is imported from; to the machines of a cluster it is sent, links in it as what they point to."""
    spec = find_spec("archlab")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])
