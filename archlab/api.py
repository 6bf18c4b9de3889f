"""The Python side of the command line: the same verbs, returning studies, plans, summaries and data frames."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from archlab.arch_dsl import Model, load
from archlab.search.calibration.calibrate import calibrate
from archlab.search.challenge.referee import Outcome
from archlab.search.challenge.referee import challenge as _challenge
from archlab.search.challenge.rules import Rules
from archlab.search.comparison.compare import load_comparison
from archlab.search.models.find import model_alone
from archlab.search.models.print_model import Shown, variant_of
from archlab.search.planning.plan import Plan
from archlab.search.planning.plan import plan as _plan
from archlab.search.reporting.report import report as _report
from archlab.search.reporting.shape import Shape
from archlab.search.results.comparison import Comparison
from archlab.search.running import run as _run
from archlab.search.running.ending import Summary
from archlab.search.running.notebook_progress import NotebookProgress, in_notebook
from archlab.search.running.progress import make_progress
from archlab.search.store.addresses import store_root
from archlab.search.store.store import Store, StoreError
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from archlab.tables import send

if TYPE_CHECKING:  # with matplotlib
    from archlab.dashboards.paper.drawing import Drawings

__all__ = ["calibrate", "challenge", "compare", "figures", "load_study", "plan", "report", "run", "show"]


def plan(study: Study | str | Path, store: str | Path | None = None, *, allow_plugins: bool = False) -> Plan:
    """What a study would run; `.frame()` has a row per variant. Trains nothing. Raises SpecError."""
    loaded = study if isinstance(study, Study) else load_study(study, None, allow_plugins, store)
    return _plan(loaded, store_root(store).absolute() / "data")


def run(study: Study | str | Path, store: str | Path | None = None, *, quiet: bool = False, **options: Any) -> Summary:
    """Trains what is missing of a study, and shows how far it is unless `quiet`: in a notebook below the cell, on a
    terminal in place, elsewhere in lines on stderr.

    `options` are those of `archlab.search.running.run.run`: `executor="inline"` trains in this process, `track=False`
    sends nothing to the trackers, `on_event` takes the events in the place of what is shown. It raises what that does.
    """
    told, name = options.pop("on_plan", None), ""
    display = NotebookProgress if in_notebook() else make_progress
    with nullcontext() if quiet or "on_event" in options else display() as progress:

        def begin(planned: Plan) -> None:
            nonlocal name
            name = planned.study.study
            if progress:
                progress.plan(planned.record(), planned.trials)
            if told:
                told(planned)

        if progress:
            options["on_event"] = progress.event
        summary = _run.run(study, store, on_plan=begin, **options)
    if options.get("track", True) and summary.exit_code in (0, 1, 3):  # it came to its end
        send(store_root(store).absolute(), name)
    return summary


def challenge(
    study: Study | str | Path,
    ideas: Mapping[str, Any],
    store: str | Path | None = None,
    *,
    quiet: bool = False,
    executor: Literal["ray", "inline"] = "ray",
    **rules: Any,
) -> Outcome:
    """Holds `ideas`, names and changes as under `variants:`, against a study's champion, and keeps what is better.

    `rules` are those of `archlab.search.challenge.rules.Rules`: `seeds`, `margin`, `false_keeps`,
    `together`, `confirm`, `trials`, `again`.
    The outcome has the `ledger` and, by their names, the `entries` of these ideas, None for one that is not decided.
    It raises what `run` does, and SpecError for an idea that is no change of the champion.
    """
    display = NotebookProgress if in_notebook() else make_progress
    with nullcontext() if quiet else display() as progress:

        def begin(planned: Plan) -> None:
            if progress:
                progress.plan(planned.record(), planned.trials)

        event = progress.event if progress else None
        return _challenge(study, ideas, store, rules=Rules(**rules), executor=executor, on_event=event, on_plan=begin)


def show(
    model: Model | Study | Mapping[str, Any] | str | Path, variant: str | None = None, store: str | Path | None = None
) -> Shown:
    """A model as a tree with shapes, parameters and FLOPs, which a notebook shows: a `Model`, the same as a mapping, a
    file, or a name of the zoo (`gpt2/medium`); of a study a `variant`, or its baseline. Raises SpecError."""
    if isinstance(model, str | Path) and (found := model_alone(str(model))):
        return found
    if isinstance(model, Mapping) and "study" not in model:
        model = load(model)
    if isinstance(model, Model):
        return Shown.alone("model", model)
    planned = plan(model if isinstance(model, Study) else load_study(model, store=store), store)
    wanted = variant_of(planned, variant)
    return Shown.of(wanted, variant_of(planned, wanted.baseline))


def compare(study: Study | str, store: str | Path | None = None) -> Comparison:
    """The aggregated frames of a stored study: `.table`, `.rates`, `.trials`. Raises StoreError if it was never run."""
    name = study.study if isinstance(study, Study) else study
    with Store.open(store_root(store), create=False) as opened:
        return load_comparison(opened, name)


def report(
    found: Comparison | Study | str,
    format: str = "text",
    store: str | Path | None = None,
    *,
    shape: Shape | None = None,
    rates: bool = False,
) -> str:
    """The table of a comparison, or of a stored study, as `archlab.search.reporting.report.report` has it. Raises
    ValueError for an unknown format, StoreError for a study that was never run."""
    return _report(found if isinstance(found, Comparison) else compare(found, store), format, shape, rates)


def figures(study: Study | str, store: str | Path | None = None) -> Drawings:
    """The figures of a stored study by name, as `archlab figures` writes them; a notebook shows them. `rows` of each is
    a frame of the numbers in it, `files(width_inches)` its PDF, SVG and PNG. Raises StoreError if it was never run."""
    from archlab.dashboards.library import Library, NotFound
    from archlab.dashboards.paper.drawing import Drawings
    from archlab.dashboards.paper.pictures import drawings

    name = study.study if isinstance(study, Study) else study
    try:
        found = Library(store_root(store)).study(name)
    except NotFound as error:
        told = ", ".join(error.known) or "none"
        raise StoreError(f"{store_root(store)} has no study {name!r} (known: {told})") from error
    return Drawings({each.name: each for each in drawings(found)})
