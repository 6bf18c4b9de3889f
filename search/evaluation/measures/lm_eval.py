"""Downstream tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ClassVar

from archlab.arch_dsl.compiler.generation import Sampling
from archlab.arch_dsl.compiler.shapes import shapes_of
from archlab.arch_dsl.language.errors import Problem, nearest, shorten, unknown
from archlab.arch_dsl.language.parse import INVALID
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, NotNegative, Range, added
from archlab.search.evaluation.downstream.suites import SUITES
from archlab.search.evaluation.downstream.task_files import config, digest, is_path, task_files
from archlab.search.evaluation.family import About, Found, Measure, Subject

INSTALL = "pip install 'archlab[lm-eval]'"
Share = Annotated[float, Range(above=0, max=1)]


@Measure.register("lm_eval")
class LmEval(Measure):
    """Tasks as lm-evaluation-harness makes, filters and scores them (arXiv:2405.14782): `tasks` by its names, or task
    files and folders of one's own; `suite` stands for those of a paper's table.

    `shots` examples stand before a question (the task's own number without it), the first `limit` documents are asked,
    the model reads `context` tokens at most. With several `samples` each answer that is generated is drawn so often, at
    `temperature`, `top_k` and `top_p`, and pass@k and maj@k are told for the k of `pass_at` and `maj_at`. `run_code`
    has the programs that a task asks for run, in a sandbox.
    """

    main: ClassVar[str] = "tasks"
    in_all: ClassVar[bool] = False
    tasks: tuple[str, ...] = added(default=())
    suite: str | None = added(default=None)
    shots: Annotated[int, Range(min=0)] | None = added(default=None)
    limit: Count | None = added(default=None)
    context: Count | None = added(default=None)
    samples: Count = added(default=1)
    pass_at: tuple[Count, ...] = added(default=())
    maj_at: tuple[Count, ...] = added(default=())
    temperature: NotNegative | None = added(default=None)
    top_k: Count | None = added(default=None)
    top_p: Share | None = added(default=None)
    run_code: bool = added(default=False)

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        found = super().parse_node(node, path, problems)
        if found is INVALID:
            return found
        marks = node.value if isinstance(node.value, dict) else {}
        wrong = [*found._mistakes()]
        for name, message in wrong:
            problems.append(Problem(f"{path}.{name}", message, marks[name].mark if name in marks else node.mark))
        base = Path(node.mark.file).absolute().parent if node.mark and Path(node.mark.file).is_file() else Path.cwd()
        tasks = tuple(str(base / Path(task).expanduser()) if is_path(task) else task for task in found.tasks)
        return INVALID if wrong else replace(found, tasks=tasks)

    def _mistakes(self) -> Iterator[tuple[str, str]]:
        """Fields that make no sense together."""
        if self.suite is not None and self.suite not in SUITES:
            yield "suite", unknown(self.suite, "suite", list(SUITES))
        if not self.tasks and self.suite is None:
            yield "tasks", f"names no task; `tasks` or a `suite` ({', '.join(SUITES)})"
        if twice := [task for place, task in enumerate(self.tasks) if task in self.tasks[:place]]:
            yield "tasks", f"names {twice[0]} twice"
        if self.samples > 1 and self.temperature == 0:
            yield "temperature", "at 0 all samples are the same"
        for name in ("pass_at", "maj_at"):
            if any(k > self.samples for k in getattr(self, name)):
                yield name, f"asks for more than the {self.samples} samples that are drawn"

    @cached_property
    def asked(self) -> tuple[str, ...]:
        """All tasks, each once."""
        return tuple(dict.fromkeys([*(SUITES[self.suite].tasks if self.suite else ()), *self.tasks]))

    @property
    def label(self) -> str:
        own = [self.suite] if self.suite else []
        return "_".join(["lm_eval", *own, *map(_short, self.tasks)]) + self._end

    @property
    def _end(self) -> str:
        """What tells its numbers from those of the same tasks with other options."""
        told: dict[str, float | None] = {"shots": self.shots, "limit": self.limit, "context": self.context}
        told |= {"samples": self.samples if self.samples > 1 else None, "t": self.temperature}
        told |= {"top_k": self.top_k, "top_p": self.top_p}
        return "".join(f"_{name}_{value:g}" for name, value in told.items() if value is not None)

    def digest(self, data: str) -> str:
        """As every measure's; a task of one's own counts by what its files hold, not by where they lie."""
        told = [f"{_short(task)} {_held(task)}" if is_path(task) else task for task in self.tasks]
        return Measure.digest(replace(self, tasks=tuple(told)), data)

    def refusal(self, about: About) -> str | None:
        from archlab.search.evaluation.downstream.text_model import not_continued

        if why := not_continued(about):
            return why
        if self.context is not None and self.context > about.recipe.context:
            longer = about.long(self.context)
            if longer != about.model and shapes_of(longer) != shapes_of(about.model):
                return f"its table of positions ends before windows of {self.context} tokens do"
        if importlib.util.find_spec("lm_eval") is None:
            return f"needs lm-evaluation-harness: {INSTALL}"
        return self._unfit

    @cached_property
    def _unfit(self) -> str | None:
        """What is wrong with the tasks, of which nothing is run to find out."""
        from archlab.search.evaluation.downstream import harness

        for task in self.asked:
            try:
                if is_path(task):
                    if groups := [file for file in task_files(Path(task)) if "group" in config(file)]:
                        return f"{groups[0]} is a group of tasks; name the tasks, or the folder of their files"
                    digest(Path(task))
                elif task not in harness.names():
                    return _no_task(task, harness.names())
                said = harness.says(task)
            except ValueError as error:
                return str(error)
            if not said:
                return f"{task} holds no task: no file says `task:`"
            if not self.run_code and any(each.get("unsafe_code") for each in said):
                return f"{_short(task)} runs programs that the model writes; `run_code: true` allows it"
        return None

    def compute(self, subject: Subject) -> Found:
        from archlab.search.evaluation.downstream import harness
        from archlab.search.evaluation.downstream.several_answers import several
        from archlab.search.evaluation.downstream.text_model import text_model

        if self.run_code:
            os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # else the harness's own code tasks can't be loaded
        text = text_model(subject, self.context or subject.about.recipe.context)
        model = harness.HarnessModel(text)
        with harness.quiet(), harness.awake(subject.tick):
            tasks, groups, asked = self._loaded()
            drawn = {name: task for name, task in tasks.items() if self._is_drawn(task)}
            told = {}
            for name, task in drawn.items():
                told[name] = several(model, task, self.limit, self.samples, self._sampling, self._ks, self._majorities)
            if rest := {name: task for name, task in tasks.items() if name not in drawn}:
                told |= harness.results(model, rest, {} if drawn else groups, self.limit)
        shown = dict.fromkeys(each for names in asked.values() for each in names if each in told) or told
        values = {f"{name}_{metric}{self._end}": value for name in shown for metric, value in told[name].items()}
        return Found(values | self._average(told))

    def _loaded(self) -> Any:
        """The tasks with their data. Raises RuntimeError where these can't be had: nothing else is to blame for it."""
        from archlab.search.evaluation.downstream import harness

        try:
            return harness.load(self.asked, self.shots)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            raise RuntimeError(f"the data of {', '.join(self.asked)} can't be had: {error}") from error

    @property
    def facts(self) -> dict[str, str]:
        return {"lm-eval": version("lm-eval")}

    def _is_drawn(self, task: Any) -> bool:
        code = bool(getattr(task.config, "unsafe_code", False))
        if code and not self.run_code:
            raise ValueError(f"{task.config.task} runs programs that the model writes; `run_code: true` allows it")
        return code or (self.samples > 1 and task.OUTPUT_TYPE == "generate_until")

    @property
    def _sampling(self) -> Sampling | None:
        """As asked; None leaves it to the task, unless several samples need a temperature."""
        if self.temperature is None and self.top_k is None and self.top_p is None and self.samples == 1:
            return None
        default = 1.0 if self.samples > 1 or self.top_k or self.top_p else 0.0
        return Sampling(default if self.temperature is None else self.temperature, self.top_k, self.top_p)

    @property
    def _ks(self) -> tuple[int, ...]:
        return self.pass_at or tuple(dict.fromkeys((1, self.samples)))

    @property
    def _majorities(self) -> tuple[int, ...]:
        return self.maj_at or ((self.samples,) if self.samples > 1 else ())

    def _average(self, told: dict[str, dict[str, float]]) -> dict[str, float]:
        """The mean of the accuracies over which the table of a suite averages, if all are known."""
        if self.suite is None:
            return {}
        averaged = SUITES[self.suite].averaged
        known = [told[task][metric] for task, metric in averaged.items() if metric in told.get(task, {})]
        whole = known and len(known) == len(averaged)
        return {f"{self.suite}_avg{self._end}": sum(known) / len(known)} if whole else {}


def _no_task(task: str, known: list[str]) -> str:
    """The harness has thousands; the nearest one is named, and how a file would be."""
    hint = f"; did you mean '{meant}'?" if (meant := nearest(task, known)) else ""
    files = "; a file or a folder has a '/' in its name"
    return f"'{shorten(task)}' is none of the {len(known):,} tasks of lm-evaluation-harness{hint}{files}"


def _short(task: str) -> str:
    return Path(task).stem if is_path(task) else task


def _held(task: str) -> str:
    """The hash of a task's files; without them nothing is known of it."""
    try:
        return digest(Path(task))
    except (OSError, ValueError):
        return "gone"
