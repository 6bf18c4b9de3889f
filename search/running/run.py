"""Runs a study: plans it, locks it, trains what is missing, and leaves everything in the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from archlab.search.executors.executor import Executor, ResourcesError
from archlab.search.executors.inline import InlineExecutor
from archlab.search.executors.resources import Resources, Room
from archlab.search.planning import auto_settings as settled
from archlab.search.planning.edits import edits
from archlab.search.planning.estimate import refuse_too_little
from archlab.search.planning.plan import Plan, plan
from archlab.search.recipe.curve import tokens_at
from archlab.search.recipe.recipe import load_recipe
from archlab.search.running import smoke as smoking
from archlab.search.running.driver import drive
from archlab.search.running.ending import Summary
from archlab.search.running.measure import measure_study
from archlab.search.sections.prune.decide import Pruning
from archlab.search.sections.seeds.noise import remember_noise
from archlab.search.store import plugins as plugin_files
from archlab.search.store.addresses import store_root
from archlab.search.store.lock import StudyLock, in_use
from archlab.search.store.store import Store, StoreRefused
from archlab.search.study.files import beside_store
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from archlab.search.trackers.shipper import Shipper
from archlab.search.trackers.shipper_process import ShipperProcess
from archlab.search.trial.trial import Trial
from archlab.search.variants.asks import Events, NextRows

ENTRY = "archlab.search.training.train:train"
ONE_CORE = Resources()


def make_executor(
    kind: Literal["ray", "inline"], root: Path, *, resources: Resources = ONE_CORE, address: str | None = None
) -> Executor:
    """What trains the trials: Ray, each trial in pinned processes of its own, or this very process."""
    if kind == "inline":
        if resources.world > 1:
            raise ResourcesError(f"each trial asks for {resources}; without Ray there is this process alone")
        return InlineExecutor(ENTRY, root / "data", resources.checkpoint_s)
    from archlab.search.executors.ray_executor import RayExecutor

    return RayExecutor(ENTRY, root / "data", resources, address)


def slots_at(address: str | None, root: Path, resources: Resources) -> int:
    """Trials that fit at once on a Ray cluster, or on this machine. Raises ResourcesError when not even one does."""
    if address is None:
        return resources.slots([Room.here()])
    workers = make_executor("ray", root, resources=resources, address=address)
    try:
        return workers.slots
    finally:
        workers.close()


def run(
    study: Study | str | Path,
    store: str | Path | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    executor: Literal["ray", "inline"] = "ray",
    address: str | None = None,
    on_event: Events | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    track: bool = True,
    allow_plugins: bool = False,
    smoke: bool = False,
) -> Summary:
    """Trains what is missing of a study and returns how it ended; after an interruption the same call goes on.

    With `smoke` every variant is tried out for a few steps first, and one that cannot run stops the study.

    Raises SpecError for a study that cannot mean anything, StudyLocked while another process runs it, StoreError for
    a store that cannot be used, ResourcesError for more than the machine has.
    """
    if not isinstance(study, Study):
        study = load_study(study, overrides, allow_plugins, store)
    root = store_root(store).absolute()
    with Store.open(root) as opened, in_use(root):
        workers = make_executor(executor, root, resources=study.resources, address=address)
        try:
            here = executor == "ray" and address is None
            options = RunOptions(on_event or (lambda _: None), on_plan, track, smoke, here)
            return run_with(workers, study, opened, options, overrides or {})
        finally:
            workers.close()


@dataclass(frozen=True)
class RunOptions:
    """What a run tells, and asks for beside its trials; `here` is whether they run on this machine, in Ray."""

    tell: Events
    on_plan: Callable[[Plan], None] | None
    track: bool = True
    smoke: bool = False
    here: bool = True
    command: str = ""  # what goes on with it, where that is not `archlab run`


def quiet(tell: Events | None) -> Events:
    """What is told of studies that are parts of one, without what is the same in all, or follows from how they grow."""

    def telling(event: dict[str, Any]) -> None:
        if tell is not None and event["event"] not in ("settled", "edited", "summary"):
            tell(event)

    return telling


def run_with(
    workers: Executor, study: Study, store: Store, options: RunOptions, overrides: Mapping[str, Any] | None = None
) -> Summary:
    """`run` in an open store, by an executor that the caller closes. It raises what `run` does."""
    with StudyLock(store.root, study.study) as lock:
        workers.start()
        data = store.root / "data"
        planned = plan(study, data, smoking.decided(store.root, study.study), fetch=True)
        if options.here:
            refuse_too_little(planned)
        if options.smoke:
            plugin_files.keep(store.root)
            planned = smoking.smoke(planned, store, workers, partial(plan, study, data), options.tell)
        if options.on_plan:
            options.on_plan(planned)
        return _drive(planned, store, workers, lock, options, overrides or {})


def _drive(
    planned: Plan, store: Store, workers: Executor, lock: StudyLock, options: RunOptions, said: Mapping[str, Any]
) -> Summary:
    """Runs a plan in its store, told in events; `said` are the overrides of its study."""
    study, tell = planned.study, options.tell
    next_rows: NextRows = planned.rows
    for section in study.sections:
        next_rows = section.run_rows(next_rows, planned, store, workers.slots, tell)
    plugin_files.keep(store.root)
    record = planned.record() | ({"overrides": dict(said)} if said else {})
    if study.file:
        record["file"] = beside_store(study.file, store.root)
    record |= {"command": options.command} if options.command else {}
    if planned.builder.settled:
        settled.keep(store, study.study, planned.builder.settled)
    news: dict[str, Iterable[str]] = {
        "settled": settled.lines(planned.builder.settled, study.train, [each.recipe for each in planned.variants]),
        "plugin": plugin_files.changed(_earlier(store, study.study), record, store.root),
        "edited": edits(planned, store),
    }
    for kind, lines in news.items():
        for line in lines:
            tell({"event": kind, "message": line})
    planned.hear(store, decide=True)
    record["trials"] = planned.trials
    store.save_study(study.study, record, study.text)
    shipper = Shipper if isinstance(workers, InlineExecutor) else ShipperProcess
    summary = drive(
        store,
        study.study,
        next_rows,
        workers,
        shipper=shipper(store.root, study.study) if options.track else None,
        on_event=lambda event: None if event["event"] == "summary" else tell(event),  # that comes when it is measured
        limits=study.budget,
        tokens_of=tokens_left(store) if study.budget.tokens else None,
        should_prune=Pruning(study.prune, study.study, store) if study.prune else None,
        lock=lock,
        keep=study.keep,
    )
    remember_noise(store, study.study)
    ended = measure_study(store, study, workers, summary, tell, options.track)
    tell({"event": "summary", "exit_code": ended.exit_code, "counts": ended.counts, "message": ended.message})
    return ended


def tokens_left(store: Store) -> Callable[[str, int | None], int]:
    """Tokens that the trial of a key still takes to a step, or to its end, from its newest checkpoint."""
    from archlab.search.trial.checkpoint import steps_in

    def left(key: str, until: int | None) -> int:
        try:
            recipe, folder = load_recipe(Trial.from_json(store.spec(key)).recipe), store.trial_folder(key)
        except StoreRefused:
            return 0  # it is damaged, and will not be started
        done = max(steps_in(folder), default=0) if folder.exists() else 0
        return max(0, tokens_at(recipe, recipe.all_steps if until is None else until) - tokens_at(recipe, done))

    return left


def _earlier(store: Store, name: str) -> dict[str, Any]:
    """The record of the study's last run, {} where there was none, or it is damaged and about to be replaced."""
    return store.records().get(name, {})
