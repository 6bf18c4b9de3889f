"""What a store could do without: found by `find`, removed by `remove`. Results, journals and trial.json always stay."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archlab.arch_dsl.language import plugins
from archlab.search.running import deletion
from archlab.search.running.table_damage import is_whole
from archlab.search.store import plugins as plugin_files
from archlab.search.store.lock import in_use
from archlab.search.store.store import Store
from archlab.search.training import compiling
from archlab.search.training import shared_beginnings as shared
from archlab.search.trial.kept_weights import WEIGHTS, union
from archlab.search.trial.trial import Trial
from archlab.search.utils import temporary as tempfolders
from archlab.search.utils.files import lock_file, size_of
from archlab.search.utils.untrusted import has_link

_SHARED = ("stages", "prefixes", "data", "plug-ins", "compiled", "deleted")  # which a study may be about to use
_ABANDONED_S = 3600.0  # a temporary file this old belongs to a process that was killed


@dataclass(frozen=True)
class Waste:
    """Files of one kind that can go for one reason. `trial` is the key and state of the trial whose they are."""

    kind: str
    why: str
    paths: tuple[Path, ...]
    size: int  # bytes
    trial: tuple[str, str] | None = None


@dataclass(frozen=True)
class _Known:
    """A trial of the table, and what the studies that want it keep (empty: none wants it)."""

    key: str
    state: str
    trial: Trial
    folder: Path
    wishes: tuple[dict[str, Any] | None, ...]


@dataclass(frozen=True)
class Found:
    """What can go; and whether that is all, or the table is damaged and only leftovers of killed processes go."""

    waste: list[Waste]
    whole: bool


def look(store: Store) -> Found:
    """What can go, as the store stands now. Looks at every trial's folder, and changes nothing.

    While a row of the table is damaged only leftovers of killed processes go: nobody knows what it wants.
    """
    records, everything = store.records(), store.everything()
    known = [
        _Known(
            each["key"],
            each["state"],
            Trial.from_json(each["spec"]),
            store.trial_folder(each["key"]),
            tuple(records[study].get("keep") for study in each["studies"]),
        )
        for each in everything
        if each["spec"] is not None and records.keys() >= set(each["studies"])
    ]
    found = [*_temporary(store.root, known)]
    if not is_whole(store):
        return Found(found, whole=False)
    found = [*_checkpoints(known), *found]
    wanted = [each.trial for each in known if each.wishes]
    found += _stages(store.root / "stages", wanted)
    found += _prefixes(store.root / shared.FOLDER, wanted)
    found += _data(store.root / "data", wanted)
    found += _plugins(store.root / plugin_files.FOLDER, [each.trial for each in known])
    found += _compiled(_layers(store.root), known)
    if left := deletion.left_over(store):
        found.append(_waste("deleted", "of deleted studies, whose deletion was killed", left))
    return Found(found, whole=True)


def clean(store: Store) -> tuple[Found, list[tuple[Waste, str]]]:
    """Removes what can go. Returns what went, as `look` does, and what stayed with the reason.

    A trial is looked at again under the lock of its folder, which a process that trains it holds. What studies share
    goes only while no run of the store is under way, and none begins meanwhile.
    """
    gone: list[Waste] = []
    stayed: list[tuple[Waste, str]] = []
    with in_use(store.root, alone=True) as alone:
        found = look(store)
        for waste in found.waste:
            reason = "" if alone or waste.kind not in _SHARED else "a run of this store is under way"
            if not reason and any(
                each.is_relative_to(store.root) and has_link(each, store.root) for each in waste.paths
            ):
                reason = "a link leads there, and what is behind it may belong to something else"
            if not reason and waste.trial is not None:
                reason = _remove_of_trial(store, waste)
            elif not reason and waste.kind == "deleted":
                deletion.finish(store)
            elif not reason:
                _remove(waste.paths)
            if reason:
                stayed.append((waste, reason))
            else:
                gone.append(waste)
    return Found(gone, found.whole), stayed


def summed(found: Iterable[Waste]) -> list[dict[str, Any]]:
    """kind, why, files and bytes, summed over what goes for one reason."""
    sums: dict[tuple[str, str], list[int]] = {}
    for waste in found:
        total = sums.setdefault((waste.kind, waste.why), [0, 0])
        total[0] += len(waste.paths)
        total[1] += waste.size
    return [{"kind": kind, "why": why, "files": n, "bytes": size} for (kind, why), (n, size) in sums.items()]


def final_weights(store: Store) -> tuple[int, int]:
    """How many complete trials have their final weights, and the bytes of these: what evaluating needs."""
    folders = [store.trial_folder(each["key"]) for each in store.everything() if each["state"] == "complete"]
    sizes = [sum(map(size_of, folder.glob("checkpoint-*.pt"))) for folder in folders]
    return sum(size > 0 for size in sizes), sum(sizes)


def compiled_layers(store: Store) -> int:
    """The bytes of the layers that this user's trials compiled."""
    return size_of(_layers(store.root))


