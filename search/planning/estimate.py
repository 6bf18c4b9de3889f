"""How long a study would take, from what this store has measured, else from a matrix product timed now; its memory."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archlab.arch_dsl.language.errors import SpecError
from archlab.search.hardware.facts import usable_gpus
from archlab.search.planning.plan import Plan
from archlab.search.recipe.curve import CURVE_POINTS, curve_windows
from archlab.search.store.roles import ROLE
from archlab.search.store.store import Store
from archlab.search.training.step_times import step_time_key
from archlab.search.variants.memory import memory_bytes
from archlab.search.variants.variant import Variant

_SHARE = 0.25  # of the rate of a large matrix product that small models reach, where nothing was measured
_LIBRARIES = 300_000_000  # bytes that torch maps for itself alone
_START_S = 3.0  # a trial's process: its imports, its model


@dataclass(frozen=True)
class Estimate:
    """`core_s` of training and evaluation, `evaluate_s` of the latter alone, `wall_s` on `slots` cores, where the rate
    comes from, the memory of the largest trial."""

    core_s: float
    evaluate_s: float
    wall_s: float
    slots: int
    source: str
    memory_bytes: int


def estimate(plan: Plan, root: Path, slots: int, done: int = 0) -> Estimate:
    """The time of the trials that are left when `done` have a result; training takes three forward passes' FLOPs, the
    evaluation of its held-out text one."""
    saved = plan.study.tune.saved if plan.study.tune else 0.0
    more = sum(each.worth(plan) - each.proposed(len(plan.seeds)) for each in plan.study.sections)
    per_variant = (plan.trials - len(plan.beside) + more) / len(plan.variants) - saved
    probes = sum(3 * p.flops_per_token * p.recipe.all_tokens for p in plan.beside)
    left = 1 - done / plan.trials
    if steps := _step_times(plan, root):
        each_s = sum(v.recipe.all_steps * s for v, s in zip(plan.variants, steps, strict=True))
        once = sum(3 * v.flops_per_token * v.recipe.all_tokens for v in plan.variants)
        train_s = each_s * (per_variant + probes / once)
        rate = once / each_s
        source = "the first steps of every variant, measured here"
    else:
        rate, source = _rate(root)
        flops = sum(3 * v.flops_per_token * v.recipe.all_tokens * per_variant for v in plan.variants)
        train_s = (flops + probes) / rate
    evaluate_s = sum(v.flops_per_token * _held_out_tokens(v) for v in plan.variants) * per_variant / rate
    core_s = (train_s + evaluate_s + _START_S * plan.trials) * left
    return Estimate(core_s, evaluate_s * left, core_s / slots, slots, source, max(map(memory_bytes, plan.variants)))


def _held_out_tokens(variant: Variant) -> int:
    """Tokens on which a trial is evaluated: validation and test at its end, and a few windows along its curve; 0 where
    the data have yet to be downloaded."""
    dataset = variant.stages[-1].dataset if variant.stages else variant.dataset
    if dataset.absent:
        return 0
    curve = CURVE_POINTS * curve_windows(variant.recipe) * variant.recipe.context
    return dataset.tokens["validation"] + dataset.tokens["test"] + curve


def refuse_too_little(plan: Plan) -> None:
    """Raises SpecError where `resources.memory` is surely less than a variant takes on a CPU, a row at a time."""
    resources = plan.study.resources
    if resources.memory is None or resources.world > 1 or (usable_gpus() if resources.gpus is None else resources.gpus):
        return
    least = {variant.name: memory_bytes(variant, rows=1) + _LIBRARIES for variant in plan.variants}
    name = max(least, key=least.__getitem__)
    if resources.memory.bytes < least[name]:
        message = f"{name} takes {least[name] / 1e9:.2g} GB at least, {_LIBRARIES / 1e9:g} GB of them for torch"
        found = f"found {resources.memory.bytes / 1e9:.2g} GB"
        raise SpecError.of("resources.memory", f"{message}; {found}", resources.mark("memory") or resources.mark())


def _step_times(plan: Plan, root: Path) -> list[float]:
    """Seconds of an optimizer step of every variant, where the store remembers those of all; else []."""
    if not (root / "store.json").exists():
        return []
    cpus, parallel = plan.study.resources.cpus, str(plan.study.resources.parallel)
    with Store.open(root, create=False) as store:
        found = [store.recall("step_time", step_time_key(variant.timed, cpus, parallel)) for variant in plan.variants]
    return [each["seconds"] for each in found] if all(found) else []


def _rate(root: Path) -> tuple[float, str]:
    """FLOP/s of one core, and how it is known."""
    if (root / "store.json").exists():
        with Store.open(root, create=False) as store:
            records = store.records().items()
            measured = [rate for name, record in records for rate in _measured(store, name, record)]
        if measured:
            return statistics.median(measured), f"the median of {len(measured)} finished trials in this store"
    return _SHARE * _product_rate(), f"{_SHARE:.0%} of a matrix product timed now; finished trials will make it better"


def _measured(store: Store, study: str, record: dict[str, Any]) -> list[float]:
    """FLOP/s of each complete trial of a variant, one that has two roles once."""
    flops = {variant["name"]: variant["flops_per_token"] for variant in record["variants"]}
    rows = {row["key"]: row for row in store.study_trials(study) if row["role"] != ROLE}
    return [
        3 * flops[row["variant"]] * row["result"]["tokens_per_s"]
        for row in rows.values()
        if row["state"] == "complete" and row["variant"] in flops and row["result"].get("tokens_per_s")
    ]


def _product_rate(size: int = 512, repeats: int = 8) -> float:
    """FLOP/s of a square float32 matrix product on one thread, in some 50 ms of the time that it has a core."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.ones(size, size)
        a @ a
        started = time.thread_time()  # others may have the core meanwhile
        for _ in range(repeats):
            a @ a
        return 2 * size**3 * repeats / (time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
