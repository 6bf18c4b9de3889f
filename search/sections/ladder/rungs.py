"""The rungs of a ladder: which widths and depths have so many parameters, what each rung changes, and for how long."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError
from archlab.arch_dsl.language.parse import parse_value
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, walk
from archlab.arch_dsl.patching.patch import Setting
from archlab.arch_dsl.primitives.heads import MultiHead
from archlab.arch_dsl.tree.identity import brief_text
from archlab.arch_dsl.zoo import entry, load
from archlab.arch_dsl.zoo.budget import NARROWEST_HEAD, Budget, solve
from archlab.search.formatting.words import counted, shortest
from archlab.search.sections.ladder.spec import PARAMETERS, Along, Ladder, below
from archlab.search.variants.asked import Asked, Rung

if TYPE_CHECKING:
    from archlab.arch_dsl.model.model import Model
    from archlab.search.variants.asks import Builds

_LADDER = "the ladder"


def written_sizes(ladder: Ladder | None, model: Model, node: Node, problems: list[Problem]) -> Ladder | None:
    """The ladder of a study's node with its numbers of parameters as the widths and depths that have them.

    These follow from the rule of the zoo's model that the study starts from, or from the shape of its own `model`.
    """
    if ladder is None or PARAMETERS not in ladder.sizes:
        return ladder
    try:
        shape, budget = _shape(model, node)
        found = [_solved(shape, budget, each) for each in ladder.sizes[PARAMETERS].nodes]
    except SpecError as error:
        path, mark = f"ladder.sizes.{PARAMETERS}", ladder.mark("sizes")
        problems += [Problem(path, item.message, item.mark or mark) for item in error.problems]
        return ladder
    own = {path: Along(tuple(sizes[path] for sizes in found)) for path in found[0]}
    others = {path: along for path, along in ladder.sizes.items() if path != PARAMETERS}
    for path in own.keys() & others.keys():
        message = "follows from `parameters`; give one of them"
        problems.append(Problem(f"ladder.sizes.{path}", message, others[path].nodes[0].mark))
    return ladder.replace(sizes={**own, **others})


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


def _shape(model: Model, node: Node) -> tuple[Model, Budget]:
    """The model whose proportions are kept, and how they scale."""
    if "zoo" in (written := below(node, "model")):
        name = str(written["zoo"].value)
        return load(name), entry(name).budget
    stacks = model.stacks()
    blocks = tuple(stack.block for stack in stacks.values())
    heads = [part for _, part in walk(blocks) if isinstance(part, MultiHead)]
    size = (heads[0].head_dim or model.d_model // heads[0].heads) if heads else NARROWEST_HEAD
    return model, Budget(aspect=model.d_model / [*stacks.values()][-1].n_layers, head_dim=size)


def rungs_of(ladder: Ladder | None) -> list[Rung | None]:
    """The rungs in the order of the file, each size with all its lengths; none is one rung that changes nothing."""
    if ladder is None:
        return [None]
    rules = ladder.tokens.rules if ladder.tokens else (None,)
    by_path = [[Setting(path, node, _LADDER, node.mark) for node in each.nodes] for path, each in ladder.sizes.items()]
    return [Rung(place, settings, rule) for place, settings in enumerate(zip(*by_path, strict=False)) for rule in rules]


def climbed(ladder: Ladder | None, builds: Builds, asked: list[Asked]) -> list[Asked]:
    """What a study asks for with the sizes of its rungs counted: their names, tokens and interpolated fields.

    Raises SpecError where the baseline makes no sense at a rung, or all rungs have one number of parameters.
    """
    if ladder is None:
        return asked
    sizes = _sizes(ladder, builds, asked)
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
        several = ladder.tokens is not None and len(ladder.tokens.rules) > 1
        label = f"{names[rung.place]}, {rung.rule.label}" if rung.rule and several else names[rung.place]
        cell = f"{item.cell}, {label}" if item.cell else label
        whole = replace(rung, settings=(*rung.settings, *more), label=label)
        found.append(replace(item, name=f"{item.base} [{cell}]", cell=cell, rung=whole))
    return found


def _said(path: str, value: float, mark: Mark | None) -> Setting:
    return Setting(path, Node.of(value, mark), _LADDER, mark)


def _sizes(ladder: Ladder, builds: Builds, asked: list[Asked]) -> dict[int, tuple[int, int]]:
    """Parameters of the baseline at each size, as the ladder counts them, and its FLOPs to train on a token."""
    baseline = builds.study.report.baseline
    found: dict[int, tuple[int, int]] = {}
    for item in asked:
        if item.rung and item.base == baseline and item.rung.place not in found:
            recipe = builds.recipe(item.settings, item.rung)
            built = builds.build(item, None, builds.data(recipe), recipe)
            counts = {"all": built.parameters, "non_embedding": built.figures["non_embedding"]}
            found[item.rung.place] = counts[ladder.count], built.figures["training_flops_per_token"]
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
