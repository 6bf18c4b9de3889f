"""The rungs of `search.promote`: how long and how large candidates are trained at each, and how many of them go on.

    promote: [{tokens: 200k, keep: 16}, {tokens: 1M, keep: 4, seeds: 3}, {size: {parameters: 4M}, keep: 1, seeds: 3}]

The first rung is the search itself. What a rung leaves open is as at the rung before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, Range, Spec
from archlab.arch_dsl.patching.patch import Setting
from archlab.arch_dsl.zoo import entry, load
from archlab.arch_dsl.zoo.budget import solve
from archlab.search.sections.ladder.spec import below
from archlab.search.sections.search.space import Space
from archlab.search.sections.seeds.spec import MAX_SEEDS
from archlab.search.variants.asked import Rung
from archlab.search.variants.asks import Question
from archlab.search.variants.zoo import ZOO

TOKENS = "train.tokens"
_RUNG = "the rung"


class Size(Spec):
    """A number of parameters, embeddings not counted, for which width and depth follow from the zoo model's rule."""

    title: ClassVar[str] = "size"
    parameters: Count


class Promotion(Spec):
    """One rung: every candidate is trained with `seeds` fresh seeds, and the best `keep` by validation loss go on.

    `tokens` and `size` say how long and how large; what is left out is as at the rung before.
    """

    title: ClassVar[str] = "promote"
    tokens: Count | None = None
    size: Size | None = None
    keep: Count
    seeds: Annotated[int, Range(min=1, max=MAX_SEEDS)] = 1
    _sized: tuple[Setting, ...] = ()  # what its size changes in the model, once `with_sizes` has looked


def with_sizes(promote: Sequence[Promotion] | None, node: Node, problems: list[Problem]) -> tuple[Promotion, ...]:
    """The rungs with the widths and depths of their sizes, by the rule of the zoo model in a study's node.

    Notes in `problems` a size of a model without such a rule, and one that the rule cannot make.
    """
    found = []
    for index, each in enumerate(promote or ()):
        if each.size is not None:
            path, written = f"search.promote.{index}.size", below(node, "model")
            if ZOO not in written:
                message = "needs a model of the zoo, whose rule says its width and depth; this `model` is written out:"
                message += " begin it with `zoo: NAME`, or change `tokens` alone"
                problems.append(Problem(path, message, each.mark("size")))
            else:
                each = each.replace(_sized=_sized(str(written[ZOO].value), each.size, path, problems))
        found.append(each)
    return tuple(found)


def _sized(name: str, size: Size, path: str, problems: list[Problem]) -> tuple[Setting, ...]:
    """What makes a model of the zoo one with so many parameters; nothing with a problem noted where there is none."""
    mark = size.mark("parameters")
    try:
        settings = solve(load(name), entry(name).budget, size.parameters)
    except SpecError as error:
        problems += [Problem(f"{path}.parameters", each.message, mark) for each in error.problems]
        return ()
    return tuple(replace(each, source=_RUNG, mark=mark) for each in settings)


def scales_of(promote: Sequence[Promotion] | None) -> list[Rung]:
    """What each rung changes in the base and in the recipe; [] of a search that promotes nothing."""
    found: list[Rung] = []
    tokens: tuple[Setting, ...] = ()
    sized: tuple[Setting, ...] = ()
    for place, each in enumerate(promote or ()):
        if each.tokens is not None:
            mark = each.mark("tokens")
            tokens = (Setting(TOKENS, Node.of(each.tokens, mark), _RUNG, mark),)
        sized = each._sized or sized
        found.append(Rung(place, (*sized, *tokens), None))
    return found


def problems_of(
    promote: Sequence[Promotion] | None, trials: int, goals: int, mark: Mark | None, study: Question
) -> Iterator[Problem]:
    """What is wrong with the rungs of a search of so many `trials` and `goals`."""
    if promote is None:
        return
    if not promote:
        yield Problem("search.promote", "is an empty list: name a rung, or leave `promote` out", mark)
        return
    if goals > 1:
        message = f"ranks by validation loss alone, and this search has {goals} goals; leave one of the two out"
        yield Problem("search.promote", message, mark)
    if study.prune:
        message = "ends trials by what others reached by then; a rung ranks whole trials; leave one of the two out"
        yield Problem("prune", message, study.mark("prune"))
    if promote[0].seeds > 1:
        message = f"must be 1: the first rung is the search, which trains each proposal once; found {promote[0].seeds}"
        yield Problem("search.promote.0.seeds", message, promote[0].mark("seeds"))
    yield from _order(promote, trials, study.train.tokens)
    yield from _said_twice(promote, study)


def _order(promote: Sequence[Promotion], trials: int, tokens: int) -> Iterator[Problem]:
    """Rungs that change nothing, or that keep more, train for less, or are smaller than the one before."""
    reach, size = trials, 0
    for index, each in enumerate(promote):
        path = f"search.promote.{index}"
        if each.tokens is None and each.size is None:
            message = "says neither `tokens` nor `size`: a rung names how long or how large its candidates are trained"
            yield Problem(path, message, each.mark())
        if each.keep > reach:
            whose = "trials of the search" if index == 0 else "candidates that reach this rung"
            yield Problem(f"{path}.keep", f"must be at most the {reach} {whose}, found {each.keep}", each.mark("keep"))
        if each.tokens is not None and index and each.tokens < tokens:
            message = f"must be at least those of the rung before, {tokens:,}, found {each.tokens:,}"
            yield Problem(f"{path}.tokens", message, each.mark("tokens"))
        if each.size is not None and each.size.parameters < size:
            message = f"must be at least those of the rung before, {size:,}, found {each.size.parameters:,}"
            yield Problem(f"{path}.size.parameters", message, each.size.mark("parameters"))
        reach, tokens = min(reach, each.keep), each.tokens or tokens
        size = each.size.parameters if each.size else size


def _said_twice(promote: Sequence[Promotion], study: Question) -> Iterator[Problem]:
    """Paths that a rung sets and that the space, a component or a variant would set again."""
    ours = {setting.path for scale in scales_of(promote) for setting in scale.settings}
    space = study.space.axes if isinstance(study.space, Space) else {}
    said = [(f"space.{path}", path, axis.mark("") or study.mark("space")) for path, axis in space.items()]
    for kind, patches in (("components", study.components), ("variants", study.variants)):
        said += [(f"{kind}.{name}.{s.path}", s.path, s.mark) for name, patch in patches.items() for s in patch.settings]
    for place, path, mark in said:
        if path in ours:
            yield Problem(place, "is what a rung of `promote` sets; say it in one place", mark)
        elif path == ZOO and any(each.size for each in promote):
            yield Problem(place, "is a model of its own, whose size no rung would change", mark)
