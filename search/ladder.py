"""The `ladder:` of a study: every variant over sizes, with tokens and fields of its recipe by rule.

    ladder:
      sizes: {d_model: [64, 96, 128], n_layers: [2, 3, 4], block.attention.heads: [4, 6, 8]}    # rung by rung
      tokens: 20 per parameter
      train: {lr: 4e-3 to 2e-3, batch: 8 to 16}

A rung changes the base, and what a variant changes is applied to that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from arch_dsl.errors import Mark, Problem, SpecError
from arch_dsl.identity import brief_text
from arch_dsl.parse import INVALID, parse_value
from arch_dsl.patch import Setting
from arch_dsl.primitives.heads import MultiHead
from arch_dsl.source import Node
from arch_dsl.spec import Count, Positive, Spec, walk
from arch_dsl.zoo import entry, load
from arch_dsl.zoo.budget import NARROWEST_HEAD, Budget, solve
from search.selection import shortest

if TYPE_CHECKING:
    from arch_dsl.model import Model
    from search.study import Asked, Study
    from search.variants import Builder

LADDER = "the ladder"
PARAMETERS = "parameters"  # the key of `sizes` that is no path
_RULE = re.compile(r"(\S+)\s+(per parameter|FLOPs)")
_ENDS = re.compile(r"(\S+)\s+to\s+(\S+)")
_DIGITS = 3  # of an interpolated rate

Rule = Literal["tokens", "per parameter", "FLOPs"]


@dataclass(frozen=True)
class Along:
    """The values that one path has, rung by rung."""

    nodes: tuple[Node, ...]

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a list with a value for every rung."""
        if isinstance(node.value, list) and node.value:
            return cls(tuple(node.value))
        found = "an empty one" if isinstance(node.value, list) else node.kind
        problems.append(Problem(path, f"must be a list with a value for every rung, found {found}", node.mark))
        return INVALID


@dataclass(frozen=True)
class Tokens:
    """How many tokens the rungs take: `amount` of them, so many per parameter, or as many as so many FLOPs train."""

    amount: float
    rule: Rule

    @property
    def label(self) -> str:
        """What tells trials of one size apart."""
        if self.rule == "tokens":
            return f"tokens={counted(self.amount)}"
        return f"{'D/N' if self.rule == 'per parameter' else 'C'}={self.amount:g}"

    def tokens(self, parameters: int, flops: int) -> int:
        """Of a model with so many parameters, that takes so many FLOPs to train on a token."""
        return round(self.amount * {"tokens": 1, "per parameter": parameters, "FLOPs": 1 / flops}[self.rule])


@dataclass(frozen=True)
class Lengths:
    """One length, or several that are crossed with the sizes."""

    rules: tuple[Tokens, ...]

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From `20 per parameter`, `2M`, `1e13 FLOPs` or a list of these."""
        items = node.value if isinstance(node.value, list) else [node]
        before = len(problems)
        rules = [_length(item, path, problems) for item in items]
        if not rules:
            problems.append(Problem(path, "must name a length, found an empty list", node.mark))
        for item, rule in zip(items, rules, strict=True):
            if rule is not None and rules.count(rule) > 1:
                problems.append(Problem(path, f"holds {brief_text(item.plain())} twice", item.mark))
        return INVALID if len(problems) > before else cls(tuple(rule for rule in rules if rule is not None))


def _length(node: Node, path: str, problems: list[Problem]) -> Tokens | None:
    """One length; None with a problem noted where it is none."""
    said = _RULE.fullmatch(node.value) if isinstance(node.value, str) else None
    amount = _number(said[1], Positive) if said else None
    if said and amount is not None:
        return Tokens(amount, "FLOPs" if said[2] == "FLOPs" else "per parameter")
    found = _number(node.value, Count)
    if found is not None:
        return Tokens(found, "tokens")
    shown = f"'{node.value}'" if isinstance(node.value, str) else node.plain() or node.kind
    message = f"must be tokens (2M), '20 per parameter' or '1e13 FLOPs', found {shown}"
    problems.append(Problem(path, message, node.mark))
    return None


def _number(value: Any, annotation: Any) -> Any:
    """What a word of a study means as a number; None where it is none."""
    with suppress(ValueError):  # 2M, or no number
        value = json.loads(value) if isinstance(value, str) else value
    found = parse_value(annotation, Node.of(value), "", [])
    return None if found is INVALID else found


@dataclass(frozen=True)
class Ends:
    """What a field of the recipe is at the first and at the last rung; between them it is interpolated."""

    first: float
    last: float

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From `4e-3 to 1e-3`: two numbers above 0."""
        said = _ENDS.fullmatch(node.value) if isinstance(node.value, str) else None
        ends = [_number(text, Count) or _number(text, Positive) for text in said.groups()] if said else []
        if len(ends) == 2 and None not in ends:
            return cls(*ends)
        found = f"'{node.value}'" if isinstance(node.value, str) else node.plain() or node.kind
        message = f"must be '4e-3 to 1e-3', the values at the first and at the last rung, above 0, found {found}"
        problems.append(Problem(path, message, node.mark))
        return INVALID

    def at(self, share: float) -> int | float:
        """first (last / first)^share; whole where both ends are, else with three digits."""
        if share in (0.0, 1.0):
            return self.last if share else self.first
        value: float = self.first * (self.last / self.first) ** share
        if isinstance(self.first, int) and isinstance(self.last, int):
            return round(value)
        return float(f"{value:.{_DIGITS}g}")


