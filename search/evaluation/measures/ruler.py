"""Questions about facts that are hidden in a long text, by kind and by the length of the text: after RULER."""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from archlab.arch_dsl.language.spec import Count, Range
from archlab.search.data.dataset import Dataset
from archlab.search.data.documents.draws import Draw, Ints
from archlab.search.data.sources.questions import MOST, TASKS, Task, question
from archlab.search.evaluation.family import About, Found, Grid, Measure, Subject
from archlab.search.evaluation.measures.needle import SCORES, no_room, no_text, read_lengths, scores

_SEED = 2  # of the words and numbers, the same for all trials
_KEPT = ("exact", "chosen")


class Prompt(NamedTuple):
    """The tokens of a question: the facts, what is asked, the answers (the right one first), and the share of the text
    that is before each fact, in order."""

    facts: list[Ints]
    asked: Ints
    answers: list[Ints]
    depths: npt.NDArray[np.float64]

    @property
    def length(self) -> int:
        """Tokens that a model reads at least, an end of a document before them: all but the last."""
        return sum(map(len, self.facts)) + len(self.asked) + max(map(len, self.answers))

    def rows(self, hay: Ints, eod: int, hide: bool = True) -> list[tuple[Ints, int]]:
        """The prompt with each answer, and the length of that answer."""
        read, before = [np.array([eod])], 0
        for fact, place in zip(self.facts, np.round(self.depths * len(hay)).astype(int), strict=True):
            read += [hay[before:place], *([fact] if hide else [])]
            before = place
        start = np.concatenate([*read, hay[before:], self.asked])
        return [(np.concatenate([start, answer]), len(answer)) for answer in self.answers]


@Measure.register("ruler")
class Ruler(Measure):
    """Questions of several kinds about facts hidden in text of the test set (after RULER, arXiv:2404.06654).

    `tasks`: `one` fact; one of several (`keys`); two about one thing (`values`); two of several (`queries`); the last
    of a chain of `variables`; the commonest of a list of `words`. Facts stand at random places, the same for all
    trials. `lengths` are all that a model reads, in tokens (four up to the recipe's context without it), `samples`
    texts of each length and task. `exact` is the share where greedy decoding gives the whole answer, `chosen` that
    where of `answers` the right one is the likeliest; both as means over tasks, by task, by length, and as a grid.
    `floor` is `chosen` without the facts, `ceiling` with nothing else in the text, `chance` 1 / answers.
    """

    main: ClassVar[str] = "tasks"
    in_all: ClassVar[bool] = False
    tasks: tuple[Task, ...] = TASKS
    lengths: tuple[Count, ...] = ()
    samples: Count = 8
    answers: Annotated[int, Range(min=2, max=MOST)] = MOST

    @property
    def label(self) -> str:
        said = [] if self.tasks == TASKS else list(self.tasks)
        counts = {"samples": 8, "answers": MOST}
        own = [f"{name[0]}{getattr(self, name)}" for name, usual in counts.items() if getattr(self, name) != usual]
        return "_".join([self.type, *said, *map(str, self.lengths), *own])

    def refusal(self, about: About) -> str | None:
        if why := no_text(about):
            return why
        if not self.tasks:
            return "there are no tasks"
        return no_room(about, self.lengths, self._needed(about.dataset))

    def prompts(self, dataset: Dataset, task: Task) -> list[Prompt]:
        """One for each sample."""
        found = []
        for index in range(self.samples):
            draw = Draw(_SEED, index * len(TASKS) + TASKS.index(task))
            own = question(draw, task, self.answers)
            depths = np.sort(draw.uniforms(len(own.facts)))
            texts = [text.encode() for text in (own.asked, *own.answers, *own.facts)]
            asked, *others = (tokens.astype(np.int64) for tokens in dataset.codec.encode(texts))
            found.append(Prompt(others[self.answers :], asked, others[: self.answers], depths))
        return found

    def _needed(self, dataset: Dataset) -> int:
        """Tokens that the longest question takes."""
        return max(prompt.length for task in self.tasks for prompt in self.prompts(dataset, task))

    def compute(self, subject: Subject) -> Found:
        about = subject.about
        stream, eod = about.dataset.split("test"), about.dataset.eod
        lengths = read_lengths(about, self.lengths, self._needed(about.dataset))
        starts = np.linspace(0, len(stream) - lengths[-1], self.samples).astype(np.int64)
        model = subject.at(max(lengths[-1], about.recipe.context))
        prompts = {task: self.prompts(about.dataset, task) for task in self.tasks}

        def scored(task: Task, length: int, hide: bool = True) -> npt.NDArray[np.float64]:
            rows = []
            for prompt, start in zip(prompts[task], starts, strict=True):
                hay = stream[start : start + max(length - prompt.length, 0)].astype(np.int64)
                rows += prompt.rows(hay, eod, hide)
            return scores(subject, model, rows, self.answers)

        cells = np.array([[scored(task, length) for task in self.tasks] for length in lengths])
        floors = [scored(task, lengths[-1], hide=False)[1] for task in self.tasks]
        ceilings = [scored(task, 0)[1] for task in self.tasks]
        values: dict[str, float] = {"floor": np.mean(floors), "ceiling": np.mean(ceilings), "chance": 1 / self.answers}
        grids, tasks = {}, list[str](self.tasks)
        for name in _KEPT:
            found = cells[..., SCORES.index(name)]
            values[name] = found.mean()
            values |= {f"{name}_{length}": mean for length, mean in zip(lengths, found.mean(1), strict=True)}
            values |= {f"{task}_{name}": mean for task, mean in zip(self.tasks, found.mean(0), strict=True)}
            grids[f"{self.label}_{name}"] = Grid(lengths, tasks, "length", "task", found.tolist(), self.samples)
        values |= {f"{task}_ceiling": value for task, value in zip(self.tasks, ceilings, strict=True)}
        return Found({f"{self.label}_{name}": float(value) for name, value in values.items()}, grids=grids)
