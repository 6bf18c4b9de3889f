"""What is installed here, what the store is in, what a study gets: the facts behind `archlab doctor`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from archlab.search.executors.executor import ResourcesError
from archlab.search.hardware.facts import GIB, Finding, machine, version_of
from archlab.search.store.opening import VERSION as STORE_VERSION
from archlab.search.store.servers import servers
from archlab.search.utils.files import NO_JSON

if TYPE_CHECKING:
    from archlab.search.executors.resources import Resources

__all__ = ["Finding", "doctor"]

# Checkpoints of small models are a few megabytes each, the databases tens; below this a long study may not finish.
FREE_DISK_GIB = 2.0
# SQLite's write-ahead log needs memory shared between its users, which these do not offer.
NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "afs", "ceph", "lustre", "beegfs"}


def doctor(store_root: Path, resources: Resources | None = None) -> list[Finding]:
    """All findings, in the order in which they are read; `resources` are those of the study that is asked about.

    Creates nothing; imports torch, and no other heavy package.
    """
    return [
        *machine(),
        _slots(resources),
        *(_service(package, purpose) for package, purpose in _SERVICES.items()),
        _requirements(),
        _store(store_root.absolute()),
        _disk(store_root.absolute()),
        *servers(store_root.absolute()),
        *(_tool(name, commands, *meanings) for name, (commands, *meanings) in _TOOLS.items()),
    ]


def _slots(resources: Resources | None) -> Finding:
    """How many trials of a study fit here at once."""
    from archlab.search.executors.resources import Resources, Room

    resources = resources or Resources()
    room = Room.here()
    wanted = resources.with_gpus(room.gpus)
    try:
        fit = wanted.slots([room])
    except ResourcesError as error:
        return Finding("slots", "fail", str(error), "`archlab run` refuses the study here; a cluster may have the room")
    trials = "1 trial" if fit == 1 else f"{fit} trials"
    return Finding("slots", "ok", f"{trials} at once, with {wanted}", f"of {room}")


# -- what is installed -------------------------------------------------------------------------------------------------

_SERVICES = {
    "ray": "runs every trial in its own process",
    "optuna": "proposes trials where a study declares a search, and records the finished ones of all",
    "mlflow": "records parameters and curves; while it is down a study goes on and delivers later",
}


def _service(package: str, purpose: str) -> Finding:
    """The version from the metadata alone: importing Ray here would settle its network settings for the process."""
    version = version_of(package)
    if version is None:
        return Finding(package, "fail", "not installed", f"needed: it {purpose}")
    return Finding(package, "ok", version, purpose)


def _requirements() -> Finding:
    """Compares the installed versions with the bounds that the distribution archlab declares."""
    version = version_of("archlab")
    if version is None:
        meaning = "bounds cannot be checked and there is no `archlab` command; `make venv` installs it"
        return Finding("archlab", "warn", "used from its folder, not installed", meaning)
    problems = unmet(metadata.requires("archlab") or [], version_of)
    if problems:
        meaning = "a study may stop at an import, or give other numbers; `make venv` makes a whole environment"
        return Finding("archlab", "fail", f"{version}: {'; '.join(problems)}", meaning)
    return Finding("archlab", "ok", version, "every dependency is within its bounds")


def unmet(declared: list[str], version_of: Callable[[str], str | None]) -> list[str]:
    """What of `declared` (requirement strings, extras left out) is missing or out of bounds, one line each.

    `version_of` gives the installed version of a distribution, None where there is none.
    """
    from packaging.requirements import Requirement

    problems = []
    for requirement in map(Requirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(requirement.name)
        if version is None:
            problems.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} is not {requirement.specifier}")
    return problems


_TOOLS = {
    "chromium": (
        ("chromium", "chromium-browser", "google-chrome"),
        "the dashboard's browser tests can run",
        "only the dashboard's browser tests need it",
    ),
    "dot": (("dot",), "diagrams can be drawn", "diagrams are shown as text; it comes with Graphviz"),
}


def _tool(name: str, commands: tuple[str, ...], present: str, absent: str) -> Finding:
    """An optional program: its absence is no warning."""
    found = next((path for command in commands if (path := shutil.which(command))), None)
    return Finding(name, "ok", found or "not installed (optional)", present if found else absent)


# -- where the store is ------------------------------------------------------------------------------------------------


def _store(root: Path) -> Finding:
    if not root.exists():
        parent = _nearest_existing(root)
        if not os.access(parent, os.W_OK):
            return Finding("store", "fail", f"{root} does not exist", f"cannot be created: {parent} is not writable")
        return Finding("store", "ok", f"{root} does not exist yet", "the first `archlab run` creates it")
    try:
        version = json.loads((root / "store.json").read_text())["version"]
    except FileNotFoundError:
        return Finding("store", "warn", f"{root} has no store.json", "the folder holds no store yet")
    except (*NO_JSON, NotADirectoryError, KeyError, TypeError) as error:
        return Finding("store", "fail", f"{root}: store.json cannot be read ({error})", "no study can use this store")
    if not isinstance(version, int) or version > STORE_VERSION:
        meaning = f"written by a newer archlab; this one reads up to version {STORE_VERSION}"
        return Finding("store", "fail", f"{root}, version {version}", meaning)
    if not os.access(root, os.W_OK):
        return Finding(
            "store", "warn", f"{root}, version {version}, read-only", "`archlab report` works, `run` does not"
        )
    return Finding("store", "ok", f"{root}, version {version}", "finished trials in it are reused")


def _disk(root: Path) -> Finding:
    place = _nearest_existing(root)
    free_gib = shutil.disk_usage(place).free / GIB
    mounts = Path("/proc/mounts")
    filesystem = filesystem_of(place, mounts.read_text()) if mounts.exists() else None
    detail = f"{free_gib:.1f} GiB free at {place}" + (f" ({filesystem})" if filesystem else "")
    if filesystem in NETWORK_FILESYSTEMS:
        return Finding("disk", "warn", detail, "SQLite is unsafe on a network filesystem: --store on a local disk")
    if free_gib < FREE_DISK_GIB:
        return Finding("disk", "warn", detail, "checkpoints may fill it; a study then stops with what it has safe")
    return Finding("disk", "ok", detail, "room for checkpoints and tracking")


def filesystem_of(path: Path, mounts: str) -> str | None:
    """The type of the filesystem that holds `path`; `mounts` is the text of /proc/mounts."""
    best, kind = Path("/"), None
    for line in mounts.splitlines():
        _, point, fstype, *_ = line.split(" ")
        mount = Path(point.replace("\\040", " "))
        if path.resolve().is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, fstype
    return kind


def _nearest_existing(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())
