"""What is known of one proposal of a search before it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
