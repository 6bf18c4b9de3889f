"""A cheap recipe that tells which variants to train: the `screen:` section of a study."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from archlab.arch_dsl.language.spec import Range, Spec
from archlab.search.variants.patches import Changes


class Screen(Spec):
    """Trains every variant by a cheap recipe first, `train` changed in these paths, and most of the worst no further.

    `keep` is the share of the variants that go on, rounded up. `calibrate` variants go on whatever their probes say,
    all baselines among them, the others drawn by name; of those that the probes would leave out `audit` go on too,
    rounded up. Where Spearman's rho of the probes' validation losses and the variants' own is below `correlation`, over
    the first of these or over all that went on, the rule is off and every variant is trained.
    """

    title: ClassVar[str] = "screen"
    train: Changes
    keep: Annotated[float, Range(above=0, below=1)] = 0.5
    calibrate: Annotated[int, Range(min=4)] = 6
    audit: Annotated[float, Range(min=0, below=1)] = 0.25
    correlation: Annotated[float, Range(min=0, below=1)] = 0.5

    def record(self) -> dict[str, Any]:
        """What the store keeps of it."""
        numbers = {name: getattr(self, name) for name in ("keep", "calibrate", "audit", "correlation")}
        return {"train": {setting.path: setting.node.plain() for setting in self.train.settings}, **numbers}
