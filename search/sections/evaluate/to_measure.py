"""What a plan says of measuring: what is missing of finished trials, what is lost, and the disk that weights take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from archlab.search.evaluation.measures import Measure, Measures
from archlab.search.sections.evaluate.wanted import about_of, standing, wanted, without_weights
from archlab.search.store.store import Store

if TYPE_CHECKING:
    from archlab.search.variants.asks import Planned

_FLOAT32 = 4  # bytes; weights are kept so under bf16 too


@dataclass(frozen=True)
class ToMeasure:
    """`measures`: those that take the final weights and mean something for a variant. `missing`: how many findings of
    `trials` finished trials are not known yet. `lost`: the sentence about those whose weights are gone.
    `weights_bytes`: of all trials together."""

    measures: tuple[str, ...]
    missing: int
    trials: int
    lost: tuple[str, ...]
    weights_bytes: int

    def lines(self) -> Iterator[str]:
        """For people."""
        if self.measures:
            yield f"then measured, from the final weights of the trials in the table: {', '.join(self.measures)}"
        if self.missing:
            yield (
                f"{self.missing} of these are missing for {self.trials} finished trial{'s' * (self.trials > 1)}: "
                "archlab run evaluates them and trains nothing for it"
            )
        yield from self.lost
        if self.weights_bytes:
            megabytes = f"{self.weights_bytes / 1e6:,.1f} MB"
            yield f"final weights take about {megabytes} of disk; keep: {{final: false}} keeps none"
        else:
            yield "no final weights are kept: nothing more can be measured of a trial once it has ended"


def to_measure(evaluate: Measures, planned: Planned, root: Path) -> ToMeasure:
    """What a plan would measure, given what its store has. Evaluates nothing."""
    mean = sum(variant.parameters for variant in planned.variants) / len(planned.variants)
    kept = round(_FLOAT32 * mean * planned.trials) if planned.study.keep.final else 0
    names = tuple(measure.label for measure in _meant(evaluate, planned, root))
    if not names or not (root / "store.json").exists():
        return ToMeasure(names, 0, 0, (), kept)
    with Store.open(root, create=False) as store:
        missing = wanted(store, evaluate, standing(planned.record(), planned.known(store)))
    can = [each for each in missing if each.why is None]
    count = sum(len(each.measures) for each in can)
    return ToMeasure(names, count, len(can), tuple(without_weights(missing)), kept)


def _meant(evaluate: Measures, planned: Planned, root: Path) -> list[Measure]:
    """The measures of a study that a variant does not refuse, in its order; all while data are absent."""
    evaluated = evaluate.evaluated
    refused = [] if planned.absent else evaluated
    for variant in planned.variants if evaluated and not planned.absent else ():
        about = about_of(variant.trial(0), root / "data")
        refused = [measure for measure in refused if measure.refusal(about)]
    return [measure for measure in evaluated if measure not in refused]
