"""What a study leaves to its `design:` and `ablate:` written out: components from two models, variants from a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from archlab.arch_dsl.inspection.slots import Slot, slots
from archlab.arch_dsl.language.errors import Mark, Problem, unknown
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import marks_of
from archlab.arch_dsl.patching.patch import Setting
from archlab.search.sections.design.spec import ALL, BASELINE, BothEnds, Design, Levels
from archlab.search.variants.patches import Patch

MAX_VARIANTS = 100_000


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
    found = slots(study.model, study.ablate.after, solved=study.match.by if study.match else ())
    if not found:
        problems.append(
            Problem("ablate", "from and to are the same model: there is nothing to ablate", study.mark("ablate"))
        )
    for slot in found:
        if slot.name in study.components:
            message = f"'{slot.name}' is what ablate calls a slot in which its models differ; choose another name"
            problems.append(Problem("components", message, study.mark(f"components.{slot.name}")))
    mine = {slot.name: _component(slot, study.mark("ablate")) for slot in found}
    design = study.design or BothEnds(components=tuple(mine))
    ablate = study.ablate.with_slots(tuple(found))
    return study.replace(components={**mine, **study.components}, design=design, ablate=ablate)


def _component(slot: Slot, mark: Mark | None) -> Patch:
    return Patch(tuple(Setting(path, Node.of(value), slot.name, mark) for path, value in slot.changes))


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
    if isinstance(design, BothEnds) and len(names) > 2:
        rows = _against_all(rows, len(names))
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


def _against_all(rows: dict[str, Patch], count: int) -> dict[str, Patch]:
    """With the rows that lack one component compared with the row that has all."""
    full = next(name for name, patch in rows.items() if len(patch.components) == count)
    return {
        name: Patch(patch.settings, patch.components, True, full) if len(patch.components) == count - 1 else patch
        for name, patch in rows.items()
    }


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
        yield Problem(
            "design",
            f"{design.type} of {len(names)} components makes {size:,} variants; at most {MAX_VARIANTS:,}",
            mark,
        )
