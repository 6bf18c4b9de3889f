"""Reads YAML strictly and keeps the place of every node: YAML 1.2 scalars, no tags, no duplicate keys, bounded aliases.

Built from the parser's events without recursion, so that a hostile file is refused, never expanded.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from archlab.arch_dsl.language.errors import Mark, SpecError, nearest

MAX_BYTES = 1_000_000
MAX_DEPTH = 64
MAX_NODES = 100_000
MAX_DIGITS = 399
"""Of an integer; a longer one stays text."""
_SHOWN = 3  # keys of a path that is nested too deeply

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL = re.compile(r"(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"[-+]?[0-9]+$")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Node:
    """A value with its place: a scalar, a list of nodes, or a mapping from key to node."""

    value: Scalar | list[Node] | dict[str, Node]
    mark: Mark | None = None
    key_marks: dict[str, Mark] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Any, mark: Mark | None = None, above: tuple[str, ...] = ()) -> Node:
        """Wraps plain Python data (mappings, sequences, scalars) that has no place in a file, below the keys `above`.

        Raises SpecError for what is nested too deeply, and for an integer with more digits than a file may hold.
        """
        if isinstance(data, Node):
            return data
        if len(above) > MAX_DEPTH:
            raise SpecError.of(f"{'.'.join(above[:_SHOWN])}…", f"nested deeper than {MAX_DEPTH} levels", mark)
        if isinstance(data, Mapping):
            return cls({str(key): cls.of(value, mark, (*above, str(key))) for key, value in data.items()}, mark)
        if isinstance(data, Sequence) and not isinstance(data, str | bytes):
            return cls([cls.of(value, mark, (*above, str(index))) for index, value in enumerate(data)], mark)
        if isinstance(data, int) and abs(data) >= 10**MAX_DIGITS:
            raise SpecError.of(".".join(above), f"is an integer of more than {MAX_DIGITS} digits", mark)
        return cls(data, mark)

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    @property
    def kind(self) -> str:
        """What the value is, as an error says it."""
        names = {dict: "a mapping", list: "a list", str: "a string", bool: "a boolean", int: "an integer"}
        return "nothing" if self.value is None else names.get(type(self.value), "a number")


def read(path: str | Path) -> Node:
    """The node tree of a file. Raises SpecError when it is missing, too large, not UTF-8 or not YAML."""
    file = Path(path)
    try:
        data = _read_regular(file)
        if len(data) > MAX_BYTES:
            raise SpecError.of("", f"{file} is larger than {MAX_BYTES:,} bytes; a study is a small text file")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise SpecError.of("", f"cannot read {file}: {error.strerror}{_meant(file)}") from error
    except UnicodeDecodeError as error:
        raise SpecError.of("", f"{file} is not UTF-8 text (byte {error.start})") from error
    return read_text(text, str(file))


def _meant(file: Path) -> str:
    """Which file beside one that is missing may be meant."""
    if file.exists() or not file.parent.is_dir():
        return ""
    stems = {each.stem: each.name for each in file.parent.glob("*.y*ml")}
    found = nearest(file.stem, stems, alike=0.6)
    return f"; did you mean '{file.parent / stems[found]}'?" if found else ""


def _read_regular(file: Path) -> bytes:
    """What a file holds, of more than is allowed one byte more. Raises OSError, also for what is no regular file: a
    pipe would wait for ever, a device never end."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Is a directory" if stat.S_ISDIR(mode) else "it is no regular file", str(file))
        return opened.read(MAX_BYTES + 1)


def read_text(text: str, name: str = "<text>") -> Node:
    """The node tree of a YAML text. Raises SpecError with the place of whatever is not allowed."""
    return _Composer(text, name).compose()


def written(node: Node) -> str:
    """The YAML of a tree, which reads as the same values."""
    return yaml.dump(
        node.plain(), Dumper=_Writer, sort_keys=False, default_flow_style=None, allow_unicode=True, width=110
    )


class _Writer(yaml.SafeDumper):
    """Quotes a text that would be read as something else, here and in YAML 1.1."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(writer: _Writer, text: str) -> yaml.Node:
    style = None if isinstance(_plain(text), str) else '"'
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_number(writer: _Writer, number: float) -> yaml.Node:
    if math.isinf(number):  # YAML's own `.inf` is a text here
        return writer.represent_scalar("tag:yaml.org,2002:float", "1.0e+999" if number > 0 else "-1.0e+999")
    return writer.represent_float(number)


_Writer.add_representer(str, _represent_text)
_Writer.add_representer(float, _represent_number)


def _scalar(event: yaml.ScalarEvent) -> Scalar:
    text: str = event.value
    return _plain(text) if event.implicit[0] else text


def _plain(text: str) -> Scalar:
    """What a text without quotes is."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text) if len(text) <= MAX_DIGITS else text
    return float(text) if _FLOAT.match(text) else text


_KEYS = re.compile("mapping values are not allowed|did not find expected key|could not find expected ':'")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


