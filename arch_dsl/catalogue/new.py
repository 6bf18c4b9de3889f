"""A new primitive begins as a copy of its nearest neighbour: the source of one under a name of its own, and a test."""

from __future__ import annotations

import ast
import inspect
import keyword
import re
from collections.abc import Iterator
from pathlib import Path

from archlab.arch_dsl.catalogue.describe import FAMILIES, find
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.spec import Family

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TEST = '''\
"""test_{name}.py: against its formula, and against all that primitives are held to."""

from pathlib import Path
from typing import Any

import torch

from archlab.arch_dsl import conformance
from archlab.arch_dsl.language import plugins

PLUGIN = plugins.load(Path(__file__).with_name("{name}.py"))


def formula(module: torch.nn.Module, *inputs: Any) -> torch.Tensor:
    """What the paper says, as plainly as it can be written. Until you write it, {name} is {like}."""
    neighbour = conformance.seen("{like}").module
    neighbour.load_state_dict(module.state_dict())
    return neighbour(*inputs)


def test_it_computes_its_formula() -> None:
    module, inputs, output = conformance.seen("{name}")
    torch.testing.assert_close(output, formula(module, *inputs))


def test_it_is_what_a_primitive_must_be() -> None:
    (member,) = PLUGIN.members
    wrong = [f"{{found.property}}: {{found.complaint}}" for found in conformance.check(member) if not found.holds()]
    assert not wrong
'''


def sources(name: str, like: str) -> tuple[str, str]:
    """The text of a plug-in that registers `name` as a copy of the primitive `like`, and the text of its test.

    Copied are the spec, the module and their private helpers; what else they use is imported. Raises SpecError for a
    name that is none or is taken, and for a neighbour that does not exist.
    """
    member = next((kind for kind in find(like) if isinstance(kind, type)), None)
    if member is None:
        raise SpecError.of("", f"{like} is a short form for sites; begin with one of the primitives that it sets")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise SpecError.of("", f"'{name}' cannot be the name of a primitive; write it like sliding_norm")
    if any(name in family.members or name in family.aliases for family in FAMILIES):
        raise SpecError.of("", f"'{name}' is taken: archlab primitives {name}")
    text = Path(inspect.getsourcefile(member) or "").read_text("utf-8")
    return _copy(name, member, text), _TEST.format(name=name, like=member.type)


def _copy(name: str, member: type[Family], text: str) -> str:
    """The part of a file that makes one of its primitives, renamed."""
    tree = ast.parse(text)
    places = {defined: node for node in tree.body for defined in _defined(node)}
    taken = _closure(member.__name__, places)
    used = {found for node in taken for found in _used(node)}
    others = sorted(used & places.keys() - {defined for node in taken for defined in _defined(node)})
    lines = text.splitlines()
    imports = list(_imports(tree, lines, used))
    while not imports[-1]:
        imports.pop()
    if others:
        imports.append(f"from {member.__module__} import {', '.join(others)}")
    head = f'"""{name}.py: begun as a copy of {member.type}. Change the formula here, below, and in the test."""\n'
    body = "\n\n\n".join(_segment(node, lines) for node in tree.body if node in taken)
    new = "".join(word.title() for word in name.split("_"))
    body = re.sub(rf", of=(?!{member.__name__}\b)\w+", "", body)
    body = re.sub(rf"\b(_*){member.__name__}\b", rf"\g<1>{new}", body)
    body = body.replace(f'.register("{member.type}")', f'.register("{name}")', 1)
    return "\n".join([head, *imports]) + f"\n\n\n{body}\n"


def _closure(spec: str, places: dict[str, ast.stmt]) -> list[ast.stmt]:
    """A spec with the class that says `of=` it, and what is private to the file and used by these."""
    modules = [node for node in places.values() if isinstance(node, ast.ClassDef) and _is_of(node, spec)]
    taken: list[ast.stmt] = []
    waiting: list[ast.stmt] = [places[spec], *modules]
    while waiting:
        node = waiting.pop()
        if node not in taken:
            taken.append(node)
            waiting += [places[found] for found in _used(node) if found.startswith("_") and found in places]
    return taken


def _is_of(node: ast.ClassDef, spec: str) -> bool:
    return any(
        word.arg == "of" and isinstance(word.value, ast.Name) and word.value.id == spec for word in node.keywords
    )


def _defined(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a file defines, other than by importing them."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _used(node: ast.stmt) -> Iterator[str]:
    yield from (found.id for found in ast.walk(node) if isinstance(found, ast.Name))


def _imports(tree: ast.Module, lines: list[str], used: set[str]) -> Iterator[str]:
    """The imports of a file with what is used of them, and the empty lines between their groups."""
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
            names = [name for name in node.names if future or (name.asname or name.name.partition(".")[0]) in used]
            if names:
                node.names = names
                yield ast.unparse(node)
            if not lines[node.end_lineno or 0].strip() and (future or names):
                yield ""


def _segment(node: ast.stmt, lines: list[str]) -> str:
    """The lines of a statement, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : node.end_lineno])
