"""What a study asks for: every variant in every cell of its grid, at every rung of its ladder."""

from __future__ import annotations

import itertools
from dataclasses import replace

from archlab.arch_dsl.patching.patch import Setting
from archlab.search.sections.ladder.rungs import rungs_of
from archlab.search.sections.search.promotion_spec import scales_of
from archlab.search.study.study import Study
from archlab.search.variants.asked import Asked, Rung
from archlab.search.variants.patches import Patch


def asked_variants(study: Study) -> list[Asked]:
    """Every variant in every cell of the grid at every rung, in the order in which the table shows them.

    A search that promotes has one rung, its last. The rungs of a ladder have no names before they are counted:
    archlab.search.sections.ladder.rungs.climbed.
    """
    used = {name for patch in study.variants.values() for name in patch.components}
    components = [name for name in study.components if name in used]
    return [
        _asked(study, name, patch, cell, components, rung)
        for cell in itertools.product(*study.axes)
        for rung in (rungs_of(study.ladder) if study.ladder else [_promoted(study)])
        for name, patch in study.variants.items()
    ]


def _promoted(study: Study) -> Rung | None:
    """The last rung of a search that promotes: the table is trained as it is."""
    scales = scales_of(study.search.promote) if study.search else []
    return scales[-1] if scales else None


def _asked(
    study: Study,
    name: str,
    patch: Patch,
    cell: tuple[tuple[str, tuple[Setting, ...]], ...],
    components: list[str],
    rung: Rung | None,
) -> Asked:
    settings: list[Setting] = []
    for setting in patch.settings:
        if setting.path:
            settings.append(setting)
        else:
            own = study.components[setting.source].settings
            settings += [replace(each, source=f"component {setting.source}") for each in own]
    label = ", ".join(text for text, _ in cell)
    return Asked(
        name=f"{name} [{label}]" if label else name,
        base=name,
        cell=label,
        settings=(*settings, *(setting for _, mine in cell for setting in mine)),
        components={component: component in patch.components for component in components},
        axes={text.partition("=")[0]: text.partition("=")[2] for text, _ in cell},
        impossible=study.design.impossible if study.design and patch.designed else "refuse",
        against=patch.against,
        rung=rung,
        series=(f"{name} [{label}]" if label else name) if study.ladder else "",
        row="" if components and patch.is_pure else name,
    )
