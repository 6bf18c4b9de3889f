"""Files of weights: our own (safetensors that say which model they are of), and checkpoints of other libraries."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.tree.identity import canonical

MODEL = "model.safetensors"  # the name in a folder
_SPEC = "archlab.model"  # the key of our spec among a file's metadata
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = (MODEL, "pytorch_model.bin")
_EMPTY = "is empty: it holds no weights"
_ZIP = b"PK\3\4"  # how a file of torch begins


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of a folder as Hugging Face writes it, whole or in shards; on the CPU.

    Files of torch are read with `weights_only`, which runs no code. Raises SpecError for what is no checkpoint.
    """
    tensors: dict[str, Tensor] = {}
    for file in _files(path):
        tensors |= _read_file(file)
    return tensors


def write_weights(path: Path, model: Model, tensors: Mapping[str, Tensor]) -> str:
    """Writes a resolved model's parameters and its spec as one safetensors file, whole or not at all; its sha256."""
    spec = json.dumps(canonical(model), sort_keys=True, separators=(",", ":"))
    return write_tensors(path, tensors, {_SPEC: spec})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Writes a safetensors file, whole or not at all; its sha256 (the same every time with one key of metadata)."""
    scrap = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        save_file({name: _own(value) for name, value in tensors.items()}, scrap, dict(metadata))
        digest = sha256_of(scrap)
        os.replace(scrap, path)
    finally:
        scrap.unlink(missing_ok=True)
    return digest


def read_weights(path: Path) -> tuple[Model, dict[str, Tensor]]:
    """The spec and the parameters in a file that `write_weights` wrote, or in a folder with one. Raises SpecError."""
    file = _own_file(path)
    return read_spec(file), _read_file(file)


def read_spec(path: Path) -> Model:
    """The spec of the model that a file of ours is of. Raises SpecError."""
    file = _own_file(path)
    with _told(file), safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get(_SPEC)
    if text is None:
        raise SpecError.of(str(file), "does not say which model it is of; `archlab import` makes a file that does")
    try:
        return parse(Model, json.loads(text))
    except (json.JSONDecodeError, RecursionError) as error:
        raise SpecError.of(str(file), f"does not say in JSON which model it is of: {error}") from None


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors in a safetensors file, none of which is read. Raises SpecError."""
    with _told(path), safe_open(path, "pt") as opened:
        names: list[str] = opened.keys()
        return {name: tuple(opened.get_slice(name).get_shape()) for name in names}


def sha256_of(path: Path) -> str:
    """64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own(value: Tensor) -> Tensor:
    """A tensor that shares no memory with others, as safetensors asks."""
    alone = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    return value if alone else value.clone(memory_format=torch.contiguous_format)


def _own_file(path: Path) -> Path:
    return path / MODEL if path.is_dir() else path


def _files(path: Path) -> list[Path]:
    """The files that a checkpoint consists of."""
    if path.is_file():
        return _shards(path) if path.name.endswith(".index.json") else [path]
    if not path.is_dir():
        raise SpecError.of(str(path), "is neither a file nor a folder")
    for name in (*_WHOLE[:1], *_INDEXES, *_WHOLE[1:]):
        if (path / name).is_file():
            return _files(path / name)
    raise SpecError.of(str(path), f"holds no checkpoint: none of {', '.join((*_WHOLE, *_INDEXES))}")


def _shards(index: Path) -> list[Path]:
    """The files that an index names, all beside it."""
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SpecError.of(str(index), "is no index of shards: it has no `weight_map` of names and files") from None
    for name in names:
        if Path(name).name != name:
            raise SpecError.of(str(index), f"names '{name}', which does not lie beside it")
        if not (index.parent / name).is_file():
            raise SpecError.of(str(index), f"names '{name}', which is missing")
    return [index.parent / name for name in names]


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with _told(path):
            return load_file(path)
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its readers do
        raise SpecError.of(str(path), _why_not(path, error)) from error
    for name in ("model", "state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(name), dict):
            loaded = loaded[name]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise SpecError.of(str(path), "holds no mapping of names to tensors")
    return loaded


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What is wrong with a safetensors file is a SpecError that names it."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        empty = path.is_file() and path.stat().st_size == 0
        raise SpecError.of(
            str(path), _EMPTY if empty else f"is no safetensors file, or not all of one: {error}"
        ) from None


def _why_not(path: Path, error: Exception) -> str:
    """Why torch can't read a file. Its own words for one that is empty or cut off say nothing of that."""
    start = None
    with suppress(OSError), path.open("rb") as file:
        start = file.read(len(_ZIP))
    if start == b"":
        return _EMPTY
    if start == _ZIP and not zipfile.is_zipfile(path):
        return "is cut off: the list of what it holds, at the end of a file of torch, is missing"
    if isinstance(error, IndexError | EOFError | KeyError):  # of its reader of pickles
        return "torch can't read it as weights: it is cut off, or no file of torch"
    first = next(iter(str(error).splitlines()), "")
    return f"torch can't read it as weights: {first or type(error).__name__}"