class Ladder(Spec):
    """Runs every variant at several sizes.

    `sizes` maps paths to lists that are read rung by rung; its key `parameters` lists numbers of parameters, embeddings
    not counted, for which width and depth follow from the shape of the model. `tokens` is a length for all rungs, a
    rule, or a list, which is crossed with the sizes. `train` maps fields of the recipe to `FIRST to LAST`, interpolated
    geometrically along the parameters. `count` says which parameters: those without tables of tokens and positions at
    the input, or all. What a rung has of parameters and FLOPs is the baseline's, so that all its variants train on the
    same tokens. `transfer: mup` parametrises wider rungs so that the rate of the first one is theirs too
    (arXiv:2203.03466), and refuses what does not transfer.
    """

    title: ClassVar[str] = "ladder"
    sizes: dict[str, Along]
    tokens: Lengths | None = None
    train: dict[str, Ends] | None = None
    count: Literal["non_embedding", "all"] = "non_embedding"
    transfer: Literal["none", "mup"] = "none"

    @property
    def rungs(self) -> int:
        """How many sizes and lengths there are."""
        sizes = max((len(along.nodes) for along in self.sizes.values()), default=0)
        return sizes * (len(self.tokens.rules) if self.tokens else 1)

    def record(self) -> dict[str, Any]:
        """What the record of a study keeps."""
        lengths = len(self.tokens.rules) if self.tokens else 1
        return {"count": self.count, "lengths": lengths, "transfer": self.transfer}

    @property
    def sets(self) -> list[str]:
        """The paths that it sets at every rung."""
        own = (f"train.{name}" for name in self.train or ())
        return [*self.sizes, *(["train.tokens"] if self.tokens else []), *own]


@dataclass(frozen=True)
class Rung:
    """A size with a length: what it changes in the base and in the recipe, and what is still open of it."""

    place: int  # of its size
    settings: tuple[Setting, ...]
    rule: Tokens | None
    label: str = ""  # once it is counted


def filled(node: Node) -> Node:
    """A study's node whose recipe has a number where the ladder says it for every rung, so that it is a recipe."""
    ladder, train = _below(node, "ladder"), _below(node, "train")
    if not train:
        return node
    more = {"tokens": Node.of(10**15)} if "tokens" in ladder else {}
    more |= {"lr": Node.of(1)} if "lr" in _below(node, "ladder", "train") else {}
    assert isinstance(node.value, dict)
    old = node.value["train"]
    whole = Node({**more, **train}, old.mark, old.key_marks)
    return Node({**node.value, "train": whole}, node.mark, node.key_marks)


def given(node: Node) -> set[str]:
    """The keys that the recipe of a study's node has."""
    return {*_below(node, "train")}


def _below(node: Node, *steps: str) -> dict[str, Node]:
    """The mapping at these keys; an empty one where there is none."""
    for step in steps:
        parts = node.value if isinstance(node.value, dict) else {}
        node = parts.get(step, Node({}))
    return node.value if isinstance(node.value, dict) else {}


