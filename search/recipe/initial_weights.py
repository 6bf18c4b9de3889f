"""Starting from weights: `init: {from: FILE}` of a recipe. What a variant shares with the file is taken from it.

The hash of the file is part of a trial, its place is not; the store keeps a copy under the hash. A parameter without
a source, or whose shape a variant changed, starts as if there were no file.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from archlab.arch_dsl.compiler.modules import stored
from archlab.arch_dsl.compiler.shapes import stored_shapes
from archlab.arch_dsl.language.errors import Problem, SpecError, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_record
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Spec
from archlab.arch_dsl.model.constraint import Constrained
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts.layers import without_groups
from archlab.arch_dsl.tree.identity import Change
from archlab.arch_dsl.weights.files import MODEL, read_checkpoint, read_shapes, sha256_of

_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEYS = ("from", "sha256")
_LAYER = re.compile(r"\bblock\.[0-9]+\.")


class Start(Spec):
    """Initial weights: a file that `archlab import` or `archlab export` wrote, or its folder.

    `sha256` is filled in from the file; where it is given, the file must have it.
    """

    title: ClassVar[str] = "start"
    file: str | None = None
    sha256: str | None = None

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """`{from: FILE, sha256: DIGEST}`, one of them at least."""
        if isinstance(node.value, dict):
            strange = [name for name in node.value if name not in _KEYS]
            for name in strange:
                message = unknown(name, "key of init", _KEYS)
                problems.append(Problem(f"{path}.{name}", message, node.key_marks.get(name, node.mark)))
            if strange:
                return INVALID
            named = {"file" if name == "from" else name: child for name, child in node.value.items()}
            node = Node(named, node.mark, node.key_marks)
        start = parse_record(cls, node, path, problems)
        if start is INVALID:
            return INVALID
        if start.file is None and start.sha256 is None:
            problems.append(Problem(path, "needs `from`: a file that `archlab import` wrote", node.mark))
            return INVALID
        if start.sha256 is not None and not _DIGEST.fullmatch(start.sha256):
            problems.append(Problem(f"{path}.sha256", "must be 64 hexadecimal digits", start.mark("sha256")))
            return INVALID
        return start


def as_written(change: Change) -> Change:
    """A change of a recipe with the key that a study has for the file of a start: `from`."""
    if change.path == "train.init":
        before, after = (
            {"from" if name == "file" else name: said for name, said in value.items()} if value else value
            for value in (change.before, change.after)
        )
        return replace(change, before=before, after=after)
    return replace(change, path="train.init.from") if change.path == "train.init.file" else change


@dataclass(frozen=True)
class Started:
    """How a variant starts: its parameters without a source, and what the file holds that no parameter takes."""

    sha256: str
    fresh: tuple[str, ...]
    unused: tuple[str, ...]


def keep_weights(start: Start, base: Path | None, data_root: Path, path: str = "train.init") -> Start:
    """A start with its digest, its file kept in the store. Raises SpecError where there is no such file of weights."""
    if start.file is None:
        assert start.sha256 is not None
        if not kept(data_root, start.sha256).is_file():
            raise SpecError.of(f"{path}.sha256", "no weights of this digest are in the store", start.mark("sha256"))
        return start
    file = _found(start, base, path)
    digest = sha256_of(file)
    if start.sha256 not in (None, digest):
        message = f"{file} has sha256 {digest}, not {start.sha256}"
        raise SpecError.of(f"{path}.sha256", message, start.mark("sha256"))
    place = kept(data_root, digest)
    if not place.is_file():
        read_shapes(file)  # or it is none
        place.parent.mkdir(parents=True, exist_ok=True)
        scrap = place.with_name(f".new-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            shutil.copyfile(file, scrap)
            os.replace(scrap, place)
        finally:
            scrap.unlink(missing_ok=True)
    return start.replace(sha256=digest)


def kept(data_root: Path, sha256: str) -> Path:
    """Where the store keeps a file of weights."""
    return data_root / "weights" / f"{sha256}.safetensors"


def _found(start: Start, base: Path | None, path: str) -> Path:
    """The file, searched in the current directory and then beside the study."""
    assert start.file is not None
    for folder in filter(None, (Path(), base)):
        place = folder / start.file
        file = place / MODEL if place.is_dir() else place
        if file.is_file():
            if file.suffix == ".safetensors":
                return file
            message = f"{file} is no .safetensors file; `archlab import` makes one of a checkpoint"
            raise SpecError.of(f"{path}.from", message, start.mark("file"))
    raise SpecError.of(f"{path}.from", f"there is no {start.file}", start.mark("file") or start.mark())


def started(start: Start, model: Model, base: Model, data_root: Path) -> Started:
    """What a resolved variant takes from its start and what not.

    Raises SpecError where a shape differs that the variant shares with the base of its study, or nothing fits.
    """
    assert start.sha256 is not None
    given = _unified(read_shapes(kept(data_root, start.sha256)))
    mine, theirs = _unified(stored_shapes(model)), _unified(stored_shapes(base))
    wrong = [name for name, shape in mine.items() if name in given and given[name] != shape]
    shared = [name for name in wrong if theirs.get(name) == mine[name]]
    problems = []
    if shared:
        first = f"{shared[0]} has shape {list(given[shared[0]])} in the file, {list(mine[shared[0]])} here"
        more = f", and {len(shared) - 1} more differ" if shared[1:] else ""
        message = f"{first}{more}; the sizes of the model must be those of the YAML beside the file"
        problems = [Problem("train.init", message, start.mark())]
    fresh = tuple(name for name in mine if name not in given or name in wrong)
    if not problems and len(fresh) == len(mine):
        problems = [Problem("train.init", "no parameter of this model is in the file", start.mark())]
    if problems:
        raise SpecError(problems)
    return Started(start.sha256, fresh, tuple(name for name in given if name not in mine or name in wrong))


def load_start(model: nn.Module, start: Start, data_root: Path) -> None:
    """Sets the parameters that are in the file with the same path and shape, as far as the model's constraint lets them
    be what they are there. Raises ValueError if it was altered."""
    assert start.sha256 is not None
    place = kept(data_root, start.sha256)
    if (found := sha256_of(place)) != start.sha256:
        raise ValueError(f"{place} was altered: its sha256 is {found}")
    tensors, mine = read_checkpoint(place), stored(model)
    given = {short: tensors[name] for name, short in without_groups(tensors).items()}
    names = without_groups(mine)
    with torch.no_grad():
        for name, value in mine.items():
            source = given.get(names[name])
            if source is not None and source.shape == value.shape:
                value.copy_(source)
    if isinstance(model, Constrained):
        model.constrain()


def _unified(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {short: tuple(shapes[name]) for name, short in without_groups(shapes).items()}


def start_lines(name: str, found: Started) -> Iterator[str]:
    """How a variant starts, for people; layers alike are one entry."""
    if not found.fresh and not found.unused:
        yield f"{name}: every parameter starts from the file"
    for words, names in (("freshly initialised", found.fresh), ("unused of the file", found.unused)):
        if names:
            yield f"{name}: {words}: {', '.join(_by_layer(names))}"


def _by_layer(names: Iterable[str]) -> list[str]:
    counts = Counter(_LAYER.sub("block.*.", name) for name in names)
    return [f"{short} ({count} layers)" if count > 1 else short for short, count in counts.items()]
