"""The forward and backward pass of a micro-batch, launched kernel by kernel or, on a GPU, as one CUDA graph."""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.parts.layers import is_known
from archlab.search.data.batches import Batch
from archlab.search.recipe.recipe import Recipe
from archlab.search.training.held_out import autocast

EAGER = "ARCHLAB_EAGER"  # a variable: anything but nothing has every step launched kernel by kernel
MOST_GRAPHS = 2  # of a trial, as each holds the activations of a micro-batch
RECENT = 4  # a shape that comes again within so many micro-batches is captured


class Found(NamedTuple):
    """What a micro-batch gives beside gradients: its share of the loss, of other losses by name, and measures."""

    loss: Tensor
    added: dict[str, Tensor]
    measures: dict[str, Tensor]


# Of tokens, targets, the call, and what `times_of` gives: on the device, as each replay of a graph reads other numbers.
Passes = Callable[[Tensor, Tensor, Call, Tensor, Tensor | None], Found]


def eager(model: nn.Module, recipe: Recipe, device: torch.device) -> Passes:
    """Adds the gradients of a micro-batch's share of the loss to those of the parameters."""

    def passes(tokens: Tensor, targets: Tensor, call: Call, times: Tensor, source_times: Tensor | None) -> Found:
        with autocast(device, recipe.precision):
            # mypy takes whatever a module has for a tensor or a module
            whole: Tensor = model.loss(tokens, targets, call, z_loss=recipe.z_loss)  # type: ignore[operator]
        times = times.to(whole.dtype)
        loss = whole / times
        added = {name: value / times for name, value in call.losses.items()}
        if source_times is not None:
            added["encoder"] = recipe.objective.encoder_weight * call.losses["encoder"] / source_times.to(whole.dtype)
        sum(added.values(), loss).backward()
        return Found(loss.detach(), {name: value.detach() for name, value in added.items()}, dict(call.measures))

    return passes


@dataclass
class Graph:
    """A captured micro-batch: where it reads, what it gives, and where it leaves the gradients of the parameters."""

    graph: torch.cuda.CUDAGraph
    given: dict[str, Tensor]
    found: Found
    gradients: list[tuple[nn.Parameter, Tensor]]
    places: list[int]


class Graphed:
    """The same passes, where micro-batches of one shape come again: launched eagerly first, then captured, and later
    ones replayed: one launch instead of a thousand, of the same kernels, so with the same bits.

    `refused` says why nothing is captured any more, where a step waits for the device. Where a part of the model reads
    what earlier micro-batches of a step left, or may as a plug-in, those after the first are eager.
    """

    def __init__(self, passes: Passes, model: nn.Module) -> None:
        self.passes, self.refused = passes, ""
        self.parameters = [x for x in model.parameters() if x.requires_grad]
        self.tensors = [*model.parameters(), *model.buffers()]
        self.looks_back = any(getattr(x, "reads_earlier", False) or not is_known(x) for x in model.modules())
        self.recent: deque[object] = deque(maxlen=RECENT)
        self.graphs: dict[object, Graph] = {}  # the one that ran last is the last

    def __call__(
        self, tokens: Tensor, targets: Tensor, call: Call, times: Tensor, source_times: Tensor | None
    ) -> Found:
        given = {"tokens": tokens, "targets": targets, "times": times} | tensors_of(call)
        given |= {} if source_times is None else {"source_times": source_times}
        key = tuple((name, x.shape) for name, x in given.items())
        if call.earlier and self.looks_back:
            return self.passes(tokens, targets, call, times, source_times)
        graph = self.graphs.pop(key, None)
        if graph is not None and graph.places != self.places():
            graph = None
        if graph is None and key in self.recent and not self.refused:
            graph = self.captured(given, call)
        self.recent.append(key)
        if graph is None:
            return self.passes(tokens, targets, call, times, source_times)
        self.graphs[key] = graph
        return replayed(graph, given)

    def release(self) -> None:
        """Gives the memory of all graphs back."""
        self.graphs.clear()

    def make_room(self) -> None:
        """Gives up the graph that ran longest ago, where there is no room for another one."""
        while len(self.graphs) >= MOST_GRAPHS:
            del self.graphs[next(iter(self.graphs))]

    def places(self) -> list[int]:
        """Where parameters and buffers lie: a graph knows no other place."""
        return [x.data_ptr() for x in self.tensors]

    def captured(self, given: dict[str, Tensor], call: Call) -> Graph | None:
        """The passes as a graph; nothing is computed yet. None where the device refuses.

        They are rehearsed first, as a capture that fails because something waits leaves the device's generator unfit.
        """
        self.make_room()
        before = [x.grad for x in self.parameters]
        own = {name: x.clone() for name, x in given.items()}
        rest: dict[str, Any] = dict(own)
        tokens, targets = rest.pop("tokens"), rest.pop("targets")
        times = rest.pop("times"), rest.pop("source_times", None)
        graph = torch.cuda.CUDAGraph()
        try:
            put(self.parameters, [None] * len(before))
            with torch.random.fork_rng([tokens.device]), nothing_waits():
                self.passes(tokens, targets, replace(call, losses={}, measures={}, **rest), *times)
            put(self.parameters, [None] * len(before))
            with torch.cuda.graph(graph):
                found = self.passes(tokens, targets, replace(call, **rest), *times)
            gradients = [(x, x.grad) for x in self.parameters if x.grad is not None]
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0]
            print(f"no CUDA graph, so each kernel is launched by itself: {self.refused}", file=sys.stderr)
            return None
        finally:
            put(self.parameters, before)
        return Graph(graph, own, found, gradients, self.places())


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Inside it whatever makes the host wait for the GPU raises RuntimeError, as far as torch knows."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch does not know all
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def replayed(graph: Graph, given: dict[str, Tensor]) -> Found:
    """Runs a graph on other tensors; gradients are added to those that the parameters have."""
    for name, x in given.items():
        graph.given[name].copy_(x, non_blocking=True)
    for parameter, fresh in graph.gradients:
        if parameter.grad is fresh:  # what the replay before left, which this one overwrites
            parameter.grad = fresh.clone()
    graph.graph.replay()
    held = [(x.grad, fresh) for x, fresh in graph.gradients if x.grad is not None]
    if held:
        torch._foreach_add_([x for x, _ in held], [fresh for _, fresh in held])
    for parameter, fresh in graph.gradients:
        if parameter.grad is None:
            parameter.grad = fresh
    loss, added, measures = graph.found
    return Found(loss.clone(), *({name: x.clone() for name, x in part.items()} for part in (added, measures)))


def times_of(whole: Batch, part: Batch, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """How many times as many targets a batch has as a micro-batch of it, and the encoder's, if it has any."""
    times = torch.full((), whole.scored / part.scored, dtype=torch.float64, device=device)
    if not part.source_scored:
        return times, None
    return times, torch.full((), whole.source_scored / part.source_scored, dtype=torch.float64, device=device)


def tensors_of(call: Call) -> dict[str, Tensor]:
    """What a call brings beside the tokens, by name."""
    values = {item.name: getattr(call, item.name) for item in fields(call)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def put(parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor | None]) -> None:
    """Gives parameters these gradients."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def passes_of(model: nn.Module, recipe: Recipe, device: torch.device, alone: bool) -> Passes:
    """As graphs where one process trains on a GPU, unless ARCHLAB_EAGER is set."""
    passes = eager(model, recipe, device)
    return Graphed(passes, model) if alone and device.type == "cuda" and not os.environ.get(EAGER) else passes
