"""What of `evaluate:` a finished trial lacks, and what a plan says of it: what is missing, what is lost, the disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.evaluation.measures import About, Measure, Measures
from archlab.search.sections.rooms import select
from archlab.search.store.findings import sound
from archlab.search.store.store import Store
from archlab.search.trial import checkpoint
from archlab.search.trial.trial import Trial
from archlab.search.utils.canonical import canonical_json

if TYPE_CHECKING:
    from archlab.search.variants.asks import Planned

_FLOAT32 = 4  # bytes; weights are kept so under bf16 too
_NAMED = 5  # trials that a sentence names


@dataclass(frozen=True)
class Wanted:
    """A trial that finished with `step`, and those of the measures that are not known of it. `why` it cannot be
    evaluated, if so."""

    key: str
    variant: str
    seed: int
    data: str
    step: int
    measures: tuple[Measure, ...]
    why: str | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant} seed {self.seed}"


def without_weights(missing: Sequence[Wanted]) -> list[str]:
    """Of which trials something is missing that cannot be measured any more, in a sentence, if of any."""
    lost = [each.name for each in missing if each.why is not None]
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    told = f"not measured, as their weights are not kept any more: {', '.join(lost[:_NAMED])}{more}"
    return [f"{told}; they are never trained anew for it"] if lost else []


def standing(record: dict[str, Any], trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The finished trials that stand in the table of a study, each once: those that are measured."""
    chosen = (trial for selection in select(record, trials) for trial in selection.complete.values())
    return list({trial["key"]: trial for trial in chosen}.values())


def wanted(
    store: Store, measures: Iterable[Measure], trials: Iterable[dict[str, Any]], again: bool = False
) -> list[Wanted]:
    """What is missing of these measures, by trial, or with `again` all of it, but for what means nothing there."""
    evaluated = [measure for measure in measures if not measure.in_result]
    if not evaluated:
        return []
    rows, found = list(trials), []
    keys = [row["key"] for row in rows]
    known, ended = sound(store, keys), store.known(keys)
    for row in rows:
        trial = Trial.from_json(store.spec(row["key"]))
        stages = (stage["prepared"] for stage in trial.recipe.get("stages", ()) if stage.get("prepared"))
        data = [trial.data, *stages][-1]  # what the last stage was tested on
        have = set() if again else known.get(row["key"], set())
        mine = [measure for measure in evaluated if measure.digest(data) not in have]
        if not mine:
            continue
        about = about_of(trial, store.root / "data")
        if mine := [measure for measure in mine if not measure.refusal(about)]:
            step = ended[row["key"]]["result"]["step"]
            kept = checkpoint.path_of(store.trial_folder(row["key"]), step).exists()
            why = None if kept else "its weights are not kept any more"
            found.append(Wanted(row["key"], row["variant"], row["seed"], data, step, tuple(mine), why))
    return found


def about_of(trial: Trial, data_root: Path) -> About:
    """What a trial ended as, read once for all seeds."""
    return _about(canonical_json([trial.model, trial.recipe, trial.data]), data_root)


@lru_cache(maxsize=64)
def _about(text: str, data_root: Path) -> About:
    model, recipe, data = json.loads(text)
    return About.of(Trial(model, recipe, data, 0), data_root)


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
    refused = [] if planned.absent else evaluate.evaluated  # by every variant
    for variant in planned.variants if refused else ():
        about = about_of(variant.trial(0), root / "data")
        refused = [measure for measure in refused if measure.refusal(about)]
    names = tuple(measure.label for measure in evaluate.evaluated if measure not in refused)
    if not names or not (root / "store.json").exists():
        return ToMeasure(names, 0, 0, (), kept)
    with Store.open(root, create=False) as store:
        missing = wanted(store, evaluate, standing(planned.record(), planned.known(store)))
    can = [each for each in missing if each.why is None]
    findings = sum(len(each.measures) for each in can)
    return ToMeasure(names, findings, len(can), tuple(without_weights(missing)), kept)
