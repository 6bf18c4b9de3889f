"""What a proposer may write: primitives by family, the zoo, the paths of this study's model and recipe, components."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from archlab.arch_dsl import zoo
from archlab.arch_dsl.catalogue.describe import allowed, describe, families, find
from archlab.arch_dsl.language.errors import SpecError, nearest, shorten, unknown
from archlab.arch_dsl.language.spec import Spec, fields_of
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.identity import brief_text, canonical
from archlab.search.challenge.changes import plain
from archlab.search.challenge.look import row_of
from archlab.search.challenge.standing import Standing

_DEEPEST = 12
_LONGEST = 160  # characters of a value that is shown


def told(referee: Standing, topic: str) -> dict[str, Any]:
    """What a topic has, as JSON. Raises SpecError for another one, with the nearest."""
    word, _, rest = topic.strip().partition(" ")
    if word in TOPICS:
        return {"topic": topic.strip(), **TOPICS[word](referee, rest.strip())}
    try:
        return {"topic": topic.strip(), "primitives": [describe(kind) for kind in find(topic.strip())]}
    except SpecError:
        names = [name for members in families().values() for name in members]
        meant = nearest(topic.strip(), [*TOPICS, *names])
        hint = f"; did you mean '{meant}'?" if meant else ""
        message = f"'{shorten(topic)}' is no topic{hint} (topics: {', '.join(TOPICS)}, and the name of any primitive)"
        raise SpecError.of("topic", message) from None


def _patch(referee: Standing, _: str) -> dict[str, Any]:
    """How a patch is written."""
    return {
        "patch": "a mapping from paths to values, or a list of names of components and such mappings",
        "examples": [
            {"block.attention.gate": {"position": "sdpa"}},
            {"block.norm": "layernorm", "train.lr": 0.002},
            {"block.attention.key": {"prepend": "shift"}},
        ],
        "edits of a list": "{prepend: X}, {append: X}, {remove: TYPE}, {replace: {TYPE: X}}, {before: {TYPE: X}}",
        "against": referee.opponent[0],
        "on top of": "your changes stand on top of those of `against`; where both set one path, yours counts",
    }


def _primitives(_: Standing, family: str) -> dict[str, Any]:
    found = families()
    if not family:
        return {"families": found, "more": "describe_language('NAME') has the formula and fields of one primitive"}
    if family not in found:
        raise SpecError.of("topic", unknown(family, "family", found))
    return {"families": {family: found[family]}}


def _zoo(_: Standing, name: str) -> dict[str, Any]:
    if not name:
        return {"entries": {each: zoo.entry(each).text.partition("\n")[0].lstrip("# ") for each in zoo.names()}}
    if name not in zoo.names():
        raise SpecError.of("topic", unknown(name, "entry of the zoo", zoo.names()))
    return {"name": name, "sizes": [*zoo.entry(name).sizes], "yaml": zoo.entry(name).text}


def _paths(referee: Standing, start: str) -> dict[str, Any]:
    champion = row_of(referee.alone(), referee.opponent[0])
    whole = [*_below(champion.model, ""), *_below(champion.recipe, "train")]
    found = [each for each in whole if f"{each['path']}.".startswith(f"{start}.") or not start]
    if not found:
        raise SpecError.of("topic", unknown(start, "path of the champion", [each["path"] for each in whole]))
    return {"of": referee.opponent[0], "paths": found}


def _below(value: Spec, path: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The fields of a spec and of what is in it: their paths, values, and what is allowed."""
    if depth > _DEEPEST:
        return
    for name, item in fields_of(type(value)).items():
        where, held = f"{path}.{name}" if path else name, getattr(value, name)
        if isinstance(held, Block):  # of a model, or the branches of a branch, which a path does not name
            yield from _branches(held, path if name == "branches" else where, depth)
            continue
        yield _row(where, held, allowed(item.annotation))
        for each, place in _inside(held, where):
            yield from _below(each, place, depth + 1)


def _branches(block: Block, path: str, depth: int) -> Iterator[dict[str, Any]]:
    for name, branch in block.items():
        yield _row(f"{path}.{name}", branch, "branch")
        yield from _below(branch, f"{path}.{name}", depth + 1)


def _row(path: str, held: Any, may: str) -> dict[str, Any]:
    return {"path": path, "value": brief_text(canonical(held, brief=True))[:_LONGEST], "allowed": may}


def _inside(held: Any, where: str) -> Iterator[tuple[Spec, str]]:
    """What is in a field, with its path: a spec, or the members of a list by their types."""
    if isinstance(held, Spec):
        yield held, where
    for each in held if isinstance(held, tuple) else ():
        if isinstance(each, Spec) and (kind := getattr(each, "type", "")):
            yield each, f"{where}.{kind}"


def _components(referee: Standing, name: str) -> dict[str, Any]:
    found = {each: plain(patch) for each, patch in referee.study.components.items()}
    if name and name not in found:
        raise SpecError.of("topic", unknown(name, "component of this study", found))
    return {"components": {name: found[name]} if name else found}


TOPICS: dict[str, Callable[[Standing, str], dict[str, Any]]] = {
    "patch": _patch,
    "primitives": _primitives,
    "zoo": _zoo,
    "paths": _paths,
    "components": _components,
}
