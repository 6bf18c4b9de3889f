"""archlab: studies of language-model architectures, from a YAML file to the table of a paper.

    import archlab

    study = archlab.load_study("study.yaml")
    archlab.show(study, "gated")    # a variant as a tree, with parameters and FLOPs; also a model alone
    archlab.plan(study).frame()     # what would run: a row for each variant; trains nothing
    archlab.calibrate(study)        # finds the recipe that suits its model, text and time
    archlab.run(study)              # trains what is missing
    archlab.challenge(study, ideas) # holds changes against its champion, and keeps what is better
    archlab.compare(study).table    # the table as a data frame
    print(archlab.report(study))    # the table as `archlab report` prints it
    archlab.figures(study)          # its figures; a notebook shows them

Models: `Model`, `load`, `patch`, `resolve`, `cost`, `diff`, `identity`, `compile`, `to_python`, `zoo`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archlab.api import calibrate, challenge, compare, figures, load_study, plan, report, run, show
    from archlab.arch_dsl import (
        Call,
        Model,
        SpecError,
        compile,
        cost,
        diff,
        dump,
        identity,
        load,
        patch,
        resolve,
        to_python,
        zoo,
    )

_STUDIES = ("calibrate", "challenge", "compare", "figures", "load_study", "plan", "report", "run", "show")
_MODELS = (
    "Call",
    "Model",
    "SpecError",
    "compile",
    "cost",
    "diff",
    "dump",
    "identity",
    "load",
    "patch",
    "resolve",
    "to_python",
    "zoo",
)

__all__ = [
    "Call",
    "Model",
    "SpecError",
    "calibrate",
    "challenge",
    "compare",
    "compile",
    "cost",
    "diff",
    "dump",
    "figures",
    "identity",
    "load",
    "load_study",
    "patch",
    "plan",
    "report",
    "resolve",
    "run",
    "show",
    "to_python",
    "zoo",
]


def __getattr__(name: str) -> Any:
    """Each name is imported when it is first asked for: the parts below this door load without torch and Ray."""
    if name in _STUDIES:
        return getattr(import_module("archlab.api"), name)
    if name in _MODELS:
        return getattr(import_module("archlab.arch_dsl"), name)
    raise AttributeError(f"module 'archlab' has no attribute '{name}'")


def __dir__() -> list[str]:
    """For completion."""
    return [*globals(), *__all__]