def problems_of(study: Study, own: set[str]) -> Iterator[Problem]:
    """What is wrong with a study's ladder. `own` are the keys that its recipe has in the file."""
    ladder = study.ladder
    if ladder is None:
        return
    lengths = {path: len(along.nodes) for path, along in ladder.sizes.items()}
    if not lengths:
        yield Problem("ladder.sizes", "is empty: a ladder has sizes", ladder.mark("sizes"))
    if len({*lengths.values()}) > 1:
        told = ", ".join(f"{path} {length}" for path, length in lengths.items())
        message = f"lists must be of one length, with a value for every rung: {told}"
        yield Problem("ladder.sizes", message, ladder.mark("sizes"))
    if study.search:
        yield Problem("ladder", "a search proposes its own sizes; leave one of them out", study.mark("ladder"))
    if ladder.transfer != "none" and study.tune and {*study.tune.axes} != {"train.lr"}:
        message = "is of models as they are written: with it `tune` chooses learning rates alone"
        yield Problem("ladder.transfer", message, ladder.mark("transfer"))
    for name in ("tokens", *(ladder.train or ())):
        if f"train.{name}" in ladder.sets and name in own:
            message = f"`ladder` says the {name} of every rung; this one would be ignored"
            yield Problem(f"train.{name}", message, study.train.mark(name))
    patches = {f"variants.{name}": patch for name, patch in study.variants.items()}
    patches |= {f"components.{name}": patch for name, patch in study.components.items()}
    taken = [("tune", [*study.tune.axes] if study.tune else [], study.mark("tune"))]
    taken += [("grid", [*study.grid], study.mark("grid"))]
    taken += [(place, [s.path for s in patch.settings], study.mark(place)) for place, patch in patches.items()]
    for place, paths, mark in taken:
        for path in {*paths} & {*ladder.sets}:
            yield Problem(f"{place}.{path}", "is what `ladder` sets at every rung; say it in one place", mark)


def written_sizes(study: Study, node: Node, problems: list[Problem]) -> Study:
    """The study with the numbers of parameters of its ladder as the widths and depths that have them, by the rule of
    the zoo's model that it starts from or by the shape of its own one."""
    ladder = study.ladder
    if ladder is None or PARAMETERS not in ladder.sizes:
        return study
    try:
        shape, budget = _shape(study, node)
        found = [_solved(shape, budget, each) for each in ladder.sizes[PARAMETERS].nodes]
    except SpecError as error:
        path, mark = f"ladder.sizes.{PARAMETERS}", ladder.mark("sizes")
        problems += [Problem(path, item.message, item.mark or mark) for item in error.problems]
        return study
    own = {path: Along(tuple(sizes[path] for sizes in found)) for path in found[0]}
    others = {path: along for path, along in ladder.sizes.items() if path != PARAMETERS}
    for path in own.keys() & others.keys():
        message = "follows from `parameters`; give one of them"
        problems.append(Problem(f"ladder.sizes.{path}", message, others[path].nodes[0].mark))
    return study.replace(ladder=ladder.replace(sizes={**own, **others}))


def _solved(shape: Model, budget: Budget, node: Node) -> dict[str, Node]:
    """What makes the model one with so many parameters, by path. Raises SpecError."""
    problems: list[Problem] = []
    wanted = parse_value(Count, node, f"ladder.sizes.{PARAMETERS}", problems)
    if problems:
        raise SpecError(problems)
    try:
        return {setting.path: Node.of(setting.node.plain(), node.mark) for setting in solve(shape, budget, wanted)}
    except SpecError as error:
        raise SpecError(replace(problem, mark=node.mark) for problem in error.problems) from error


