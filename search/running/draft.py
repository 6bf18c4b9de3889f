"""What is wrong with a study that is being written, and what it would run: for an editor, as its text stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.search.data import DataError
from archlab.search.executors.executor import ResourcesError
from archlab.search.planning.estimate import refuse_too_little
from archlab.search.planning.page import plan_sentences
from archlab.search.planning.plan import plan
from archlab.search.running.run import slots_at
from archlab.search.running.smoke import decided
from archlab.search.store.store import StoreError
from archlab.search.study.load import load_study


def draft(text: str, file: str, root: Path) -> dict[str, Any]:
    """name (of the study), problems (each with line, column and message; line 0: of no place) and plan, what
    `archlab plan` says of a text without problems that would be saved as `file` (`plan_sentences`). Trains nothing,
    and executes no plug-in.

    A study that is matched by the time of a step has no plan here: making one would time steps at every letter.
    """
    try:
        study = load_study(file, text=text, store=root)
        if study.match is not None and study.match.kind == "step_time":
            line = f"It is matched by the time of a step, which is measured: archlab plan {file} shows its plan."
            return {"name": study.study, "problems": [], "plan": {"more": "", "variants": [], "lines": [line]}}
        slots = slots_at(None, root, study.resources)
        planned = plan(study, root / "data", decided(root, study.study))
        refuse_too_little(planned)
        told = plan_sentences(planned, root, slots)
    except SpecError as error:
        return {"name": None, "problems": [_told(problem, file) for problem in error.problems], "plan": None}
    except (DataError, ResourcesError, StoreError, OSError) as error:
        return {"name": None, "problems": [{"line": 0, "column": 0, "message": str(error)}], "plan": None}
    return {"name": study.study, "problems": [], "plan": told}


def _told(problem: Problem, file: str) -> dict[str, Any]:
    """A problem with its place in the text that is written; one of an included file says its place itself."""
    here = problem.mark is not None and problem.mark.file == file
    line, column = (problem.mark.line, problem.mark.column) if problem.mark and here else (0, 0)
    message = f"{problem.path}: {problem.message}" if problem.path else problem.message
    message = f"{problem.mark}: {message}" if problem.mark and not here else message
    return {"line": line, "column": column, "message": message}