def _remove_of_trial(store: Store, waste: Waste) -> str:
    """Removes files of a trial unless it is trained, or is not as it was when they were found; says so then."""
    assert waste.trial is not None
    key, state = waste.trial
    with lock_file(store.trial_folder(key) / "writer.lock") as take:
        if not take():
            return "a process writes to it"
        if store.known([key]).get(key, {}).get("state") != state:
            return "it has changed meanwhile"
        _remove(waste.paths)
    return ""


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _checkpoints(known: Iterable[_Known]) -> Iterator[Waste]:
    """What a trial kept to go on from, or to be asked again, and needs no more."""
    from archlab.search.trial.checkpoint import steps_in

    for each in known:
        if each.state == "running" or not each.folder.is_dir():
            continue
        steps, kept = steps_in(each.folder), each.folder / WEIGHTS
        keep = union(list(each.wishes))
        if not each.wishes:
            why, ends, early = "of trials that no study wants any more", steps, True
        elif each.state in ("diverged", "pruned"):
            why, ends, early = f"of {each.state} trials", steps, True
        elif each.state == "complete":
            why, early = "of complete trials beyond what their studies keep", not keep["log2"]
            ends = steps[int(keep["final"]) :]
        else:
            continue
        going = [path for step in ends for path in each.folder.glob(f"checkpoint-{step}.pt*")]
        going += [kept] if early and kept.is_dir() else []
        if going:
            yield _waste("checkpoints", why, going, (each.key, each.state))


def _temporary(root: Path, known: Iterable[_Known]) -> Iterator[Waste]:
    """What killed processes left: files on their way to another name, and private folders."""
    why, old = "of processes that were killed", time.time() - _ABANDONED_S
    loose = [path for folder in (root, root / "locks", root / "data") for path in folder.glob(".*.tmp")]
    loose += [*(root / "data").glob(".new-*"), *(root / "evaluations").glob("*-*")]
    loose = [path for path in loose if _changed(path) < old]
    if left := [*loose, *tempfolders.left_over()]:
        yield _waste("temporary", why, left)
    for each in known:
        scraps = [path for path in each.folder.glob("*.tmp") if _changed(path) < old] if each.folder.is_dir() else []
        if scraps and each.state != "running":
            yield _waste("temporary", why, scraps, (each.key, each.state))


def _stages(root: Path, wanted: list[Trial]) -> Iterator[Waste]:
    used = {shared.stages_key(trial, index) for trial in wanted for index in range(len(trial.recipe.get("stages", ())))}
    left = [folder for folder in _folders(root) if folder.name.partition("-")[0] not in used]
    if left:
        yield _waste("stages", "ends of stages that no wanted trial begins with", left)


def _prefixes(root: Path, wanted: list[Trial]) -> Iterator[Waste]:
    kinds = _folders(root)
    used = {shared.kind(trial) for trial in wanted} if kinds else set()
    if left := [folder for folder in kinds if folder.name not in used]:
        yield _waste("prefixes", "ends of trials that no wanted one is like but for its length", left)


def _data(root: Path, wanted: list[Trial]) -> Iterator[Waste]:
    """Prepared text. What was streamed from the hub is left, as it may not be there a second time."""
    used = {trial.data for trial in wanted}
    used |= {stage.get("prepared") for trial in wanted for stage in trial.recipe.get("stages", ())}
    left = [folder for folder in _folders(root) if (folder / "data.json").is_file() and folder.name not in used]
    if left:
        yield _waste("data", "prepared text that no wanted trial reads; it is made again when it is needed", left)


def _plugins(root: Path, trials: list[Trial]) -> Iterator[Waste]:
    used = {digest for trial in trials for digest in plugins.used_by(trial.model)}
    left = [path for path in root.glob("*-*.py") if path.stem.rpartition("-")[2] not in used]
    if left:
        yield _waste("plug-ins", "copies of plug-ins that no trial of the table was trained with", left)


def _layers(root: Path) -> Path:
    """This user's part: that of others is theirs alone to read and to remove."""
    return root / compiling.FOLDER / str(os.getuid())


def _compiled(own: Path, known: Iterable[_Known]) -> Iterator[Waste]:
    to_come = (each for each in known if each.wishes and each.state in ("planned", "running", "paused"))
    if own.is_dir() and not any(each.trial.recipe.get("compile") == "blocks" for each in to_come):
        yield _waste("compiled", "layers as code that no trial is still to run; it is made again when needed", [own])


def _waste(kind: str, why: str, paths: list[Path], trial: tuple[str, str] | None = None) -> Waste:
    return Waste(kind, why, tuple(sorted(paths)), sum(map(size_of, paths)), trial)


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return time.time()


def _folders(root: Path) -> list[Path]:
    own = root.iterdir() if root.is_dir() else ()
    return [path for path in own if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")]
