"""What is measured of a trained model: a family whose members compute numbers and curves from its final weights.

A measure is no part of a trial. What it found is known by the trial, the measure with its options and version, and the
data, so that it is computed once, at any time, without training.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl.compiler.shapes import shapes_of
from archlab.arch_dsl.language.errors import Mark, Problem
from archlab.arch_dsl.language.parse import INVALID, parse_member, parse_record
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Family
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data.dataset import Dataset
from archlab.search.data.documents.notation import long_form
from archlab.search.recipe.fits import positions
from archlab.search.recipe.recipe import Recipe, load_recipe
from archlab.search.recipe.stages import parts
from archlab.search.trial.trial import Trial
from archlab.search.utils.canonical import canonical_json

ALL = "all"


@dataclass(frozen=True)
class Curve:
    """Numbers along an axis: `y[i]` at `x[i]`, each the mean of so many (`n`) targets. None where there is none."""

    x: list[int]
    y: list[float | None]
    n: list[int]


@dataclass(frozen=True)
class Grid:
    """Numbers by row and column: `values[r][c]` at `rows[r]` and `columns[c]`, each the mean of so many (`n`) cases.

    `row` and `column` say what these are ("layer", "head"). None where there is none.
    """

    rows: list[int] | list[float] | list[str]
    columns: list[int] | list[float] | list[str]
    row: str
    column: str
    values: list[list[float | None]]
    n: int

    def __post_init__(self) -> None:
        if [len(each) for each in self.values] != [len(self.columns)] * len(self.rows):
            shape = f"{len(self.rows)} x {len(self.columns)}"
            raise ValueError(f"a grid of {shape} has as many values; received rows of {[*map(len, self.values)]}")


@dataclass(frozen=True)
class Found:
    """What a measure found: numbers, curves and grids, each by name."""

    values: dict[str, float] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    grids: dict[str, Grid] = field(default_factory=dict)

    def with_ending(self, ending: str) -> Found:
        """The same with an ending at every name."""

        def named(parts: dict[str, Any]) -> dict[str, Any]:
            return {name + ending: part for name, part in parts.items()}

        return Found(named(self.values), named(self.curves), named(self.grids))

    def plain(self) -> dict[str, Any]:
        """As JSON; a number that is not finite becomes None."""
        return {
            "values": {name: _finite(value) for name, value in self.values.items()},
            "curves": {name: {**vars(each), "y": [*map(_finite, each.y)]} for name, each in self.curves.items()},
            "grids": {
                name: {**vars(each), "values": [[*map(_finite, row)] for row in each.values]}
                for name, each in self.grids.items()
            },
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class About:
    """What a trial ended as: the model, recipe and data of its last stage, the same for all of its seeds."""

    model: Model
    recipe: Recipe
    dataset: Dataset

    @classmethod
    def of(cls, trial: Trial, data_root: Path) -> About:
        """That of a trial. Raises DataError when its data are not there."""
        part = parts(load_recipe(trial.recipe, "recipe"), trial)[-1]
        return cls(arch_dsl.load(part.model), part.recipe, Dataset.open(data_root, part.data))

    def long(self, context: int) -> Model:
        """The model with positions for windows of `context` tokens, if it has too few."""
        prompt = max(stack.prompt or 0 for stack in self.model.stacks().values())
        needed = positions(self.recipe.replace(context=context), self.model) + prompt
        return self.model.replace(max_positions=max(needed, self.model.max_positions or 0))

    def refusal(self, context: int) -> str | None:
        """Why the model cannot be asked about windows of `context` tokens, or None."""
        objective = self.recipe.objective
        if context == self.recipe.context:
            return None
        if objective.of_examples:
            return f"{objective.type} reads examples, which have their own lengths"
        if complaint := objective.complaint(context):
            return f"windows of {context} tokens: {complaint[1]}"
        if context > (most := self.dataset.tokens["test"] - 1):
            return f"windows of {context} tokens are longer than the test stream, which has {most} targets"
        longer = self.long(context)
        if longer != self.model and shapes_of(longer) != shapes_of(self.model):
            return f"its table of positions ends before windows of {context} tokens do"
        return None


@dataclass(frozen=True)
class Subject:
    """A trained model and what it is asked on. `tick` is called before each batch; what it raises ends the measure.

    `asked` are all measures that it is asked for in one go, of which those that read the same sample share a pass, and
    `shared` is where they keep what they found for each other. `folder` is that of the trial, with its journal.
    """

    about: About
    device: torch.device
    weights: dict[str, Tensor] = field(repr=False)
    tick: Callable[[], None]
    asked: tuple[Measure, ...] = ()
    folder: Path | None = None
    shared: dict[Measure, Found | None] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def model(self) -> nn.Module:
        """The model as it was trained."""
        return self._with(self.about.model)

    def at(self, context: int) -> nn.Module:
        """The model for windows of `context` tokens."""
        longer = self.about.long(context)
        return self.model if longer == self.about.model else self._with(longer)

    def rows(self, context: int) -> int:
        """How many windows of `context` tokens are computed at once: as many tokens as in training."""
        recipe = self.about.recipe
        return max(1, recipe.micro_batch * recipe.context // context)

    def _with(self, spec: Model) -> nn.Module:
        dtype = torch.bfloat16 if self.about.recipe.precision == "bf16" else torch.float32
        model = arch_dsl.compile(spec, seed=0, device=self.device.type, dtype=dtype)
        model.load_state_dict(self.weights)
        model.separator = self.about.dataset.eod
        return model


class Measure(Family):
    """A measure. Its options are its fields; `main` is the one that a bare value stands for: `{perplexity: 64}`."""

    noun = "measure"
    word = True
    main: ClassVar[str] = ""
    in_all: ClassVar[bool] = True  # whether `all` has it: it needs no options
    timed: ClassVar[bool] = False  # whether its numbers are times of a machine, which nothing can repeat exactly

    @property
    def in_result(self) -> bool:
        """Whether training itself ends with it, in result.json."""
        return False

    @property
    def ending(self) -> str:
        """What tells its names from those that it has without options."""
        return ""

    @property
    def label(self) -> str:
        """What it is called among others of a study."""
        return self.type + self.ending

    def unusual(self, *names: str, **words: str) -> str:
        """`_name_value` of each field that is not at its default, by its name or the word for it: part of an ending."""
        usual, said = type(self)(), dict(zip(names, names, strict=True)) | words
        found = {
            word: getattr(self, name) for name, word in said.items() if getattr(self, name) != getattr(usual, name)
        }
        return "".join(
            f"_{word}_{value:g}" if isinstance(value, float) else f"_{word}_{value}" for word, value in found.items()
        )

    @property
    def facts(self) -> dict[str, str]:
        """What a finding's fingerprint says beside the machine's, such as the version of a library."""
        return {}

    def refusal(self, about: About) -> str | None:
        """Why it means nothing for these trials, or None."""
        return None

    def compute(self, subject: Subject) -> Found:
        """Measures a model."""
        raise NotImplementedError

    def digest(self, data: str) -> str:
        """What identifies a finding of a trial: the measure, its options and version, and the data."""
        return hashlib.sha256(canonical_json([canonical(self), self.numbers(), data]).encode()).hexdigest()[:32]

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """Reads `{perplexity: {context: 64}}` and `{perplexity: 64}` as `{type: perplexity, context: 64}`."""
        if cls.type:  # a member, whose `type` the parser has read and taken away
            return parse_record(cls, node, path, problems)
        main, fields = "", node.value if isinstance(node.value, dict) else {}
        for name in fields.keys() & cls.members.keys():
            main, child = cls.members[name].main, fields[name]
            if not main and not isinstance(child.value, dict | None):
                message = f"must be a mapping of options, found {child.kind}"
                problems.append(Problem(f"{path}.{name}", message, child.mark))
                return INVALID
            if isinstance(child.value, dict) and "type" in child.value and "type" not in fields:
                message = f"stands inside of {name}, which is the type"
                problems.append(Problem(f"{path}.{name}.type", message, child.key_marks.get("type", child.mark)))
                return INVALID
        return parse_member((cls,), long_form(node, cls.members, main), path, problems)


class Measures(tuple[Measure, ...]):
    """What a study measures, in its order, each once. The first `len(marks)` are named, and must mean something for at
    least one variant; what `all` stands for is left out where it means nothing."""

    marks: tuple[Mark | None, ...] = ()

    @property
    def evaluated(self) -> list[Measure]:
        """Those that training does not end with."""
        return [measure for measure in self if not measure.in_result]

    def problems(self, ends: Callable[[], Iterable[About]]) -> Iterator[Problem]:
        """What is named and means nothing for any of the variants, given what these end as."""
        for measure, mark in zip(self, self.marks, strict=False):
            why = None
            for about in ends():
                if (why := measure.refusal(about)) is None:
                    break
            if why is not None:
                yield Problem("evaluate", f"{measure.label}: {why}", mark)

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From `all`, the name of a measure, a mapping of one, or a list of these."""
        nodes = node.value if isinstance(node.value, list) else [] if node.value is None else [node]
        before, named = len(problems), dict[Measure, Mark | None]()
        rest = [member() for member in Measure.members.values() if member.in_all]
        for place, child in enumerate(nodes):
            where = f"{path}.{place}" if isinstance(node.value, list) else path
            if child.value == ALL:
                continue
            measure = Measure.parse_node(child, where, problems)
            if measure is not INVALID and measure in named:
                problems.append(Problem(where, f"names {measure.label} twice", child.mark))
            elif measure is not INVALID:
                named[measure] = child.mark
        if not nodes:
            problems.append(Problem(path, f"names no measure ({ALL}, {', '.join(Measure.members)})", node.mark))
        if len(problems) > before:
            return INVALID
        everything = any(child.value == ALL for child in nodes)
        found = cls(dict.fromkeys([*named, *(rest if everything else [])]))
        found.marks = tuple(named.values())
        return found
