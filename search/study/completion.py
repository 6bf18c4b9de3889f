"""What may stand at a place of a study's text, by its JSON Schema: for an editor, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from archlab.search.study.files import schema_file

Schema = dict[str, Any]
Step = str | int

MOST = 200
"""Suggestions of one place."""
_ITEM: Step = 0
_TOKEN = re.compile(r"""(?P<comment>(?<!\S)\#.*)|(?P<text>"(?:[^"\\]|\\.)*"?|'[^']*'?)|(?P<mark>[{}\[\],]|:(?=\s|$))""")


@dataclass(frozen=True)
class Suggestion:
    """A word that may stand there, what it means, and what follows it at once: a colon, of a key."""

    word: str
    doc: str = ""
    then: str = ""


@dataclass
class _Open:
    """A mapping or list that the cursor is in: how far it is indented (None: it has brackets), and its open key."""

    indent: int | None
    key: Step | None = None
    known: dict[str, str] = field(default_factory=dict)  # its keys so far, with their values where these are words


def complete(text: str, position: int) -> tuple[int, list[Suggestion]]:
    """(where the word begins that is being typed, what it may become) at a position of the text, in characters."""
    before = text[:position]
    line = before.rpartition("\n")[2]
    word = _word(line)
    opened, key = _opened(before[: len(before) - len(word)])
    if opened is None:
        return position, []
    path = [each.key for each in opened[:-1]]
    schema = _at(path, opened)
    own = _names_of(text, path, key)
    if key is not None:
        below = _down(schema, key, opened[-1].known)
        # a mapping alone may stand there: its keys, in braces
        found = [*_values(below)] or [replace(each, word="{" + each.word) for each in _keys(below, word, {})]
    else:
        item = not opened[-1].known and isinstance(opened[-2].key, int) if len(opened) > 1 else False
        found = [*(_values(schema) if item else ()), *_keys(schema, word, opened[-1].known)]
    found = [*own, *found]
    low = word.lower()
    ordered = sorted(
        (each for each in found if low in each.word.lower()),
        key=lambda each: not each.word.lower().lstrip("{").startswith(low),
    )
    return position - len(word), ordered[:MOST]


def _names_of(text: str, path: Sequence[Step | None], key: str | None) -> list[Suggestion]:
    """The names that the study itself has given and that may stand there: components of a variant, or variants."""
    if len(path) > 1 and path[0] == "variants" and isinstance(path[-1], int):
        section, doc = "components", "A component of this study."
    elif path[:1] in (["report"], ["match"]) and key in ("baseline", "parameters", "flops", "cache", "step_time"):
        section, doc = "variants", "A variant of this study."
    else:
        return []
    block = re.search(rf"^{section}:.*\n((?:(?:[ #].*)?\n)*)", text, re.MULTILINE)
    names = re.findall(r"^  ([\w.+*-]+):", block[1] if block else "", re.MULTILINE)
    return [Suggestion(name, doc) for name in dict.fromkeys(names)]


def _word(line: str) -> str:
    """What is being typed at the end of a line: letters that a key, a path or a value may have."""
    match = re.search(r"[\w.*+-]*$", line)
    found = match[0] if match else ""
    return "" if line.lstrip() == found == "-" else found


def _opened(text: str) -> tuple[list[_Open] | None, str | None]:
    """(the mappings and lists that are open at the end of the text, the key whose value is awaited there or None). No
    list at all inside of a comment or a quoted text."""
    stack = [_Open(0)]
    lines = text.split("\n")
    for number, line in enumerate(lines):
        last = number == len(lines) - 1
        rest = line
        if stack[-1].indent is not None:
            body = line.lstrip()
            if not last and (not body or body.startswith("#")):
                continue
            rest = _begin_line(stack, line)
        pending, place = "", 0
        for token in _TOKEN.finditer(rest):
            if token.lastgroup != "mark":
                if last and (token["comment"] or (token.end() == len(rest) and len(token[0]) < 2)):
                    return None, None
                if token["comment"]:
                    pending += rest[place : token.start()]
                    place = len(rest)
                    break
                continue
            pending += rest[place : token.start()]
            place = token.end()
            pending = _mark(stack, token[0], pending)
        pending += rest[place:]
        if not last:
            _end_value(stack, pending)
    return stack, _awaited(stack)


def _begin_line(stack: list[_Open], line: str) -> str:
    """Closes what is indented as far as a line of block style or further, opens its items, and returns the rest."""
    rest = line.lstrip(" ")
    indent = len(line) - len(rest)
    while rest.startswith("- ") or rest == "-":
        _close(stack, indent)
        if not (isinstance(stack[-1].key, int) and stack[-1].indent == indent):
            stack.append(_Open(indent, _ITEM))
        inner = rest[1:].lstrip(" ")
        indent, rest = indent + max(2, len(rest) - len(inner)), inner
        stack.append(_Open(indent))
    _close(stack, indent, keep=True)
    if stack[-1].indent is not None and stack[-1].indent < indent and stack[-1].key is not None:
        stack.append(_Open(indent))
    if stack[-1].indent == indent and not isinstance(stack[-1].key, int):
        stack[-1].key = None
    return rest


def _close(stack: list[_Open], indent: int, keep: bool = False) -> None:
    """Takes away what is indented further than a line, and an item's mapping that the line is no part of."""
    while len(stack) > 1 and (stack[-1].indent or 0) > indent:
        stack.pop()
    if keep and len(stack) > 1 and isinstance(stack[-1].key, int) and stack[-1].indent == indent:
        stack.pop()


def _mark(stack: list[_Open], mark: str, pending: str) -> str:
    """What a bracket, comma or colon does; returns what is pending after it."""
    top = stack[-1]
    if mark == ":":
        if not isinstance(top.key, int):
            top.key = pending.strip().strip("\"'")
            top.known.setdefault(str(top.key), "")
        return ""
    if mark in "{[":
        stack.append(_Open(None, _ITEM if mark == "[" else None))
        return ""
    if top.indent is not None:  # a comma or a closing bracket in a text of block style
        return pending + mark
    _end_value(stack, pending)
    if mark == ",":
        top.key = top.key if isinstance(top.key, int) else None
    else:
        stack.pop()
    return ""


def _end_value(stack: list[_Open], pending: str) -> None:
    """Remembers the word that stands behind a key."""
    top = stack[-1]
    if isinstance(top.key, str) and pending.strip():
        top.known[top.key] = pending.strip().strip("\"'")


def _awaited(stack: list[_Open]) -> str | None:
    """The key whose value stands next, None where a key does. In a list, whose items are values, it is empty."""
    top = stack[-1]
    if isinstance(top.key, int):
        stack.append(_Open(None))
        return ""
    return top.key


@cache
def _root() -> Schema:
    found: Schema = json.loads(schema_file().read_text())
    return found


def _at(path: Sequence[Step | None], opened: Sequence[_Open]) -> list[Schema]:
    """The schemas that may hold of the innermost mapping or list."""
    found = [_root()]
    for key, own in zip(path, opened, strict=False):
        found = _down(found, key, own.known)
    return found


def _down(schemas: Sequence[Schema], key: Step | None, known: dict[str, str], paths: bool = True) -> list[Schema]:
    """What may stand behind a key, with `paths` also one of several steps, or in a list. An empty key stays where it
    is."""
    if key == "" or key is None:
        return [*schemas]
    found: list[Schema] = []
    fitting = [*_fitting(schemas, known)]
    if named := [each["properties"][key] for each in fitting if key in each.get("properties", {})]:
        return named  # a key by its own name, before what any name may stand for
    for each in fitting:
        if isinstance(key, int):
            found += [each["items"]] if isinstance(each.get("items"), dict) else []
        elif own := [s for pattern, s in each.get("patternProperties", {}).items() if re.search(pattern, key)]:
            found += own
        elif paths and _by_path(each):
            found += _of_axis(each, _along(key.split(".")))
        elif isinstance(each.get("additionalProperties"), dict):
            found.append(each["additionalProperties"])
    return found


def _expanded(schemas: Sequence[Schema]) -> Iterator[Schema]:
    """Every alternative, references followed."""
    for each in schemas:
        if "$ref" in each:
            yield from _expanded([_root()["definitions"][each["$ref"].rpartition("/")[2]]])
        for alternatives in (each.get("anyOf"), each.get("oneOf")):
            # those of the whole study say which sections it needs, not what it is
            yield from _expanded([other for other in alternatives or () if other.keys() - {"required"}])
        if each.keys() & {"properties", "additionalProperties", "items", "enum", "const", "propertyNames", "type"}:
            yield each


def _fitting(schemas: Sequence[Schema], known: dict[str, str]) -> list[Schema]:
    """The alternatives that the mapping's own `type` leaves."""
    every, kind = [*_expanded(schemas)], known.get("type")
    return [each for each in every if kind in _types(each, kind)] if kind else every


def _types(schema: Schema, usual: str) -> Sequence[str]:
    """The types that an alternative is of: any, where it does not say."""
    asked: Schema = schema.get("properties", {}).get("type", {})
    told: Sequence[str] = asked.get("enum") or ([asked["const"]] if "const" in asked else [usual])
    return told


def _of_axis(schema: Schema, values: list[Schema]) -> list[Schema]:
    """Values at a path, as a list where the mapping has lists of them, as `grid` does."""
    own = schema.get("additionalProperties")
    listed = isinstance(own, dict) and any(each.get("type") == "array" for each in _expanded([own]))
    return [{"type": "array", "items": {"anyOf": values}}] if listed else values


def _by_path(schema: Schema) -> bool:
    """Whether a mapping's keys are paths into the model or the recipe."""
    pattern = schema.get("propertyNames", {}).get("pattern", "")
    return "d_model|" in pattern


def _along(steps: Sequence[str]) -> list[Schema]:
    """The schemas at a path into the model, or behind `train` into the recipe."""
    root = _root()["properties"]
    found, rest = ([root["train"]], steps[1:]) if steps[:1] == ["train"] else ([root["model"]], steps)
    for step in rest:
        found = _down(found, step, {}, paths=False)
    return found


def _keys(schemas: Sequence[Schema], word: str, known: dict[str, str]) -> Iterator[Suggestion]:
    """The keys that a mapping may have and has not yet."""
    found: dict[str, Suggestion] = {}
    for each in _fitting(schemas, known):
        for name, own in each.get("properties", {}).items():
            found.setdefault(name, Suggestion(name, _doc([own]), ": "))
        if _by_path(each):
            *steps, _ = word.split(".")
            start = "".join(f"{step}." for step in steps)
            at = [_root()["properties"]["train"]] if steps == ["train"] else _along(steps)
            more = {"train": {"description": "The recipe, of this variant alone."}} if not steps else {}
            for name, own in {**more, **_properties(at)}.items():
                found.setdefault(start + name, Suggestion(start + name, _doc([own]), ": "))
    yield from (each for name, each in found.items() if name not in known)
    if not found:  # a list or a value may stand there too
        yield from _values(schemas)


def _properties(schemas: Sequence[Schema]) -> Schema:
    found: Schema = {}
    for each in _expanded(schemas):
        for name, own in each.get("properties", {}).items():
            found.setdefault(name, own)
    return found


def _values(schemas: Sequence[Schema]) -> Iterator[Suggestion]:
    """The words that a value may be."""
    found: dict[str, Suggestion] = {}
    for each in _expanded(schemas):
        words = [each["const"]] if "const" in each else each.get("enum", ())
        if each.get("type") == "boolean":
            words = [True, False]
        for word in words:
            text = word if isinstance(word, str) else json.dumps(word)
            found.setdefault(text, Suggestion(text, _doc([each])))
    yield from found.values()


def _doc(schemas: Sequence[Schema]) -> str:
    """What is said of it, there or where it refers to; that a field is of its own kind says nothing."""
    told = next(
        (each["description"] for each in schemas if "description" in each and "." in each["description"][:-1]), ""
    )
    told = told or next((each["description"] for each in _expanded(schemas) if "description" in each), "")
    return " ".join(str(told).split())[:240]
