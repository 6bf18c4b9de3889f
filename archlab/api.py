"""The Python side of the command line: the same verbs, returning studies, plans, summaries and data frames."""

from __future__ import annotations

from pathlib import Path

from search.comparison import load_comparison
from search.comparison_result import Comparison
from search.planning import Plan
from search.planning import plan as _plan
from search.reporting import report
from search.running import run, store_root
from search.store import Store
from search.study import Study
from search.study_load import load_study

__all__ = ["compare", "load_study", "plan", "report", "run"]


def plan(study: Study | str | Path, store: str | Path | None = None, *, allow_plugins: bool = False) -> Plan:
    """What a study would run; `.frame()` has a row per variant. Trains nothing. Raises SpecError."""
    loaded = study if isinstance(study, Study) else load_study(study, allow_plugins=allow_plugins)
    return _plan(loaded, store_root(store).absolute() / "data")


def compare(study: Study | str, store: str | Path | None = None) -> Comparison:
    """The aggregated frames of a stored study: `.table`, `.rates`, `.trials`. Raises StoreError if it was never run."""
    name = study.study if isinstance(study, Study) else study
    with Store.open(store_root(store), create=False) as opened:
        return load_comparison(opened, name)
