"""search: how models are compared. Its door is `load_study`, `plan`, `run`, `report` and `compare`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from search.api import compare, load_study, plan, report, run

__all__ = ["compare", "load_study", "plan", "report", "run"]


def __getattr__(name: str) -> Any:
    """The trial table and the lock are used without torch and Ray, so nothing heavy is imported here."""
    if name in __all__:
        return getattr(import_module("search.api"), name)
    raise AttributeError(f"module 'search' has no attribute '{name}'")


def __dir__() -> list[str]:
    """For completion."""
    return [*globals(), *__all__]
