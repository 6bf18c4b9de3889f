"""What a study asks for, before anything is applied: one variant in one cell, at one rung of a ladder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from archlab.arch_dsl.patching.patch import Setting
from archlab.search.formatting.words import counted

Rule = Literal["tokens", "per parameter", "FLOPs"]


@dataclass(frozen=True)
class Tokens:
    """How many tokens the rungs take: `amount` of them, so many per parameter, or as many as so many FLOPs train."""

    amount: float
    rule: Rule

    @property
    def label(self) -> str:
        """What tells trials of one size apart."""
        if self.rule == "tokens":
            return f"tokens={counted(self.amount)}"
        return f"{'D/N' if self.rule == 'per parameter' else 'C'}={self.amount:g}"

    def tokens(self, parameters: int, flops: int) -> int:
        """Of a model with so many parameters, that takes so many FLOPs to train on a token."""
        return round(self.amount * {"tokens": 1, "per parameter": parameters, "FLOPs": 1 / flops}[self.rule])


@dataclass(frozen=True)
class Rung:
    """A size with a length: what it changes in the base and in the recipe, and what is still open of it."""

    place: int  # of its size
    settings: tuple[Setting, ...]
    rule: Tokens | None
    label: str = ""  # once it is counted


@dataclass(frozen=True)
class Asked:
    """A variant as the study asks for it, before it is applied: one variant in one cell of the grid."""

    name: str
    base: str
    cell: str
    settings: tuple[Setting, ...]
    components: Mapping[str, bool] = field(default_factory=dict)
    axes: Mapping[str, str] = field(default_factory=dict)  # of the grid, by the names that stand in `cell`
    impossible: str = "refuse"  # what becomes of it if it makes no sense
    against: str = ""  # the variant it is compared with; the study's baseline without one
    rung: Rung | None = None  # what a ladder changes in the base
    over: tuple[Setting, ...] = ()  # paths of the recipe, whatever the settings say of them
    series: str = ""  # what all rungs of a ladder have in common of its name
    row: str = ""  # its name before it was crossed, where components do not say all that it changes
