"""A study's file and the files that it includes, as one tree in which every value keeps its place.

`include: common.yaml`, or a list of files, stands at the top of a file and is relative to it. What a file says itself
comes over what it includes, and a later one of a list over the earlier ones: mappings key by key, all else as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError, nearest, shorten
from archlab.arch_dsl.language.source import MAX_NODES, Node, nodes_in, read, read_text, written

INCLUDE = "include"
KINDS = ("type", "zoo")
"""Keys that name another member: what was said of the one before is not said of it."""
MOST = 100
"""Files that a study includes, counted through all that these include."""
_LISTED = 12  # files that an error names
_FIRST = ("study", "question")  # keys that a reader expects on top


def read_whole(path: str | Path, text: str | None = None) -> Node:
    """The tree of a study's file, or of a `text` in its place, with what it includes. Raises SpecError."""
    file = Path(path)
    return with_included(read(file) if text is None else read_text(text, str(file)), file.parent, file)


def whole_text(path: str | Path) -> str:
    """A study's text as a store keeps it: that of its file, or of all in one if it includes others. Raises SpecError,
    OSError."""
    return text_of(read_whole(path)) or Path(path).read_text()


def text_of(whole: Node) -> str:
    """The YAML of a tree with what it includes, in one text; "" for one that includes nothing."""
    if not isinstance(whole.value, dict) or INCLUDE not in whole.value:
        return ""
    files = ", ".join(whole.value[INCLUDE].plain())
    return f"# with what it includes: {files}\n" + written(_without(whole, INCLUDE))


def with_included(node: Node, folder: Path, file: Path | None = None) -> Node:
    """The tree of a `file` in a folder with what it includes; its `include` then lists all these files, in the order
    in which they were read and relative to the folder. One that includes nothing is returned as it is.

    The name of an included study is not taken over, and `null` in the place of an included section leaves that out.
    Raises SpecError for a file that is not there, that is no mapping, or that includes itself.
    """
    if not isinstance(node.value, dict) or INCLUDE not in node.value:
        return node
    files = _Files(folder)
    whole = files.merge(node, folder, () if file is None else (file.resolve(),))
    assert isinstance(whole.value, dict)
    mark = node.value[INCLUDE].mark
    if nodes_in(whole) > MAX_NODES:
        raise SpecError.of(INCLUDE, f"makes more than {MAX_NODES:,} nodes", mark)
    names = [Node(os.path.relpath(each, folder.resolve()), mark) for each in files.known]
    first = {key: whole.value[key] for key in _FIRST if key in whole.value}
    marks = {key: each for key, each in node.key_marks.items() if key == INCLUDE}
    return Node({**first, **whole.value, INCLUDE: Node([*names], mark)}, node.mark, {**whole.key_marks, **marks})


def over(base: Node, own: Node) -> Node:
    """A tree over another: mappings key by key, except that one of another `type` or `zoo` replaces; so does all
    else."""
    if not isinstance(base.value, dict) or not isinstance(own.value, dict):
        return own
    none = Node(None)
    if any(key in own.value and own.value[key].value != base.value.get(key, none).value for key in KINDS):
        return own
    fields = {key: over(base.value[key], child) for key, child in own.value.items() if key in base.value}
    return Node({**base.value, **own.value, **fields}, own.mark, {**base.key_marks, **own.key_marks})


