"""What is known of one proposal of a search before it is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from archlab.search.formatting.words import counted
from archlab.search.variants.variant import Variant


@dataclass(frozen=True)
class Judged:
    """What a proposal makes, what it costs, by how much it breaks which constraint, and why it is not trained.

    `scaled` has what it makes at each rung, the search's own first; it alone where nothing is promoted.
    """

    scaled: tuple[Variant, ...] = ()
    costs: dict[str, float] = field(default_factory=dict)
    excess: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def variant(self) -> Variant | None:
        """As the search trains it; None where it makes no sense."""
        return self.scaled[0] if self.scaled else None

    @property
    def broken(self) -> bool:
        """Whether it breaks a constraint."""
        return any(value > 0 for value in self.excess.values())

    @property
    def tokens_per_step(self) -> int:
        """Of a whole batch; 0 where there is no variant."""
        return self.variant.recipe.sequences * self.variant.recipe.context if self.variant else 0

    def record(self) -> dict[str, Any]:
        """What the study's record keeps of it."""
        refused = {"refused": self.reason} if self.reason else {}
        infeasible = {"infeasible": True} if self.broken else {}
        return {**self.costs, "tokens_per_step": self.tokens_per_step, **refused, **infeasible}


def exceeded(costs: Mapping[str, float], limits: Mapping[str, float], excess: Mapping[str, float]) -> str:
    """Which limits are exceeded, and by what; '' for none."""
    return ", ".join(_more(each, costs[each], limits[each]) for each in excess if excess[each] > 0)


def _more(name: str, cost: float, limit: float) -> str:
    short = counted(cost), counted(limit)
    one, other = short if short[0] != short[1] else (f"{cost:,.10g}", f"{limit:,.10g}")
    return f"{name} {one} > {other}"


def none_can_be_trained(proposals: Sequence[Judged]) -> str:
    """Why there is nothing to train, where every proposal was refused; '' otherwise."""
    if not proposals or not all(each.reason for each in proposals):
        return ""
    if all(each.broken for each in proposals):
        nearest = min(proposals, key=lambda judged: sum(max(each, 0) for each in judged.excess.values()))
        return f"none of {len(proposals)} proposals keeps to them; the nearest: {nearest.reason}"
    senseless, *_ = next(each.reason for each in proposals if not each.broken).splitlines()
    return f"none of {len(proposals)} proposals can be trained: {senseless}"
