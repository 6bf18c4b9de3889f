"""What challengers change: from YAML and to it, and on top of what a champion changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.tree.paths import is_edit
from archlab.search.variants.patches import Patch


@dataclass(frozen=True)
class Idea:
    """What a challenger changes, and why somebody proposes it."""

    changes: Any
    why: str = ""


def plain(patch: Patch) -> list[Any]:
    """A patch as YAML writes it: component names, and mappings of paths."""
    return [s.node.plain() if not s.path else {s.path: s.node.plain()} for s in patch.settings]


def patch_of(changes: Any, path: str) -> Patch:
    """A patch from what `plain` made of it. Raises SpecError."""
    problems: list[Problem] = []
    found: Patch = Patch.parse_node(changes if isinstance(changes, Node) else Node.of(changes), path, problems)
    if problems:
        raise SpecError(problems)
    return found


def composed(champion: Patch, challenger: Patch) -> Patch:
    """The challenger's changes on top of the champion's, without those of the champion that it replaces."""
    new = [setting for setting in challenger.settings if setting.path and not is_edit(setting.node)]
    named = {*challenger.components}
    old = [
        setting
        for setting in champion.settings
        if not any(f"{setting.path}.".startswith(f"{each.path}.") for each in new if setting.path)
        and not (not setting.path and setting.node.plain() in named)
    ]
    names = [each for each in champion.components if each not in named]
    return Patch((*old, *challenger.settings), (*names, *challenger.components))
