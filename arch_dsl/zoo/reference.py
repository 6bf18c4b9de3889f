"""A reference to the zoo inside a study: `model: {zoo: llama, size: 7b}` and `train: {recipe: gpt3-125m}`."""

from __future__ import annotations

from typing import Any

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError
from archlab.arch_dsl.language.parse import INVALID, parse_value
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.arch_dsl.zoo.budget import solve
from archlab.arch_dsl.zoo.entries import Entry, entry, recipe, settings


@Model.notation("zoo")
def expand(node: Node, path: str, problems: list[Problem]) -> Any:
    """The model that a mapping with the key `zoo` stands for, or INVALID after noting in `problems` why there is none.

    `size` is a published one, or `{parameters: 1M}` for the entry's shape with about so many, embeddings not counted;
    without it the model is as the entry writes it. Every other key is a path, and changes what was named. The published
    vocabulary and positions are left to the study unless `vocab` or `max_positions` stands there too. What is said of
    the result has the place of the reference, not of the zoo's file.
    """
    assert isinstance(node.value, dict)
    name, mark = node.value["zoo"], node.key_marks.get("zoo", node.mark)
    try:
        found = entry(name.value if isinstance(name.value, str) else name.kind)
        model = parse_value(Model, _placed(found.node, mark), path, problems)
        if model is INVALID:
            return INVALID
        size = _size(found, model, node.value.get("size"), path, problems)
        own = [
            Setting(key, child, "", node.key_marks.get(key, child.mark))
            for key, child in node.value.items()
            if key not in ("zoo", "size")
        ]
        return apply(apply(model, size).replace(vocab=None, max_positions=None), own)
    except SpecError as error:
        prefix = f"{path}." if path else ""
        problems += [Problem(f"{prefix}{item.path}", item.message, item.mark or name.mark) for item in error.problems]
        return INVALID


def expand_recipe(node: Node, path: str, problems: list[Problem]) -> Node:
    """A recipe's mapping with the fields of the published one that its key `recipe` names; fields beside it win."""
    assert isinstance(node.value, dict)
    rest = {key: child for key, child in node.value.items() if key != "recipe"}
    name = node.value["recipe"]
    try:
        fields = recipe(name.value if isinstance(name.value, str) else name.kind)
    except SpecError as error:
        problems += [Problem(f"{path}.{item.path}", item.message, name.mark) for item in error.problems]
        fields = {"lr": 1.0}  # one mistake is not two
    published = {key: Node.of(value, name.mark) for key, value in fields.items()}
    return Node({**published, **rest}, node.mark, node.key_marks)


def _size(found: Entry, model: Model, node: Node | None, path: str, problems: list[Problem]) -> list[Setting]:
    """The changes of the size asked for."""
    if node is None:
        return []
    if isinstance(node.value, dict):
        if set(node.value) != {"parameters"}:
            raise SpecError.of("size", "is a name, or {parameters: NUMBER}", node.mark)
        wanted = parse_value(Count, node.value["parameters"], f"{path}.size.parameters", problems)
        try:
            return [] if wanted is INVALID else solve(model, found.budget, wanted)
        except SpecError as error:
            raise SpecError([Problem(item.path, item.message, node.mark) for item in error.problems]) from error
    try:
        chosen = found.size(node.kind if isinstance(node.value, list) else str(node.value))
    except SpecError as error:
        raise SpecError([Problem(item.path, item.message, node.mark) for item in error.problems]) from error
    return settings(_placed(chosen.node, node.mark))


def _placed(node: Node, mark: Mark | None) -> Node:
    """The node with this place throughout."""
    return Node.of(node.plain(), mark)
