"""Variants that are models of the zoo: `variants: {llama: {zoo: llama}, narrow: {zoo: palm, block.parallel.…}}`."""

from __future__ import annotations

from collections.abc import Iterable

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.parse import INVALID
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.arch_dsl.zoo import expand

ZOO = "zoo"
_KEYS = (ZOO, "size")


def varied(base: Model, settings: Iterable[Setting]) -> tuple[Model, Model]:
    """What a variant starts from, the base or the model of the zoo that it names, and that with its other changes.

    Raises SpecError.
    """
    mine = list(settings)
    named = [setting for setting in mine if setting.path == ZOO]
    if not named:
        return base, apply(base, mine)
    if len(named) > 1:
        where = f" by {named[0].source}" if named[0].source != named[1].source and named[0].source else ""
        raise SpecError.of(ZOO, f"is set twice: it was set{where}", named[1].mark)
    asked = {setting.path: setting for setting in mine if setting.path in _KEYS}
    reference = Node(
        {path: setting.node for path, setting in asked.items()},
        named[0].mark,
        {path: setting.mark for path, setting in asked.items() if setting.mark},
    )
    problems: list[Problem] = []
    start = expand(reference, "", problems)
    if start is INVALID:
        raise SpecError(problems)
    return start, apply(start, [setting for setting in mine if setting.path not in _KEYS])


def with_sizes(node: Node) -> Node:
    """A study's node in which variants and components that name a model of the zoo, and no size, have the number of
    parameters that the `size` of its base asks for."""
    assert isinstance(node.value, dict)
    model = node.value.get("model")
    size = model.value.get("size") if model is not None and isinstance(model.value, dict) else None
    if size is None or not isinstance(size.value, dict):
        return node
    sections: dict[str, Node] = {name: node.value[name] for name in ("components", "variants") if name in node.value}
    for name, section in sections.items():
        if isinstance(section.value, dict):
            patches = {key: _sized(patch, size) for key, patch in section.value.items()}
            sections[name] = Node(patches, section.mark, section.key_marks)
    return Node({**node.value, **sections}, node.mark, node.key_marks)


def _sized(patch: Node, size: Node) -> Node:
    """A patch, or a list of them, with a size where it needs one."""
    if isinstance(patch.value, list):
        return Node([_sized(each, size) for each in patch.value], patch.mark)
    if not isinstance(patch.value, dict) or ZOO not in patch.value or "size" in patch.value:
        return patch
    return Node({**patch.value, "size": size}, patch.mark, patch.key_marks)