class _Composer:
    """Turns the events of one document into a Node tree."""

    def __init__(self, text: str, name: str) -> None:
        self.name, self.text, self.lines = name, text, text.split("\n")
        self.nodes = 0
        self.anchors: dict[str, Node] = {}

    def mark(self, place: Any) -> Mark:
        text = self.lines[place.line] if place.line < len(self.lines) else ""
        return Mark(self.name, place.line + 1, place.column + 1, text)

    def refuse(self, message: str, place: Any) -> SpecError:
        return SpecError.of("", message, self.mark(place))

    def compose(self) -> Node:
        try:
            return self._compose()
        except yaml.MarkedYAMLError as error:
            place = error.problem_mark or error.context_mark
            if "maximum nesting depth" in (error.problem or ""):  # libyaml's own limit, met while it looks ahead
                raise self.refuse(f"nested deeper than {MAX_DEPTH} levels", place) from error
            said = error.problem or error.context or ""
            message = f"this is not YAML: {self._indented(place) if place and _KEYS.search(said) else said}"
            if place is not None and self.text[place.index : place.index + 1] == "\t":
                message = "this is not YAML: a tab, where lines are indented by spaces"
            if error.context_mark is not None and "flow" in (error.context or ""):
                message += f"; what opens in line {error.context_mark.line + 1} is not closed"
            raise SpecError.of("", message, self.mark(place) if place else None) from error
        except yaml.reader.ReaderError as error:
            before = self.text[: self.text.index(chr(error.character))].split("\n")
            mark = Mark(self.name, len(before), len(before[-1]) + 1, "")
            raise SpecError.of("", f"this is not YAML: {str(error).splitlines()[0]}", mark) from error
        except UnicodeEncodeError as error:  # a text that comes from no file
            before = self.text[: error.start].split("\n")
            mark = Mark(self.name, len(before), len(before[-1]) + 1, "")
            raise SpecError.of("", "this is not YAML: half of a surrogate pair is no character", mark) from error

    def _indented(self, place: Any) -> str:
        """What is wrong where a key stands in which none may begin: its column, or a colon inside of a value."""
        here = min(place.line, len(self.lines))  # the end of a text is below its last line
        before = next((n for n in range(here - 1, -1, -1) if self.lines[n].split("#")[0].strip()), None)
        own = _indent(self.lines[here]) if here < len(self.lines) else 0
        above = 0 if before is None else _indent(self.lines[before])
        no_key = before is not None and ":" not in self.lines[before]
        if before is None or (own == above and (own > 0 or not no_key)):  # a value that goes on is indented
            return "a ': ' inside of a value, which then needs quotes"
        if no_key:
            return f"line {before + 1} has a key without its ':'"
        columns = f"this line is indented by {own} spaces, line {before + 1} by {above}"
        return f"{columns}: the keys of one mapping begin in the same column"

    def _compose(self) -> Node:
        root: list[Node] = []
        # An open collection: its node, the key that waits for a value, and its anchor.
        open_nodes: list[tuple[Node, list[tuple[str, Mark]], str | None]] = []
        documents = 0
        for event in yaml.parse(self.text, Loader=_Loader):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.refuse("a file holds one document; found a second '---'", event.start_mark)
            elif isinstance(event, yaml.ScalarEvent | yaml.AliasEvent):
                self._place(self._leaf(event), event.start_mark, open_nodes, root, getattr(event, "value", None))
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                self._refuse_tag(event)
                if len(open_nodes) >= MAX_DEPTH:
                    raise self.refuse(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
                empty: dict[str, Node] | list[Node] = {} if isinstance(event, yaml.MappingStartEvent) else []
                open_nodes.append((Node(empty, self.mark(event.start_mark)), [], event.anchor))
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                node, _, anchor = open_nodes.pop()
                if anchor:
                    self.anchors[anchor] = node
                self._place(node, event.start_mark, open_nodes, root)
        return root[0] if root else Node(None, Mark(self.name, 1, 1, ""))

    def _refuse_tag(self, event: Any) -> None:
        if event.tag is not None and not (isinstance(event, yaml.ScalarEvent) and event.tag == "!"):
            raise self.refuse(f"tags are not allowed here (found '{event.tag}')", event.start_mark)

    def _leaf(self, event: yaml.ScalarEvent | yaml.AliasEvent) -> Node:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise self.refuse(f"nothing is anchored as '{event.anchor}' above this line", event.start_mark)
            node = self.anchors[event.anchor]
            self._count(nodes_in(node), event.start_mark)
            return node
        self._refuse_tag(event)
        self._count(1, event.start_mark)
        node = Node(_scalar(event), self.mark(event.start_mark))
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def _count(self, nodes: int, place: Any) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise self.refuse(f"more than {MAX_NODES:,} nodes once its aliases are expanded", place)

    def _place(self, node: Node, place: Any, open_nodes: list[Any], root: list[Node], text: str | None = None) -> None:
        """Puts a finished node where it belongs: into its parent, as a waiting key (its text), or as the root."""
        if not open_nodes:
            root.append(node)
            return
        parent, waiting, _ = open_nodes[-1]
        if isinstance(parent.value, list):
            parent.value.append(node)
        elif not waiting:
            if isinstance(node.value, dict | list) or node.value is None:
                raise self.refuse(f"a key must be a word, found {node.kind}", place)
            key = str(node.value) if text is None else text
            if key in parent.key_marks and key != "<<":
                first = parent.key_marks[key]
                raise self.refuse(f"the key '{key}' was already given on line {first.line}", place)
            waiting.append((key, self.mark(place)))
        else:
            key, mark = waiting.pop()
            if key == "<<":
                if not isinstance(node.value, dict):
                    raise self.refuse(f"'<<' merges a mapping, found {node.kind}", place)
                for name, value in node.value.items():
                    parent.value.setdefault(name, value)
            else:
                parent.value[key] = node
                parent.key_marks[key] = mark


def nodes_in(node: Node) -> int:
    """Nodes in a tree; stops counting past the limit."""
    total, stack = 0, [node]
    while stack and total <= MAX_NODES:
        value = stack.pop().value
        total += 1
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
    return total
