"""`train: {recipe: calibrated}`: the recipe that `archlab calibrate` found for this model, on this text.

The store remembers one for each model, text and context; the fields that stand beside the key win, as with a recipe of
the zoo.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.store.store import Store
from archlab.search.utils.canonical import canonical_json

if TYPE_CHECKING:
    from archlab.search.study.study import Study

WORD, START = "calibrated", "model.init.std"
_UNTIL_READ = {"tokens": 10**15, "lr": 1.0}  # what a recipe must say, until the store has said it


def asked_of(study: Study) -> dict[str, str]:
    """What a calibrated recipe is good for, by parts: digests of the model without its start, and of the text."""
    model: dict[str, Any] = canonical(study.model)
    model.pop("init", None)
    recipe = study.train
    text = [canonical(recipe.data), canonical(recipe.tokenizer), canonical(recipe.objective)]
    parts = {"model": model, "text": text, "context": recipe.context}
    return {name: hashlib.sha256(canonical_json(each).encode()).hexdigest()[:16] for name, each in parts.items()}


def remember(store: Store, study: Study, found: dict[str, Any]) -> None:
    """Keeps a calibrated recipe for every study that asks the same of it; the newest stands."""
    asked = asked_of(study)
    store.remember(WORD, canonical_json(asked), {**found, "asked": asked})


def block(found: dict[str, Any]) -> str:
    """A calibrated recipe as a study's file spells it; how its models start is no part of `train`."""
    said: dict[str, Any] = {"train": found["train"]}
    if START in found:
        said["model"] = {"init": {"std": found[START]}}
    return yaml.safe_dump(said, sort_keys=False, default_flow_style=None, width=110)


def is_asked(node: Node) -> bool:
    """Whether a study's node wants a calibrated recipe."""
    train = node.value.get("train") if isinstance(node.value, dict) else None
    named = train.value.get("recipe") if train is not None and isinstance(train.value, dict) else None
    return named is not None and named.value == WORD


def with_calibrated(node: Node, root: Path, parse: Callable[[Node], Study]) -> Node:
    """The study's node with the calibrated recipe of the store at `root` in the place of the word. Raises SpecError."""
    assert isinstance(node.value, dict)
    train = node.value["train"]
    assert isinstance(train.value, dict)
    mark = train.value["recipe"].mark
    said = {key: child for key, child in train.value.items() if key != "recipe"}
    until_read = {key: Node.of(value) for key, value in _UNTIL_READ.items()}
    study = parse(_with(node, "train", Node({**until_read, **said}, train.mark, train.key_marks)))
    known: dict[str, Any] = {}
    if (root / "store.json").exists():
        with Store.open(root, create=False) as store:
            known = store.recall_all([WORD]).get(WORD, {})
    found = known.get(canonical_json(asked := asked_of(study)))
    if found is None:
        raise SpecError.of("train.recipe", _absent(asked, [*known.values()]), mark)
    fields = {key: Node.of(value, mark) for key, value in found["train"].items()}
    if said.keys() & {"batch", "batch_tokens"}:  # another batch has other micro-batches, as the study says
        fields = {key: each for key, each in fields.items() if key not in ("batch", "batch_tokens", "accumulate")}
    node = _with(node, "train", Node({**fields, **said}, train.mark, train.key_marks))
    return _started(node, Node.of(found[START], mark)) if START in found else node


def _absent(asked: dict[str, str], known: list[dict[str, Any]]) -> str:
    """Why there is no recipe to take."""
    if not known:
        return (
            "the store has no calibrated recipe; `archlab calibrate` with this study, its own `train` in it, makes one"
        )
    apart = [
        f"that of '{each['of']}' is for another {' and '.join(k for k in asked if asked[k] != each['asked'][k])}"
        for each in known
    ]
    return f"the store has no calibrated recipe for this study: {'; '.join(sorted(apart))}"


def _started(node: Node, std: Node) -> Node:
    """The study's node with its models started at `std`, where they do not say themselves how."""
    assert isinstance(node.value, dict)
    if "model" in node.value:
        return _with(node, "model", _start(node.value["model"], std))
    ablate = node.value["ablate"]
    assert isinstance(ablate.value, dict)
    ends = {key: _start(child, std) if key in ("from", "to") else child for key, child in ablate.value.items()}
    return _with(node, "ablate", Node(ends, ablate.mark, ablate.key_marks))


def _start(model: Node, std: Node) -> Node:
    assert isinstance(model.value, dict)
    if "init.std" in model.value:
        return model
    if "zoo" in model.value and "init" not in model.value:
        return _with(model, "init.std", std)
    init = model.value.get("init", Node({}, model.mark))
    if not isinstance(init.value, dict) or "std" in init.value:
        return model
    return _with(model, "init", _with(init, "std", std))


def _with(node: Node, key: str, child: Node) -> Node:
    assert isinstance(node.value, dict)
    return Node({**node.value, key: child}, node.mark, node.key_marks)
