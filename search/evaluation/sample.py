"""What diagnostics read: a fixed sample of the test set, in one pass for all that are asked together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from archlab.arch_dsl.language.spec import Count, Spec, added, walk
from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.parts.watching import Sight, Watch, watching
from archlab.kernels.attention import probabilities
from archlab.search.data.batches import IGNORE, Batch
from archlab.search.evaluation.family import About, Found, Measure, Subject
from archlab.search.objectives import has_encoder
from archlab.search.training.ends import Interrupted
from archlab.search.training.held_out import autocast, evaluating, held_out

SHARE, LEAST, MOST = 50, 4, 64  # one window of so many, but at least and at most so many


class Sampled(Measure):
    """A measure of a sample of the test set, the same for all trials: whole windows of the recipe's context, evenly
    spaced over it. Without `windows` these are one in 50, at least 4 and at most 64."""

    main: ClassVar[str] = "windows"
    windows: Count | None = added(default=None)

    @property
    def ending(self) -> str:
        return "" if self.windows is None else f"_{self.windows}"


def sample(about: About, encoder: bool, windows: int | None) -> Batch:
    """Windows of the test set, as the objective asks about them."""
    recipe, objective = about.recipe, about.recipe.objective
    if windows is None:
        whole = about.dataset.tokens["test"] // recipe.context
        windows = min(max(whole // SHARE, LEAST), MOST)
    asked = held_out(about.dataset, "test", recipe.context, objective, encoder, windows + 1)
    if objective.every and (asked.targets[-1] == IGNORE).any():  # the last window, which the stream does not fill
        if len(asked) > 1:
            return asked.rows(0, len(asked) - 1)
        scored = int((asked.targets[-1] != IGNORE).sum())
        return Batch(asked.tokens[:, :scored], asked.targets[:, :scored], asked.places[:, :scored])
    return asked.rows(0, min(windows, len(asked)))


def parts_of(about: About) -> Iterator[Spec]:
    """Every part of every layer of a model."""
    return (part for stack in about.model.stacks().values() for _, part in walk(tuple(stack.layers())))


def place_of(sight: Sight) -> str:
    """Where it was seen, the same in all layers: `attention`, `decoder.cross_attention`."""
    return f"{sight.stack}.{sight.path}".strip(".")


def counted(sight: Sight, shape: Sequence[int]) -> Tensor | None:
    """Which tokens `[batch, time]` count of a tensor of that shape, or None: all do, or it is the same for all."""
    return None if sight.padding is None or tuple(shape[:2]) != tuple(sight.padding.shape) else ~sight.padding


def at_tokens(sight: Sight, name: str) -> Tensor:
    """A tensor where its tokens count: `[tokens, …]`, or as it is where all do."""
    x: Tensor = sight.tensors[name]
    kept = counted(sight, x.shape)
    return x if kept is None else x[kept]


def spot(sight: Sight) -> tuple[str, int]:
    """The place and the layer where it was seen."""
    assert sight.layer is not None
    return place_of(sight), sight.layer


@dataclass(frozen=True)
class Weighed:
    """What some queries of a layer weigh, `[batch, heads, queries, keys]`.

    `probabilities` of the keys that are `seen`, of which every query has `visible` `[batch, heads, queries]`; the share
    that is left to `sink`, if there is one. `places` are the positions of queries and keys, memory being before 0,
    where both are of one sequence. `first` `[batch, queries]` is the key where the query's text begins: the first
    token, or that of its document. `counts` `[batch, queries]` are the queries that are no padding.
    """

    place: str
    layer: int
    probabilities: Tensor
    seen: Tensor
    visible: Tensor
    sink: Tensor | None
    places: tuple[Tensor, Tensor] | None
    first: Tensor
    counts: Tensor


def weighed(sight: Sight) -> Iterator[Weighed]:
    """The probabilities of a layer of softmax attention, block by block of its queries."""
    told = sight.tensors
    query, key, given, memory = told["query"], told["key"], told["given"], told["memory"]
    batch, _, queries, _ = query.shape
    keys = key.shape[-2]
    cross = given["pattern"].order == "cross" and not memory
    for part in probabilities(query, key, **given):
        rows = slice(part.start, part.start + part.probabilities.shape[2])
        counts = torch.ones(batch, queries, dtype=torch.bool, device=query.device)
        counts = (counts if sight.padding is None else ~sight.padding)[:, rows]
        first = torch.full_like(counts, memory, dtype=torch.long)
        if (documents := told["documents"]) is not None:
            first = first + (documents[:, rows, None] == documents[:, None, :]).int().argmax(-1)
        i = torch.arange(rows.start, rows.stop, device=query.device) + keys - memory - queries
        places = None if cross else (i, torch.arange(-memory, keys - memory, device=query.device))
        assert sight.layer is not None
        yield Weighed(
            place_of(sight),
            sight.layer,
            part.probabilities,
            part.seen,
            part.seen.sum(-1),
            part.sink,
            places,
            first,
            counts,
        )


class Observer:
    """Who looks at a pass for a diagnostic: at sights of some `kinds`, with `weighs` at attention's probabilities. A
    subclass says `of` which one, unless that makes its observer itself."""

    kinds: ClassVar[frozenset[str]] = frozenset()
    weighs: ClassVar[bool] = False

    def __init_subclass__(cls, of: type[Diagnostic] | None = None) -> None:
        if of is not None:
            of.looks = cls

    def see(self, sight: Sight) -> None:
        """Takes note of a sight of its kinds."""

    def weigh(self, weighed: Weighed) -> None:
        """Takes note of what some queries of a layer weigh."""

    def after(self, call: Call, windows: int) -> None:
        """Takes note of what a call over so many windows left."""

    def found(self, windows: int) -> Found:
        """What it found in all, over so many windows."""
        raise NotImplementedError


class Diagnostic(Sampled):
    """A measure of what passes through a model while it reads the sample. Where none of its parts is one of those that
    the measure `needs`, the model has what `lacks` says."""

    looks: ClassVar[type[Observer]]
    needs: ClassVar[tuple[type[Spec], ...]] = ()
    lacks: ClassVar[str] = ""

    def refusal(self, about: About) -> str | None:
        found = (part for part in parts_of(about) if isinstance(part, self.needs))
        if self.needs and not any(getattr(part, "softmax", True) for part in found):  # of attention, its weights
            return f"the model has {self.lacks}"
        return None

    def observer(self) -> Observer:
        """Who looks at a pass."""
        return self.looks()

    def compute(self, subject: Subject) -> Found:
        if self not in subject.shared:
            mates = [each for each in subject.asked if isinstance(each, Diagnostic) and each.windows == self.windows]
            subject.shared.update(_together(subject, mates if self in mates else [self]))
        found = subject.shared[self]
        return look(subject, [self])[self] if found is None else found


def _together(subject: Subject, mates: list[Diagnostic]) -> dict[Measure, Found | None]:
    """What several find in one pass; None where one of them cannot, so that each has a pass of its own."""
    try:
        return dict(look(subject, mates))
    except (Interrupted, OSError):
        raise
    except Exception:
        return dict.fromkeys(mates)


def look(subject: Subject, diagnostics: Sequence[Diagnostic]) -> dict[Measure, Found]:
    """What diagnostics of the same sample find in one pass over it."""
    about, model = subject.about, subject.model
    asked = sample(about, has_encoder(model), diagnostics[0].windows)
    observers = {each: each.observer() for each in diagnostics}
    weighing = [each for each in observers.values() if each.weighs]

    def see(sight: Sight) -> None:
        for each in observers.values():
            if sight.kind in each.kinds:
                each.see(sight)
        for part in weighed(sight) if sight.kind == "attention" and weighing else ():
            subject.tick()  # a layer of a long window takes long
            for each in weighing:
                each.weigh(part)

    kinds = frozenset[str]().union(*(each.kinds for each in observers.values()))
    watch = Watch(kinds | ({"attention"} if weighing else set()), see)
    with evaluating(model), watching():
        for part in asked.parts(subject.rows(about.recipe.context)):
            subject.tick()
            tokens, _, call = part.tensors(subject.device)
            with autocast(subject.device, about.recipe.precision):
                model.hidden(tokens, replace(call, watch=watch))  # type: ignore[operator]
            for each in observers.values():
                each.after(call, len(part))
    return {each: seen.found(len(asked)).with_ending(each.ending) for each, seen in observers.items()}
