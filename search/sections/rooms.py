"""The sections that there are: a folder with a spec.py and a told.py, or one file with both, beside this one."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from archlab.search import sections
from archlab.search.results.selection import Selection, choose, group
from archlab.search.results.told import Told

_ORDER = (
    "calibration",
    "recipes",
    "design",
    "published",
    "tune",
    "screen",
    "search",
    "ladder",
    "evaluate",
)  # of a report; others come last


def told_of(record: dict[str, Any]) -> list[Told]:
    """What sections tell of a study's record, in the order of a report.

    One that is a single file has its spec there too, which needs torch: it is imported where the record has its key.
    """
    for name, is_folder in files().items():
        if is_folder or record.get(name):
            import_module(f"{sections.__name__}.{name}{'.told' if is_folder else ''}")
    return sorted(Told.known.values(), key=lambda told: [*_ORDER, told.key].index(told.key))


@cache
def files() -> dict[str, bool]:
    """Every file that may tell something by its name, and whether it is a folder with a told.py."""
    here = sections.__name__
    names = {each.name: each.ispkg for each in iter_modules(sections.__path__) if f"{here}.{each.name}" != __name__}
    return {name: folder for name, folder in names.items() if not folder or find_spec(f"{here}.{name}.told")}


def import_specs() -> None:
    """Has every section entered that a study file may have."""
    for each in iter_modules(sections.__path__):  # this file too, which is there already
        name = f"{sections.__name__}.{each.name}"
        if not each.ispkg or find_spec(f"{name}.spec"):
            import_module(f"{name}.spec" if each.ispkg else name)


def select(record: dict[str, Any], trials: list[dict[str, Any]]) -> list[Selection]:
    """The choice for each variant of a study, in its order: the lowest validation loss wins, a diverged one never.

    What a section of the record leaves out misses nothing.
    """
    grouped = group(trials)
    found = [choose(record, v["name"], grouped.get(v["name"], [])) for v in record["variants"]]
    gone = {name for told in told_of(record) if record.get(told.key) for name in told.left_out(record, trials)}
    return [each.gone() if each.variant in gone else each for each in found]
