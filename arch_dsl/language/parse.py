"""Turns a node tree into typed specs, guided by annotations alone, and collects every mistake on the way.

A bare string is a member with defaults, a single value is a list of one, `2M` is two million.
"""

from __future__ import annotations

import re
import sys
import typing
from decimal import Decimal
from typing import Any, TypeVar

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError, nearest, shorten, unknown
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import (
    Family,
    Range,
    Spec,
    aliases_of,
    alternatives,
    families,
    fields_of,
    had_by,
    members_of,
    section_with,
    set_marks,
)

S = TypeVar("S", bound=Spec)

_NO_NOUNS = frozenset({"combine", "compile", "counted", "impossible", "normalize", "over", "recompute", "until"})
_UNITS = {"k": 1_000, "M": 1_000_000, "B": 1_000_000_000, "T": 1_000_000_000_000}
_LARGEST = sys.float_info.max
_WITH_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kMBT])$")


class _Invalid:
    """Stands for a value whose problem was already noted."""


INVALID = _Invalid()


def parse(cls: type[S], data: Any, path: str = "") -> S:
    """A spec of class `cls` from a Node or plain data. Raises SpecError with all its problems."""
    problems: list[Problem] = []
    spec = parse_value(cls, Node.of(data), path, problems)
    if problems:
        raise SpecError(problems)
    return typing.cast(S, spec)


def parse_value(annotation: Any, node: Node, path: str, problems: list[Problem]) -> Any:
    """The value that `annotation` asks for, or INVALID after noting in `problems` why there is none."""
    for item in getattr(annotation, "__metadata__", ()):
        if hasattr(item, "parse_node"):  # a notation of its own: an activation, a list of projections
            return item.parse_node(node, path, problems)
    limits = [item for item in getattr(annotation, "__metadata__", ()) if isinstance(item, Range)]
    if limits:
        annotation = typing.get_args(annotation)[0]
    if isinstance(annotation, type) and hasattr(annotation, "parse_node"):
        return annotation.parse_node(node, path, problems)
    options = alternatives(annotation)
    if type(None) in options:
        if node.value is None or (node.value == "none" and families(annotation)):
            return None
        options = tuple(option for option in options if option is not type(None))
        if len(options) == 1:
            return parse_value(options[0], node, path, problems)
    if limits:
        return _number(annotation, limits, node, path, problems)
    if typing.get_origin(options[0]) is typing.Annotated:
        return parse_value(options[0], node, path, problems)
    kinds = families(annotation)
    origin = typing.get_origin(options[0])
    if origin is tuple:
        return _tuple(typing.get_args(options[0])[0], node, path, problems)
    if origin is dict:
        return _mapping(typing.get_args(options[0])[1], node, path, problems)
    if kinds:
        return parse_member(kinds, node, path, problems)
    if isinstance(options[0], type) and issubclass(options[0], Spec):
        return parse_record(options[0], node, path, problems)
    return _scalar(options, node, path, problems)


def refuse(problems: list[Problem], path: str, message: str, mark: Mark | None) -> _Invalid:
    """INVALID, with the reason noted."""
    problems.append(Problem(path, message, mark))
    return INVALID


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _number(annotation: Any, limits: list[Range], node: Node, path: str, problems: list[Problem]) -> Any:
    value = _scalar((annotation,), node, path, problems)
    if value is INVALID:
        return value
    for limit in limits:
        if complaint := limit.complaint(value):
            return refuse(problems, path, f"{complaint}, found {node.value}", node.mark)
    return value


def _scalar(options: tuple[Any, ...], node: Node, path: str, problems: list[Problem]) -> Any:
    """A string, number, boolean or one of the words of a Literal."""
    value = node.value
    words: list[str] = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            words.extend(typing.get_args(option))
        elif option is bool and isinstance(value, bool):
            return value
        elif option in (int, float) and (number := _as_number(option, value)) is not None:
            return number
        elif option is str and isinstance(value, str):
            return value
    if value in words and isinstance(value, str):
        return value
    if words:
        *_, owner, name = ("", *path.split("."))
        named = owner if name.isdigit() else name
        noun = f"value of {named}" if name.isdigit() or name.endswith("s") or name in _NO_NOUNS else name
        found = value if isinstance(value, str | int | float) and not isinstance(value, bool) else _shown(node)
        return refuse(problems, path, unknown(found, noun, words), node.mark)
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    wanted = " or ".join(names[option] for option in options)
    unit = isinstance(value, str) and int in options and re.fullmatch(r"[0-9.]+ ?[A-Za-z]+", value)
    hint = f" (units are {', '.join(_UNITS)})" if unit else ""
    return refuse(problems, path, f"must be {wanted}, found {_shown(node)}{hint}", node.mark)


def _shown(node: Node) -> str:
    """A value as an error quotes it."""
    if isinstance(node.value, str):
        return f"'{shorten(node.value)}'"
    if isinstance(node.value, bool):
        return str(node.value).lower()
    return str(node.value) if isinstance(node.value, int | float) else node.kind


def _as_number(kind: type, value: Any) -> int | float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and (match := _WITH_UNIT.match(value)):
        exact = Decimal(match[1]) * _UNITS[match[2]]
        value = int(exact) if exact == int(exact) else float(exact)
    if kind is int and isinstance(value, int | float) and abs(value) < 2**63 and value == int(value):
        return int(value)
    return float(value) if kind is float and isinstance(value, int | float) and abs(value) <= _LARGEST else None