def _shape(study: Study, node: Node) -> tuple[Model, Budget]:
    """The model whose proportions are kept, and how they scale."""
    if "zoo" in (model := _below(node, "model")):
        name = str(model["zoo"].value)
        return load(name), entry(name).budget
    stacks = study.model.stacks()
    blocks = tuple(stack.block for stack in stacks.values())
    heads = [part for _, part in walk(blocks) if isinstance(part, MultiHead)]
    size = (heads[0].head_dim or study.model.d_model // heads[0].heads) if heads else NARROWEST_HEAD
    return study.model, Budget(aspect=study.model.d_model / [*stacks.values()][-1].n_layers, head_dim=size)


def rungs_of(ladder: Ladder | None) -> list[Rung | None]:
    """The rungs in the order of the file, each size with all its lengths; none is one rung that changes nothing."""
    if ladder is None:
        return [None]
    rules = ladder.tokens.rules if ladder.tokens else (None,)
    places = range(len(next(iter(ladder.sizes.values())).nodes))
    return [Rung(place, _settings(ladder, place), rule) for place in places for rule in rules]


def _settings(ladder: Ladder, place: int) -> tuple[Setting, ...]:
    sizes = ladder.sizes.items()
    return tuple(Setting(path, along.nodes[place], LADDER, along.nodes[place].mark) for path, along in sizes)


def climbed(builder: Builder, asked: list[Asked]) -> list[Asked]:
    """What a study asks for with the sizes of its rungs counted: their names, tokens and interpolated fields.

    Raises SpecError where the baseline makes no sense at a rung, or all rungs have one number of parameters.
    """
    ladder = builder.study.ladder
    if ladder is None:
        return asked
    sizes = _sizes(builder, asked)
    names = _names(sizes, asked)
    counts = [parameters for parameters, _ in sizes.values()]
    mark = ladder.mark("train")
    if ladder.train and counts[0] == counts[-1]:
        message = f"has nothing to interpolate along: both ends have {counts[0]:,} parameters"
        raise SpecError.of("ladder.train", message, mark)
    found = []
    for item in asked:
        rung = item.rung
        assert rung is not None
        parameters, flops = sizes[rung.place]
        more = []
        if rung.rule is not None:
            tokens = rung.rule.tokens(parameters, flops)
            if tokens < 1:
                raise SpecError.of("ladder.tokens", f"{rung.rule.label} is no token for {names[rung.place]}", mark)
            more.append(_said("train.tokens", tokens, ladder.mark("tokens")))
        for name, ends in (ladder.train or {}).items():
            share = math.log(parameters / counts[0]) / math.log(counts[-1] / counts[0])
            more.append(_said(f"train.{name}", ends.at(share), mark))
        label = ", ".join([names[rung.place], *_told(ladder, rung)])
        cell = f"{item.cell}, {label}" if item.cell else label
        whole = replace(rung, settings=(*rung.settings, *more), label=label)
        found.append(replace(item, name=f"{item.base} [{cell}]", cell=cell, rung=whole))
    return found


def _said(path: str, value: float, mark: Mark | None) -> Setting:
    return Setting(path, Node.of(value, mark), LADDER, mark)


def _told(ladder: Ladder, rung: Rung) -> list[str]:
    """What tells the lengths of one size apart, where there are several."""
    return [rung.rule.label] if rung.rule and ladder.tokens and len(ladder.tokens.rules) > 1 else []


def _sizes(builder: Builder, asked: list[Asked]) -> dict[int, tuple[int, int]]:
    """Parameters of the baseline at each size, as the ladder counts them, and its FLOPs to train on a token."""
    study = builder.study
    found: dict[int, tuple[int, int]] = {}
    assert study.ladder is not None
    for item in asked:
        if item.rung and item.base == study.report.baseline and item.rung.place not in found:
            recipe = builder.recipe(item.settings, item.rung)
            built = builder.build(item, None, builder.datasets.of(recipe), recipe)
            counts = {"all": built.parameters, "non_embedding": built.figures["non_embedding"]}
            found[item.rung.place] = counts[study.ladder.count], built.figures["training_flops_per_token"]
    return found


def _names(sizes: dict[int, tuple[int, int]], asked: list[Asked]) -> dict[int, str]:
    """size=1.2M, or what a rung sets where sizes do not tell the rungs apart."""
    names = {place: f"size={counted(parameters)}" for place, (parameters, _) in sizes.items()}
    if len({*names.values()}) == len(names):
        return names
    rungs = {item.rung.place: item.rung for item in asked if item.rung is not None}
    for place, rung in rungs.items():
        paths = [setting.path for setting in rung.settings]
        told = (f"{shortest(s.path, paths)}={brief_text(s.node.plain())}" for s in rung.settings)
        names[place] = ", ".join(told)
    return names


def counted(value: float) -> str:
    """Three digits with a unit: 1.2M, 861k, 2B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{float(f'{value / size:.3g}'):g}{unit}"
    return f"{value:g}"
