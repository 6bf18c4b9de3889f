"""Task files of one's own: what lm-evaluation-harness reads as YAML, with the data and code that it names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_ENDINGS = (".yaml", ".yml")
_LOCAL = ("json", "csv", "parquet", "text", "arrow")  # builders of `datasets` that read files


class _Loader(yaml.SafeLoader):
    """Plain YAML, with the names of functions as strings; nothing is imported."""


_Loader.add_constructor("!function", lambda _, node: str(node.value))


def _plain(file: Path) -> Any:
    loader = _Loader(file.read_bytes())
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def is_path(task: str) -> bool:
    """Whether a task is named by where its file or folder lies."""
    return "/" in task or task.endswith(_ENDINGS)


def task_files(task: Path) -> list[Path]:
    """The YAML files of tasks: a file, or all of a folder. Raises ValueError when there is none."""
    found = sorted(each for each in task.rglob("*") if each.suffix in _ENDINGS) if task.is_dir() else [task]
    if not found or not all(each.is_file() for each in found):
        raise ValueError(f"{task} is no task file and no folder with one")
    return found


def config(file: Path) -> dict[str, Any]:
    """What a task file says, with what it includes; nothing that it names is run. Raises ValueError."""
    try:
        found = _plain(file)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{file} can't be read as a task: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is no task: it must be a mapping")
    whole: dict[str, Any] = {}
    for name in _listed(found.pop("include", [])):
        whole |= config(file.parent / name)
    return whole | found


def data_files(file: Path) -> dict[str, Any] | None:
    """`dataset_kwargs` of a task file, with paths of data from the file's folder; None where it names no data files."""
    said = config(file)
    kwargs = said.get("dataset_kwargs") or {}
    given = kwargs.get("data_files")
    if said.get("dataset_path") not in _LOCAL or not given:
        return None

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: whole(each) for name, each in value.items()}
        if isinstance(value, list):
            return [whole(each) for each in value]
        return value if "://" in value else str((file.parent / value).absolute())

    return {**kwargs, "data_files": whole(given)}


def digest(task: Path) -> str:
    """The hash of a task: its files, and the data and the Python beside them that they name or may name.

    Raises ValueError where data are missing.
    """
    found = hashlib.sha256()
    for file in task_files(task):
        for each in sorted({*_parts(file), *file.parent.glob("*.py")}):
            found.update(f"{each.name}\0".encode())
            found.update(hashlib.sha256(each.read_bytes()).digest())
    return found.hexdigest()[:32]


def _parts(file: Path) -> Iterator[Path]:
    yield file
    said = _plain(file) or {}
    for name in _listed(said.get("include", [])):
        yield from _parts(file.parent / name)
    kwargs = data_files(file)
    for path in _leaves(kwargs["data_files"]) if kwargs else ():
        if "://" not in path:
            found = sorted(Path(path).parent.glob(Path(path).name))
            if not found:
                raise ValueError(f"{file} names data that are not there: {path}")
            yield from found


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield str(value)


def _listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]