def _tuple(item: Any, node: Node, path: str, problems: list[Problem]) -> Any:
    if node.value is None:
        return ()
    nodes = node.value if isinstance(node.value, list) else [node]
    if node.value == "none" and families(item):
        nodes = []
    single = len(nodes) == 1 and nodes[0] is node
    values = [
        parse_value(item, child, path if single else _join(path, index), problems) for index, child in enumerate(nodes)
    ]
    return INVALID if any(value is INVALID for value in values) else tuple(values)


def _mapping(item: Any, node: Node, path: str, problems: list[Problem]) -> Any:
    if not isinstance(node.value, dict):
        return refuse(problems, path, f"must be a mapping of names, found {node.kind}", node.mark)
    values = {name: parse_value(item, child, _join(path, name), problems) for name, child in node.value.items()}
    return INVALID if any(value is INVALID for value in values.values()) else values


def parse_member(kinds: tuple[type[Family], ...], node: Node, path: str, problems: list[Problem]) -> Any:
    """A member of one of these families: a bare short name, or a mapping with `type` and fields."""
    noun = " or ".join(kind.noun for kind in kinds)
    members = members_of(kinds)
    name_node = fields = node
    if isinstance(node.value, dict):
        default = getattr(kinds[0], "default_type", None) if len(kinds) == 1 else None
        if default is None and "type" not in node.value:
            return refuse(problems, path, f"says no type of {noun} ({', '.join(members)})", node.mark)
        name_node = node.value.get("type", Node(default, node.mark))
        fields = Node({k: v for k, v in node.value.items() if k != "type"}, node.mark, node.key_marks)
    elif isinstance(node.value, str):
        fields = Node({}, node.mark)
    else:
        names = ", ".join([*members, *aliases_of(kinds)])
        article = "an" if noun[:1] in "aeio" else "a"
        return refuse(problems, path, f"must be {article} {noun}, found {node.kind} ({names})", node.mark)
    name = name_node.value
    if isinstance(name, str) and (meant := aliases_of(kinds).get(name)):
        name, defaults = meant
        assert isinstance(fields.value, dict)
        implied = {key: Node.of(value, name_node.mark) for key, value in defaults.items()}
        fields = Node({**implied, **fields.value}, fields.mark, fields.key_marks)
    if not isinstance(name, str) or name not in members:
        where = path if name_node is node else _join(path, "type")
        found = name if isinstance(name, str) else name_node.kind
        message = unknown(found, noun, [*members, *aliases_of(kinds)])
        if isinstance(fields.value, dict) and (plugin := fields.value.get("plugin")):
            kept = f"--plugin FILE loads it, and the store that trained with it has it as plugins/*-{plugin.plain()}.py"
            message = f"'{shorten(found)}' is a {noun} of a plug-in that is not loaded: {kept}"
        return refuse(problems, where, message, name_node.mark)
    member = members[name]
    own_parser = getattr(member, "parse_node", None)
    return own_parser(fields, path, problems) if own_parser else parse_record(member, fields, path, problems)


def _made_otherwise(cls: type[Family], name: str, given: Node, title: str) -> str | None:
    """What is wrong with the version or the plug-in that a member was made by."""
    if name == "version":
        said = f"was made by version {given.plain()} of {title}; this is {cls.numbers()}, with other numbers"
        return said if given.value != cls.numbers() else None
    own = f"the one loaded is {cls.plugin}, changed since or another file" if cls.plugin else "this one is built in"
    return f"was made with the source {given.plain()} of {title}; {own}" if given.value != cls.plugin else None


def parse_record(cls: type[Spec], node: Node, path: str, problems: list[Problem]) -> Any:
    """A spec from a mapping of its fields."""
    if not isinstance(node.value, dict):
        return refuse(problems, path, f"must be a mapping, found {node.kind}", node.mark)
    known = fields_of(cls)
    before = len(problems)
    values: dict[str, Any] = {}
    marks: dict[str, Mark] = {"": node.mark} if node.mark else {}
    title = getattr(cls, "type", "") or getattr(cls, "title", cls.__name__.lower())
    for name, child in node.value.items():
        if name in ("version", "plugin") and issubclass(cls, Family):
            if message := _made_otherwise(cls, name, child, title):
                refuse(problems, _join(path, name), message, child.mark)
            continue
        if name not in known:
            mark = node.key_marks.get(name, child.mark)
            names = [*known, *getattr(cls, "short_forms", ()), *getattr(cls, "other_keys", ())]
            inner = None if nearest(name, names, 0.8) else section_with(cls, name)
            hint = f"; it is a key of {inner}: write it below `{inner}:`" if inner else ""
            message = unknown(name, f"key of {title}", names, hint) + had_by(cls, name)
            problems.append(Problem(_join(path, name), message, mark))
            continue
        if child.mark:
            marks[name] = child.mark
        if typing.get_origin(known[name].annotation) is dict:
            marks |= {_join(name, key): mark for key, mark in child.key_marks.items()}
        values[name] = parse_value(known[name].annotation, child, _join(path, name), problems)
    for name, item in known.items():
        if item.required and name not in values:
            problems.append(Problem(_join(path, name), f"is missing: {title} needs it", node.mark))
    if len(problems) > before:
        return INVALID
    spec = cls(**values)
    set_marks(spec, marks)
    return spec
