"""A study is a question: a base model, variants of it, a recipe, and how they are compared. This is its file."""

from __future__ import annotations

import itertools
from dataclasses import field
from pathlib import Path
from typing import ClassVar

from archlab.arch_dsl.language.spec import Spec, fields_of
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.patching.patch import Setting
from archlab.arch_dsl.tree.identity import dump
from archlab.search.evaluation.measures import Measure, Measures
from archlab.search.executors.resources import Resources
from archlab.search.recipe.recipe import Recipe
from archlab.search.sections.budget.spec import Budget
from archlab.search.sections.contrasts.spec import Contrasts
from archlab.search.sections.design.spec import Design
from archlab.search.sections.design.written_out import Ablate
from archlab.search.sections.ladder.spec import Ladder
from archlab.search.sections.match.spec import Match
from archlab.search.sections.prune.spec import Pruner
from archlab.search.sections.published.spec import Published
from archlab.search.sections.recipes.spec import Recipes
from archlab.search.sections.rooms import import_specs
from archlab.search.sections.screen.spec import Screen
from archlab.search.sections.search.space import Space
from archlab.search.sections.search.spec import Search
from archlab.search.sections.seeds.spec import Seeds
from archlab.search.sections.tune.spec import Tune
from archlab.search.trial.kept_weights import Keep
from archlab.search.variants.patches import AtScale, Axis, Patch, cells_of
from archlab.search.variants.section import Section

_MOST_CELLS = 1000  # whose variants are named


class ReportOptions(Spec):
    """How results are shown: the variant that the others are compared with, the table of a paper beside ours, and other
    differences that are asked for."""

    title: ClassVar[str] = "report"
    baseline: str = "baseline"
    published: Published | None = None
    contrasts: Contrasts | None = None


class Study(Spec):
    """A question and everything that answering it takes.

    `study`: the name under which results are stored. `question`: one sentence, printed above the table.
    `plugins`: Python files with primitives of your own. `scale`: which size of several to run, by default the first.
    `scales`: several sizes of one study in one file. `model`: the base model that every variant changes.
    `ablate`: two models, every difference of which becomes a component. `components`: named changes that several
    variants share. `design`: makes variants from the components, such as all combinations. `variants`: the rows of the
    table, as changes of the model. `grid`: trains every variant with each combination of values. `recipes`: trains all
    variants under each of several recipes. `ladder`: runs every variant at several model sizes. `match`: gives all
    variants equal parameters, FLOPs, cache or step time. `train`: the recipe, as data, tokens, batch, optimizer and
    learning rate. `tune`: chooses a learning rate, or other values, for each variant. `seeds`: repeats of each variant,
    of which an interval needs at least three. `evaluate`: measures of finished trials. `search`: lets Optuna propose
    variants. `space`: what the search may vary. `screen`: ranks variants with a cheap recipe first. `prune`: ends bad
    trials early. `keep`: which weights stay on disk after a trial. `budget`: a limit on time or trials. `report`: the
    baseline of the table, and a paper's table beside it. `resources`: the cores and devices of one trial.
    """

    title: ClassVar[str] = "study"
    study: str
    question: str = ""
    include: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    scale: str | None = None
    scales: dict[str, AtScale] = field(default_factory=dict)
    model: Model
    ablate: Ablate | None = None
    components: dict[str, Patch] = field(default_factory=dict)
    design: Design | None = None
    variants: dict[str, Patch] = field(default_factory=dict)
    grid: dict[str, Axis] = field(default_factory=dict)
    recipes: Recipes | None = None
    ladder: Ladder | None = None
    match: Match | None = None
    train: Recipe
    tune: Tune | None = None
    seeds: Seeds = 3
    evaluate: Measures = Measures((Measure.members["perplexity"](),))
    search: Search | None = None
    space: Space | None = None
    screen: Screen | None = None
    prune: Pruner | None = None
    keep: Keep = Keep()
    budget: Budget = Budget()
    report: ReportOptions = ReportOptions()
    resources: Resources = Resources()
    _others: tuple[Section, ...] = ()  # those of `other_sections` that it has
    _written: str = ""  # the YAML of a study that has no file, or that includes others
    other_keys: ClassVar[tuple[str, ...]] = ()  # their keys, which an error lists

    @property
    def sections(self) -> tuple[Section, ...]:
        """Those of its sections that it has, in the order of the fields."""
        given = (getattr(self, name) for name in fields_of(Study))
        inner = self.report.published, self.report.contrasts
        return tuple(each for each in (*given, *inner, *self._others) if isinstance(each, Section))

    @property
    def axes(self) -> list[list[tuple[str, tuple[Setting, ...]]]]:
        """What every variant is crossed with, the outermost first: for each axis its values, and what they set."""
        grid: list[list[tuple[str, tuple[Setting, ...]]]] = []
        for path in self.grid:
            mark = self.mark(f"grid.{path}")
            cells = cells_of(self.grid, path)
            grid.append([(text, (Setting(path, node, "the grid", mark),)) for text, node in cells])
        return [*(axis for section in self.sections for axis in section.crossing()), *grid]

    @property
    def cells(self) -> list[str]:
        """The names of the variants in all cells, the first of very many; of a ladder's rungs none."""
        if not self.axes or self.ladder:
            return []
        cells = itertools.islice(itertools.product(*self.axes), _MOST_CELLS)
        labels = [", ".join(text for text, _ in cell) for cell in cells]
        return [f"{name} [{label}]" for label in labels for name in self.variants]

    @property
    def file(self) -> Path | None:
        mark = self.mark()
        return Path(mark.file) if mark and not mark.file.startswith("<") else None

    @property
    def text(self) -> str:
        """The YAML that it was read from; of a study whose file is gone its model alone."""
        if self._written:
            return self._written
        return self.file.read_text() if self.file and self.file.exists() else dump(self.model)


def other_sections() -> dict[str, type[Section]]:
    """The sections that are no fields of a study, by their keys: a file of archlab/search/sections is all of them."""
    import_specs()
    own = fields_of(Study)
    found = {key: kind for key, kind in Section.known.items() if key not in own and not kind.within}
    Study.other_keys = tuple(found)
    return found