class _Files:
    """The files that a study in a folder includes, each read once: `known`, with their trees."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, dict[Path, Node]()

    def merge(self, node: Node, folder: Path, chain: tuple[Path, ...]) -> Node:
        """A file's tree over all that it includes; `chain` are the files on the way to it, and itself."""
        assert isinstance(node.value, dict)
        if INCLUDE not in node.value:
            return node
        whole: Node | None = None
        for path, named in _named(node.value[INCLUDE]):
            below = self._included(path, named, folder, chain)
            whole = below if whole is None else _section_by_section(whole, below)
        own = _without(node, INCLUDE)
        return own if whole is None else _section_by_section(whole, own)

    def _included(self, path: str, named: Node, folder: Path, chain: tuple[Path, ...]) -> Node:
        """The tree of a file that is included as `named`, with what it includes itself."""
        file = _found(path, named, folder)
        real = file.resolve()
        if real in chain:
            circle = [*chain[chain.index(real) :], real]
            told = " -> ".join(os.path.relpath(each, self.folder.resolve()) for each in circle)
            raise SpecError.of(path, f"goes in a circle: {told}", named.mark)
        if real not in self.known:
            if len(self.known) >= MOST:
                raise SpecError.of(path, f"is one file too many: a study includes at most {MOST}", named.mark)
            node = _read(file, path, named.mark)
            if not isinstance(node.value, dict):
                found = f"an included file holds sections of a study, as a mapping; found {node.kind}"
                raise SpecError.of("", found, node.mark)
            self.known[real] = node  # in the order in which they are read
            self.known[real] = self.merge(self._moved(node, file.parent), file.parent, (*chain, real))
        return self.known[real]

    def _moved(self, node: Node, folder: Path) -> Node:
        """What an included file says, without the name of a study; its plug-ins as named from the study's folder."""
        node = _without(node, "study")
        assert isinstance(node.value, dict)
        if "plugins" not in node.value:
            return node
        listed = node.value["plugins"]
        return Node({**node.value, "plugins": self._from_here(listed, folder)}, node.mark, node.key_marks)

    def _from_here(self, node: Node, folder: Path) -> Node:
        if isinstance(node.value, list):
            return Node([self._from_here(each, folder) for each in node.value], node.mark)
        if not isinstance(node.value, str) or os.path.isabs(node.value):
            return node
        return Node(os.path.relpath(folder / node.value, self.folder), node.mark)


def _section_by_section(base: Node, own: Node) -> Node:
    """A study's tree over another; a section that is there and becomes `null` is left out."""
    assert isinstance(base.value, dict) and isinstance(own.value, dict)
    gone = [key for key, child in own.value.items() if child.value is None and key in base.value]
    return _without(over(base, own), *gone)


def _without(node: Node, *keys: str) -> Node:
    assert isinstance(node.value, dict)
    marks = {key: mark for key, mark in node.key_marks.items() if key not in keys}
    return Node({key: child for key, child in node.value.items() if key not in keys}, node.mark, marks)


def _named(node: Node) -> Iterator[tuple[str, Node]]:
    """The files that are included, each with its path for errors. Raises SpecError for what names no file."""
    listed = node.value if isinstance(node.value, list) else [node]
    if not listed:
        raise SpecError.of(INCLUDE, "must be a file, or a list of files, found an empty one", node.mark)
    paths = [f"{INCLUDE}.{index}" if isinstance(node.value, list) else INCLUDE for index in range(len(listed))]
    found = [*zip(paths, listed, strict=True)]
    problems = [
        Problem(path, f"must be a file such as common.yaml, found {each.kind}", each.mark)
        for path, each in found
        if not isinstance(each.value, str)
    ]
    if problems:
        raise SpecError(problems)
    yield from found


def _found(path: str, named: Node, folder: Path) -> Path:
    """The file that is included. Raises SpecError with the nearest name for one that is not there."""
    name = str(named.value)
    if Path(name).suffix not in (".yaml", ".yml"):
        raise SpecError.of(path, f"'{shorten(name)}' is no study file: its name ends in .yaml or .yml", named.mark)
    file = folder / name
    if not file.is_file():
        raise SpecError.of(path, _absent(name, file, Path(named.mark.file) if named.mark else None), named.mark)
    plain = Path(os.path.normpath(file))  # without `..`, unless a link is on the way
    return plain if plain.exists() and plain.samefile(file) else file


def _absent(name: str, file: Path, includer: Path | None) -> str:
    """Why there is no such file, and which one may be meant."""
    if not file.parent.is_dir():
        return f"'{shorten(name)}' is in no folder that there is: {file.parent}"
    there = sorted(each.name for each in file.parent.glob("*.y*ml") if each.is_file() and each != includer)
    stems = {Path(each).stem: each for each in there}  # what every name ends with makes none of them alike
    meant = nearest(file.stem, stems, alike=0.6)
    hint = f"; did you mean '{Path(name).parent / stems[meant]}'?" if meant else ""
    more = ", …" if len(there) > _LISTED else ""
    return f"there is no file '{shorten(name)}'{hint} ({', '.join(there[:_LISTED]) or 'there is none'}{more})"


def _read(file: Path, path: str, mark: Mark | None) -> Node:
    """The tree of one file alone. Raises SpecError, at `mark` where the file as a whole can't be read."""
    try:
        return read(file)
    except SpecError as error:
        if any(problem.mark for problem in error.problems):
            raise
        raise SpecError(Problem(path, problem.message, mark) for problem in error.problems) from error
