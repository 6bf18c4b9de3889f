"""A study is a question: a base model, variants of it, a recipe, and how they are compared. This is its file."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import ClassVar

from arch_dsl.model import Model
from arch_dsl.spec import Spec
from search.ablate import Ablate
from search.budget import Budget
from search.design import Design
from search.goals import Search
from search.keep import Keep
from search.ladder import Ladder
from search.match import Match
from search.measures import Measures, Perplexity
from search.prune import Pruner
from search.published_options import Published
from search.recipe import Recipe
from search.resources import Resources
from search.screen import Screen
from search.seeds import Seeds
from search.space import Space
from search.study_values import AtScale, Axis, Patch
from search.tune import Tune


class ReportOptions(Spec):
    """How results are shown: the variant that the others are compared with, and the table of a paper beside ours."""

    title: ClassVar[str] = "report"
    baseline: str = "baseline"
    published: Published | None = None


class Study(Spec):
    """A question and everything that answering it takes."""

    title: ClassVar[str] = "study"
    study: str
    question: str = ""
    plugins: tuple[str, ...] = ()
    scale: str | None = None
    scales: dict[str, AtScale] = field(default_factory=dict)
    model: Model
    ablate: Ablate | None = None
    components: dict[str, Patch] = field(default_factory=dict)
    design: Design | None = None
    variants: dict[str, Patch] = field(default_factory=dict)
    grid: dict[str, Axis] = field(default_factory=dict)
    ladder: Ladder | None = None
    match: Match | None = None
    train: Recipe
    tune: Tune | None = None
    seeds: Seeds = 3
    evaluate: Measures = Measures((Perplexity(),))
    search: Search | None = None
    space: Space | None = None
    screen: Screen | None = None
    prune: Pruner | None = None
    keep: Keep = Keep()
    budget: Budget = Budget()
    report: ReportOptions = ReportOptions()
    resources: Resources = Resources()

    @property
    def file(self) -> Path | None:
        """The file it came from."""
        mark = self.mark()
        return Path(mark.file) if mark else None
