"""What a study leaves to its `design:` and `ablate:` written out: components from two models, variants from a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from archlab.arch_dsl.inspection.slots import Slot, slots
from archlab.arch_dsl.language.errors import Mark, Problem, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_value, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import marks_of
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.patching.patch import Setting
from archlab.search.sections.design.spec import ALL, BASELINE, BothEnds, Design, Levels
from archlab.search.variants.patches import Patch

MAX_VARIANTS = 100_000
KEYS = ("from", "to")


@dataclass(frozen=True)
class Ablate:
    """`ablate: {from: A, to: B}`: every slot in which the two models differ becomes a component. `after` is the model
    at the other end; the first one is the base of the study."""

    after: Model
    slots: tuple[Slot, ...] = ()

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping with two models."""
        if not isinstance(node.value, dict):
            return refuse(
                problems, path, f"must be a mapping with the models from and to, found {node.kind}", node.mark
            )
        before = len(problems)
        for name in node.value:
            if name not in KEYS:
                mark = node.key_marks.get(name, node.mark)
                refuse(problems, f"{path}.{name}", unknown(name, "key of ablate", KEYS), mark)
        for name in KEYS:
            if name not in node.value:
                refuse(problems, f"{path}.{name}", "is missing: ablate needs it", node.mark)
        if len(problems) > before:
            return INVALID
        after = parse_value(Model, node.value["to"], f"{path}.to", problems)
        return INVALID if after is INVALID else cls(after)


def with_base(node: Node, problems: list[Problem]) -> Node:
    """A study's node with the model that `ablate` starts from as its base."""
    assert isinstance(node.value, dict)
    ablate = node.value.get("ablate")
    if ablate is None or not isinstance(ablate.value, dict) or "from" not in ablate.value:
        return node
    if "model" in node.value:
        message = "stands beside `ablate`, whose `from` is the base; give one of them"
        problems.append(Problem("model", message, node.key_marks.get("model")))
        return node
    return Node({**node.value, "model": ablate.value["from"]}, node.mark, node.key_marks)


def written_out(study: Any) -> tuple[Any, list[Problem]]:
    """The study with the components of its `ablate` and the variants of its `design`, and what is wrong with these."""
    problems: list[Problem] = []
    if study.ablate is not None:
        study = _ablated(study, problems)
    if study.design is not None and not problems:
        study = _with_variants(study, study.design, problems)
    if study.report.baseline == BASELINE not in study.variants and ALL in study.variants:
        study = study.replace(report=study.report.replace(baseline=ALL))
    return study, problems


def _ablated(study: Any, problems: list[Problem]) -> Any:
    """With a component for every slot in which the two models of `ablate` differ, and a design for them."""
    for end, model in (("from", study.model), ("to", study.ablate.after)):
        mistakes = model.replace(max_positions=model.max_positions or 1).check()  # the recipe's, later
        problems.extend(replace(mistake, path=f"ablate.{end}.{mistake.path}") for mistake in mistakes)
    if problems:
        return study
    mark = study.mark("ablate")
    found = slots(study.model, study.ablate.after, solved=study.match.by if study.match else ())
    if not found:
        problems.append(Problem("ablate", "from and to are the same model: there is nothing to ablate", mark))
    for slot in found:
        if slot.name in study.components:
            message = f"'{slot.name}' is what ablate calls a slot in which its models differ; choose another name"
            problems.append(Problem("components", message, study.mark(f"components.{slot.name}")))
    mine = {
        slot.name: Patch(tuple(Setting(path, Node.of(value), slot.name, mark) for path, value in slot.changes))
        for slot in found
    }
    design = study.design or BothEnds(components=tuple(mine))
    ablate = replace(study.ablate, slots=tuple(found))
    return study.replace(components={**mine, **study.components}, design=design, ablate=ablate)


def _with_variants(study: Any, design: Design, problems: list[Problem]) -> Any:
    """With the variants of the design before those that the study lists itself."""
    names = design.components if design.components is not None else tuple(study.components)
    mark = marks_of(study).get("design") or study.mark("ablate")
    if found := list(_complaints(design, names, study, mark)):
        problems.extend(found)
        return study
    explicit = {frozenset(patch.components): name for name, patch in study.variants.items() if patch.is_pure}
    rows = {}
    for name, row in design.named(names).items():
        mine = _patch(names, row, mark)
        rows[explicit.get(frozenset(mine.components), name)] = mine
    if isinstance(design, BothEnds) and len(names) > 2:  # what lacks one component is compared with what has all
        full = next(name for name, patch in rows.items() if len(patch.components) == len(names))
        lacking = {name: patch for name, patch in rows.items() if len(patch.components) == len(names) - 1}
        rows |= {name: replace(patch, against=full) for name, patch in lacking.items()}
    for name, patch in study.variants.items():
        if name in rows and not (patch.is_pure and set(patch.components) == set(rows[name].components)):
            message = f"'{name}' is what the design calls a variant of its own; choose another name"
            problems.append(Problem("variants", message, study.mark(f"variants.{name}")))
    own = {name: patch for name, patch in study.variants.items() if name not in rows}
    return study.replace(variants={**rows, **own})


def _patch(names: Sequence[str], row: Levels, mark: Mark | None) -> Patch:
    chosen = tuple(name for name, on in zip(names, row, strict=True) if on)
    settings = tuple(Setting("", Node(name, mark), name, mark) for name in chosen)
    return Patch(settings, chosen, designed=True)


def _complaints(design: Design, names: Sequence[str], study: Any, mark: Mark | None) -> Iterator[Problem]:
    place = design.mark("components") or mark
    for index, name in enumerate(names):
        if name not in study.components:
            yield Problem(f"design.components.{index}", unknown(name, "component", study.components), place)
        elif name in (BASELINE, ALL):
            yield Problem(f"design.components.{index}", f"'{name}' is what a design calls a variant; rename it", place)
        elif name in names[:index]:
            yield Problem(f"design.components.{index}", f"names the component '{name}' twice", place)
    if not names:
        yield Problem("design", "needs `components:`, of which it makes variants", mark)
    elif complaint := design.complaint(len(names)):
        yield Problem("design", complaint, mark)
    elif (size := design.size(len(names))) > MAX_VARIANTS:
        message = f"{design.type} of {len(names)} components makes {size:,} variants; at most {MAX_VARIANTS:,}"
        yield Problem("design", message, mark)
