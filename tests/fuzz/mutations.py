"""Studies and models that are nearly right: known ones, changed in a few places of the tree or in a few bytes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from archlab.arch_dsl.catalogue.describe import FAMILIES
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import read, read_text
from archlab.arch_dsl.language.spec import fields_of
from tests.arch_dsl.specs import KNOBS, SITES
from tests.fuzz.fuzz_kit import EXTREMES, values
from tests.golden import files
from tests.search.study_files import study_text

_WRONG = Path(__file__).parents[1] / "search" / "wrong_studies.txt"
_SECTION = re.compile(r"^\w+:.*(?:\n[ ].*)*", re.MULTILINE)
_MOST_VARIANTS = 16
MODELS = (KNOBS, SITES, {"zoo": "llama", "n_layers": 2, "vocab": 19}, {"zoo": "t5", "vocab": 19}, {"zoo": "moe"})
"""Models as a file says them."""


@cache
def studies() -> tuple[dict[str, Any], ...]:
    """The trees of a small study and of the committed ones, without one of 34 models whose sizes take long to find."""
    trees = [read_text(study_text()).plain(), *(read(file).plain() for file in files())]
    return tuple(tree for tree in trees if len(tree.get("variants", ())) <= _MOST_VARIANTS)


@cache
def study_bytes() -> tuple[bytes, ...]:
    """The same as the bytes of files."""
    return (
        study_text().encode(),
        *(file.read_bytes() for file in files() if len(read(file).plain().get("variants", ())) <= _MOST_VARIANTS),
    )


@cache
def words() -> tuple[str, ...]:
    """Keys and types that there are somewhere: in studies, and in the families of models."""
    members = [each for kind in FAMILIES for each in kind.members.items()]
    fields = [field for _, member in members for field in fields_of(member)]
    keys = [key for tree in grafts() if isinstance(tree, dict) for key in tree]
    return tuple(sorted({*fields, *keys, *(name for name, _ in members)}))


@cache
def grafts() -> tuple[Any, ...]:
    """Parts of studies that other studies may be given, those of the studies that are known to be wrong as well."""
    found = [part[key] for tree in (*studies(), *MODELS) for part, key in places(tree)]
    for section in wrong_sections():
        try:
            found.append(read_text(section).plain())
        except SpecError:
            continue
    unique = {repr(each): each for each in found if each is not None}
    return tuple(unique.values())


@cache
def wrong_sections() -> tuple[str, ...]:
    """Sections of studies that are known to be wrong."""
    return tuple(_SECTION.findall(_WRONG.read_text()))


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (mapping or list, its key or index) in a tree, from the top."""
    pending = [tree]
    while pending:
        part = pending.pop(0)
        keys = list(part) if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
        for key in keys:
            yield part, key
            pending.append(part[key])


@st.composite
def mutants(draw: st.DrawFn, trees: st.SearchStrategy[Any]) -> Any:
    """A tree with up to four changes."""
    root = {"root": copy.deepcopy(draw(trees))}
    for _ in range(draw(st.integers(0, 4))):
        found = list(places(root["root"]))
        if found:
            part, key = found[draw(st.integers(0, len(found) - 1))]
            _CHANGES[draw(st.sampled_from(sorted(_CHANGES)))](draw, part, key, found)
    return root["root"]


def _replace(draw: st.DrawFn, part: Any, key: Any, found: list[Any]) -> None:
    part[key] = copy.deepcopy(draw(values))


def _graft(draw: st.DrawFn, part: Any, key: Any, found: list[Any]) -> None:
    part[key] = copy.deepcopy(draw(st.sampled_from(grafts())))


def _delete(draw: st.DrawFn, part: Any, key: Any, found: list[Any]) -> None:
    del part[key]


def _duplicate(draw: st.DrawFn, part: Any, key: Any, found: list[Any]) -> None:
    twin = copy.deepcopy(part[key])
    if isinstance(part, list):
        part.insert(key, twin)
    else:
        part[draw(_keys)] = twin


