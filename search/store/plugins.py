"""Plug-ins of a study: allowed or refused when its file is read, kept in the store, loaded where a trial is trained.

A store keeps the source of every plug-in that it ran in `plugins/`, under the hash by which trials name it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from archlab.arch_dsl.language import plugins
from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.plugins import Plugin
from archlab.arch_dsl.language.source import Node
from archlab.search.utils.files import write_whole

FOLDER = "plugins"


def load_listed(node: Node, base: Path, allowed: bool) -> None:
    """Loads the files that a study lists under `plugins:`, relative to its folder `base`.

    Raises SpecError unless that is `allowed` or they were loaded already, as whoever names a file has allowed it.
    """
    listed = node.value.get("plugins") if isinstance(node.value, dict) else None
    items = [] if listed is None else listed.value if isinstance(listed.value, list) else [listed]
    known = {plugin.digest for plugin in plugins.loaded()}
    problems = []
    for index, item in enumerate(items):
        if not isinstance(item.value, str):
            continue  # which the parser will say
        path = base / item.value
        if allowed:
            plugins.load(path, item.mark)
        elif plugins.digest_of(plugins.read(path, item.mark)) not in known:
            message = f"{item.value} is Python that this study runs: read it, then say so with --allow-plugins"
            problems.append(Problem(f"plugins.{index}", message, item.mark))
    if problems:
        raise SpecError(problems)


def keep(root: Path) -> None:
    """Copies the source of every plug-in of this process into a store, where trials and later runs find it."""
    for plugin in plugins.loaded():
        folder = root / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (folder / plugin.file_name).exists():
            write_whole(folder / plugin.file_name, plugin.source.decode())


def load_kept(model: dict[str, Any], root: Path) -> None:
    """Loads the plug-ins that a canonical model names from a store. Raises SpecError for one that is missing or not
    what it was."""
    known = {plugin.digest for plugin in plugins.loaded()}
    for digest in dict.fromkeys(plugins.used_by(model)):
        if digest in known:
            continue
        found = next(iter((root / FOLDER).glob(f"*-{digest}.py")), None)
        if found is None:
            message = f"no file of {root / FOLDER} has the source {digest}: run the study again, which puts it there"
            raise SpecError.of("", message)
        if plugins.digest_of(plugins.read(found)) != digest:
            raise SpecError.of("", f"{found} was edited; a trial needs it as it was: put it back, or remove it")
        plugins.load(found)


def record(models: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """The plug-ins that canonical models use, as a study's record keeps them."""
    used = {digest for model in models for digest in plugins.used_by(model)}
    return [{"file": str(plugin.path), "source": plugin.digest} for plugin in plugins.loaded() if plugin.digest in used]


def changed(before: dict[str, Any], now: dict[str, Any], root: Path) -> Iterator[str]:
    """What to tell of plug-ins whose source is another one than when the study was run last."""
    earlier = {Path(each["file"]).name: each["source"] for each in before.get("plugins", [])}
    for each in now.get("plugins", []):
        name = Path(each["file"]).name
        if name in earlier and earlier[name] != each["source"]:
            kept = root / FOLDER / Plugin(Path(name), b"", earlier[name], ()).file_name
            yield (
                f"{name} has changed since this study was run: its trials are new ones; "
                f"the source of then is {kept}, and --set plugins={kept} goes on with it"
            )
