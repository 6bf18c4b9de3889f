"""The Python side of the command line: the same verbs, returning studies, plans, summaries and data frames."""

from __future__ import annotations

from pathlib import Path

from archlab.search.calibration.calibrate import calibrate
from archlab.search.comparison.compare import load_comparison
from archlab.search.planning.plan import Plan
from archlab.search.planning.plan import plan as _plan
from archlab.search.reporting.report import report
from archlab.search.results.comparison import Comparison
from archlab.search.running.run import run
from archlab.search.store.addresses import store_root
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from archlab.search.study.study import Study

__all__ = ["calibrate", "compare", "load_study", "plan", "report", "run"]


def plan(study: Study | str | Path, store: str | Path | None = None, *, allow_plugins: bool = False) -> Plan:
    """What a study would run; `.frame()` has a row per variant. Trains nothing. Raises SpecError."""
    loaded = study if isinstance(study, Study) else load_study(study, None, allow_plugins, store)
    return _plan(loaded, store_root(store).absolute() / "data")


def compare(study: Study | str, store: str | Path | None = None) -> Comparison:
    """The aggregated frames of a stored study: `.table`, `.rates`, `.trials`. Raises StoreError if it was never run."""
    name = study.study if isinstance(study, Study) else study
    with Store.open(store_root(store), create=False) as opened:
        return load_comparison(opened, name)
