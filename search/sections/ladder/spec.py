"""The `ladder:` of a study: every variant over sizes, with tokens and fields of its recipe by rule.

    ladder:
      sizes: {d_model: [64, 96, 128], n_layers: [2, 3, 4], block.attention.heads: [4, 6, 8]}    # rung by rung
      tokens: 20 per parameter
      train: {lr: 4e-3 to 2e-3, batch: 8 to 16}

A rung changes the base, and what a variant changes is applied to that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import INVALID, parse_value, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, Positive
from archlab.arch_dsl.tree.identity import brief_text
from archlab.search.formatting.numbers import count
from archlab.search.variants.asked import Tokens
from archlab.search.variants.asks import Planned, Question
from archlab.search.variants.section import Section
from archlab.search.variants.zoo import ZOO

PARAMETERS = "parameters"  # the key of `sizes` that is no path
_RULE = re.compile(r"(\S+)\s+(per parameter|FLOPs)")
_ENDS = re.compile(r"(\S+)\s+to\s+(\S+)")
_DIGITS = 3  # of an interpolated rate


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
        return refuse(problems, path, f"must be a list with a value for every rung, found {found}", node.mark)


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
            refuse(problems, path, "must name a length, found an empty list", node.mark)
        for item, rule in zip(items, rules, strict=True):
            if rule is not None and rules.count(rule) > 1:
                refuse(problems, path, f"holds {brief_text(item.plain())} twice", item.mark)
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


class Ladder(Section):
    """Runs every variant at several sizes.

    `sizes` maps paths to lists that are read rung by rung; its key `parameters` lists numbers of parameters, embeddings
    not counted, for which width and depth follow from the shape of the model. `tokens` is a length for all rungs, a
    rule, or a list, which is crossed with the sizes. `train` maps fields of the recipe to `FIRST to LAST`, interpolated
    geometrically along the parameters. `count` says which parameters: those without tables of tokens and positions at
    the input, or all. What a rung has of parameters and FLOPs is the baseline's, so that all its variants train on the
    same tokens. `transfer: mup` parametrises wider rungs so that the rate of the first one is theirs too
    (arXiv:2203.03466), and refuses what does not transfer.
    """

    key = "ladder"
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

    def lines(self, planned: Planned) -> Iterator[str]:
        """How it trains the baseline, rung by rung, and what transfers."""
        counted = "without" if self.count == "non_embedding" else "with"
        yield f"ladder, as it trains the baseline (size: its parameters {counted} embeddings):"
        for variant in planned.variants:
            if variant.base == planned.study.report.baseline:
                recipe, stack = variant.recipe, [*variant.model.stacks().values()][-1]
                flops = count(float(variant.figures["training_flops_per_token"] * recipe.tokens))
                steps = f"{recipe.steps} steps of {recipe.sequences} x {recipe.context}, lr {recipe.lr:g}"
                sizes = f"{stack.n_layers} layer{'s' * (stack.n_layers != 1)} of {variant.model.d_model}"
                cell = variant.name.partition(" [")[2].removesuffix("]") or variant.rung  # a grid's values too
                yield f"  {cell}: {sizes}, {count(recipe.tokens)} tokens ({steps}), {flops} FLOPs"
        for name, found in planned.coordinates.items():
            site, power = next(iter(found.powers.items()))
            widths = ", ".join(map(str, found.widths))
            told = f"at most as width^{power:.2f} (at least {found.least[site]:.2f}), at {site}"
            yield f"muP of {name}: over the widths {widths} coordinates grow {told}"

    def record(self, planned: Planned) -> dict[str, Any]:
        lengths = len(self.tokens.rules) if self.tokens else 1
        return {"count": self.count, "lengths": lengths, "transfer": self.transfer}

    @property
    def sets(self) -> list[str]:
        """The paths that it sets at every rung."""
        own = (f"train.{name}" for name in self.train or ())
        return [*self.sizes, *(["train.tokens"] if self.tokens else []), *own]


def filled(node: Node) -> Node:
    """A study's node whose recipe has a number where the ladder says it for every rung, so that it is a recipe."""
    ladder, train = below(node, "ladder"), below(node, "train")
    if not train:
        return node
    more = {"tokens": Node.of(10**15)} if "tokens" in ladder else {}
    more |= {"lr": Node.of(1)} if "lr" in below(node, "ladder", "train") else {}
    sizes = below(node, "ladder", "sizes")
    lists = {name: each.value for name in ("tokens", "lr") if (each := sizes.get(f"train.{name}"))}
    more |= {name: nodes[0] for name, nodes in lists.items() if isinstance(nodes, list) and nodes}
    assert isinstance(node.value, dict)
    old = node.value["train"]
    whole = Node({**more, **train}, old.mark, old.key_marks)
    return Node({**node.value, "train": whole}, node.mark, node.key_marks)


def below(node: Node, *steps: str) -> dict[str, Node]:
    """The mapping at these keys; an empty one where there is none."""
    for step in steps:
        parts = node.value if isinstance(node.value, dict) else {}
        node = parts.get(step, Node({}))
    return node.value if isinstance(node.value, dict) else {}


def problems_of(ladder: Ladder | None, study: Question, own: set[str]) -> Iterator[Problem]:
    """What is wrong with a study's ladder. `own` are the keys that its recipe has in the file."""
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
        if ZOO in paths:
            yield Problem(f"{place}.{ZOO}", "is a model of its own, whose size no rung would change", mark)
        for path in {*paths} & {*ladder.sets}:
            yield Problem(f"{place}.{path}", "is what `ladder` sets at every rung; say it in one place", mark)
