"""Plug-ins: members of families that a file outside the repository registers, known by the hash of its source.

The hash is part of the canonical form of every spec that the file defines, so a changed source is another model. A
plug-in is Python and may do whatever Python may: nothing is loaded that the user did not ask for.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archlab.arch_dsl.language.errors import Mark, SpecError
from archlab.arch_dsl.language.spec import Family, fields_of

MAX_BYTES = 1_000_000
_ARCHLAB = Path(__file__).parents[2]  # the folder of the package
_PACKAGES = ("arch_dsl", "kernels", "search")  # whose import names stood alone once
_RENAMED = {"arch_dsl.decoding": "state", "arch_dsl.kept": "saved_for_backward"}
_RESERVED = ("type", "version", "plugin", "name")  # keys of the canonical form that are no fields

Place = tuple[type[Family], str]  # a family and a name in it


@dataclass(frozen=True)
class Plugin:
    """A file that was executed: where it was read, its source, the hash of that, and the names it registered."""

    path: Path
    source: bytes
    digest: str
    places: tuple[Place, ...]

    @property
    def members(self) -> tuple[type[Family], ...]:
        """The classes that it registered; a family's aliases are no classes."""
        found = [kind.members[name] for kind, name in self.places if name in kind.members]
        return tuple(dict.fromkeys(found))

    @property
    def file_name(self) -> str:
        """A name for a copy of the source, from which the source can be found again."""
        return f"{_stem(self.path)}-{self.digest}.py"


_LOADED: dict[str, Plugin] = {}


def loaded() -> tuple[Plugin, ...]:
    """The plug-ins of this process in the order in which they were loaded."""
    return tuple(_LOADED.values())


def digest_of(source: bytes) -> str:
    """16 hexadecimal digits of the sha256 of a source."""
    return hashlib.sha256(source).hexdigest()[:16]


def read(path: str | Path, mark: Mark | None = None) -> bytes:
    """The source of a plug-in, which is not executed. Raises SpecError, at `mark` if the path was written there."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise SpecError.of("", f"{file} is larger than {MAX_BYTES:,} bytes; a plug-in is a small text file", mark)
        return file.read_bytes()
    except OSError as error:
        raise SpecError.of("", f"cannot read the plug-in {file}: {error.strerror}", mark) from error


def load(path: str | Path, mark: Mark | None = None) -> Plugin:
    """Executes a file once per process and returns what it registered; the same content again is the same plug-in.

    Raises SpecError, at `mark` if given, for a file that cannot be read or executed, that registers nothing, or that
    takes a name which is taken; then nothing of it stays.
    """
    file, source = Path(path).absolute(), read(path, mark)
    digest = digest_of(source)
    if digest not in _LOADED:
        before = set(_places())
        try:
            _execute(file, source, digest)
            _LOADED[digest] = Plugin(file, source, digest, _marked(before, digest, file))
        except SpecError as error:
            _forget(place for place in _places() if place not in before)
            sys.modules.pop(_module_name(file, digest), None)
            raise SpecError.of("", str(error), mark) from error.__cause__
    return _LOADED[digest]


def unload(plugin: Plugin) -> None:
    """Takes the members of a plug-in out of their families, for a program that tries one after another."""
    _forget(plugin.places)
    sys.modules.pop(_module_name(plugin.path, plugin.digest), None)
    del _LOADED[plugin.digest]


def used_by(canonical: Any) -> Iterator[str]:
    """The hashes of the plug-ins that a canonical form names."""
    if isinstance(canonical, dict):
        if isinstance(digest := canonical.get("plugin"), str) and "type" in canonical:
            yield digest
        for value in canonical.values():
            yield from used_by(value)
    elif isinstance(canonical, list):
        for value in canonical:
            yield from used_by(value)


def _stem(path: Path) -> str:
    """The file's name as a part of a module's name; that of a stored copy is that of the original."""
    return re.sub(r"\W", "_", re.sub(r"-[0-9a-f]{16}$", "", path.stem))


def _module_name(path: Path, digest: str) -> str:
    return f"archlab_plugin_{_stem(path)}_{digest}"


def _execute(file: Path, source: bytes, digest: str) -> None:
    """Runs the source as a module of its own. Raises SpecError with the file and line of what went wrong."""
    name = _module_name(file, digest)
    found = importlib.util.spec_from_file_location(name, file)
    if found is None:
        raise SpecError.of("", f"{file} is no plug-in: its name does not end in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # where annotations and torch.compile look for what the file defines
    try:
        exec(compile(_with_names_of_today(ast.parse(source, str(file))), str(file), "exec"), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in may even call sys.exit
        where = f"{file}:{_line(error, file)}"
        said = str(error.msg if isinstance(error, SyntaxError) else error) or "no message"
        raise SpecError.of("", f"{where}: the plug-in failed: {type(error).__name__}: {said}") from error


def _with_names_of_today(tree: ast.Module) -> ast.Module:
    """A plug-in's code, where it imports by names of before this package lay in `archlab` and had rooms.

    Its source, and so the identity of trials that it took part in, stays what it was.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            node.module = _name_of_today(node.module or "")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "arch_dsl" or alias.asname:
                    alias.asname = alias.asname or alias.name
                    alias.name = _name_of_today(alias.name)
    return tree


def _name_of_today(module: str) -> str:
    """`archlab.arch_dsl.parts.context` for `arch_dsl.context`: the module of that name in whichever room it is now."""
    package, *rest = module.split(".")
    folder = _ARCHLAB / package
    if package not in _PACKAGES or not (rest or package == "arch_dsl"):
        return module
    name = _RENAMED.get(module, rest[0] if rest else "")
    rooms = sorted(folder.glob(f"*/{name}.py")) if name and len(rest) == 1 else []
    if rooms and not (folder / name).exists():
        return f"archlab.{package}.{rooms[0].parent.name}.{name}"
    return f"archlab.{module}"


def _line(error: BaseException, file: Path) -> int:
    """The last line of the file that took part in an error."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 1 for frame in reversed(frames) if frame.filename == str(file)), 1)


def _families(kind: type[Family] = Family) -> Iterator[type[Family]]:
    """Every family there is, those of recipes among them."""
    for child in kind.__subclasses__():
        if "noun" in child.__dict__:
            yield child
        yield from _families(child)


def _places() -> list[Place]:
    """All names that families know."""
    kinds = dict.fromkeys(_families())
    return [(kind, name) for kind in kinds for table in (kind.members, kind.aliases) for name in table]


def _marked(before: set[Place], digest: str, file: Path) -> tuple[Place, ...]:
    """The names that were not there before; their classes get the hash of their source."""
    new = tuple(place for place in _places() if place not in before)
    if not new:
        raise SpecError.of("", f'{file} registers no primitive: it needs a class under @Gate.register("name") or alike')
    for member in [kind.members[name] for kind, name in new if name in kind.members]:
        for name in fields_of(member):
            if name in _RESERVED:
                raise SpecError.of("", f"{file}: {member.__name__} has a field '{name}', a name that is reserved")
        member.plugin = digest
    return new


def _forget(places: Iterable[Place]) -> None:
    """Takes names out of their families."""
    for kind, name in places:
        kind.members.pop(name, None)
        kind.aliases.pop(name, None)