def _rename(draw: st.DrawFn, part: Any, key: Any, found: list[Any]) -> None:
    if isinstance(part, dict):
        part[draw(_keys)] = part.pop(key)
    else:
        part[key] = draw(_keys)


def _swap(draw: st.DrawFn, part: Any, key: Any, found: list[Any]) -> None:
    other, at = found[draw(st.integers(0, len(found) - 1))]
    one, two = copy.deepcopy(part[key]), copy.deepcopy(other[at])  # of which one may hold the other
    part[key] = two
    if at in (other if isinstance(other, dict) else range(len(other))):
        other[at] = one


def _retype(draw: st.DrawFn, part: Any, key: Any, found: list[Any]) -> None:
    old = part[key]
    first = next(iter(old), None) if isinstance(old, dict | list) else old
    part[key] = draw(
        st.sampled_from(
            [[old], [old, old], {"type": old}, {str(first): old}, str(old), first, {"values": old}, [[old]]]
        )
    )


def _scale(draw: st.DrawFn, part: Any, key: Any, found: list[Any]) -> None:
    numbers = [(p, k) for p, k in found if type(p.get(k) if isinstance(p, dict) else None) in (int, float)]
    if numbers:
        part, key = numbers[draw(st.integers(0, len(numbers) - 1))]
        factor = draw(st.sampled_from([0, -1, 0.5, 1.0, 3, 7, 10, 1000, 10**6, 10**12, 1e-9, 1e300]))
        part[key] = part[key] * factor


def _add(draw: st.DrawFn, part: Any, key: Any, found: list[Any]) -> None:
    new = copy.deepcopy(draw(st.one_of(st.sampled_from(EXTREMES), st.sampled_from(grafts()))))
    if isinstance(part, dict):
        part[draw(_keys)] = new
    else:
        part.append(new)


_keys = st.one_of(
    st.deferred(lambda: st.sampled_from(words())), st.sampled_from([e for e in EXTREMES if isinstance(e, str)])
)
_CHANGES = {
    "add": _add, "delete": _delete, "duplicate": _duplicate, "graft": _graft, "rename": _rename, "replace": _replace,
    "retype": _retype, "scale": _scale, "swap": _swap,
}  # fmt: skip

PIECES = [
    b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\t", b"\r", b"\n", b"\n\n", b": ", b":", b"- ", b"#",
    b"{", b"}", b"[", b"]", b",", b"'", b'"', b"&a ", b"*a", b"<<: *a", b"!!int ", b"! ", b"---\n", b"...\n",
    b"%YAML 1.1\n", b"|\n", b">\n", b"? ", b"@", b"`", b"\\", b'"\\x00"', b'"\\ud800"', b"~", b"  ", b"[" * 70,
    b"{a: " * 70, b"- " * 70, b"\xe2\x80\xa8", b"\xc2\x85", b"\x7f", b"1e400", b"9" * 500, b"\xf0\x9f\x99\x82",
]  # fmt: skip


@st.composite
def changed_bytes(draw: st.DrawFn) -> bytes:
    """A study's file in which a few bytes were flipped, put in, left out or cut off."""
    data = bytearray(draw(st.sampled_from(study_bytes())))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["put", "any", "flip", "delete", "cut", "repeat"])):
            case "put":
                data[at:at] = draw(st.sampled_from(PIECES))
            case "any":
                data[at:at] = draw(st.binary(max_size=8))
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "delete":
                del data[at : at + draw(st.integers(1, 40))]
            case "cut":
                del data[at:]
            case _:
                data[at:at] = data[at : at + draw(st.integers(1, 200))]
    return bytes(data)


_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def text_of(tree: Any) -> str:
    """The YAML of a tree."""
    return str(yaml.dump(tree, Dumper=_DUMPER, sort_keys=False, allow_unicode=True))
