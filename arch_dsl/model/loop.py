"""A loop: layers of a stack that are applied several times, with the same parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import parse_record
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Range, Spec, added, walk
from archlab.arch_dsl.model.exits import Exit, ExitModule
from archlab.arch_dsl.parts.context import BuildContext, Cost
from archlab.arch_dsl.primitives.injections import Injection
from archlab.arch_dsl.tree.block import Block

_REFUSED = {  # parts of looped layers, and why they cannot be there
    "moe": "tells its load and its losses once in a forward pass, and a loop uses it in every turn",
    "lightning_indexer": "tells its loss once in a forward pass, and a loop uses it in every turn",
    "value_residual": "takes values of the first layer that has it, which in a loop are others in every turn",
    "residual_dual": "carries a second stream, which a loop does not",
    "deepnorm": "has a factor for the number of layers, and a loop applies more",
}
_EARLIER = "takes keys and values of an earlier layer, which in a loop may be of the turn before"

Layers = Annotated[int, Range(min=0)]


class Loop(Spec):
    """Goes `turns` times through the layers between the first `prelude` and the last `coda` ones: h <- layers(h), from
    the stream e that enters the first of them (Universal Transformer, arXiv:1807.03819, section 2.1; looped models,
    arXiv:2502.17416; with layers before and after them Huginn, arXiv:2502.05171, section 3).

    With `inject` h <- layers(inject(h, e)), from h = 0. Parameters count once; FLOPs, activations and what decoding
    holds in every turn. What depends on the number of a layer is the same in all turns.

    The stack's `final` acts after the `last` turn, or at the end of `each`, so that the next one reads what it gives
    (LoopLM, arXiv:2510.25741). With `exit` a gate learns after which turn each token is read.
    """

    title: ClassVar[str] = "loop"
    turns: Annotated[int, Range(min=2, max=1_000)]
    prelude: Layers = 0
    coda: Layers = 0
    inject: Injection | None = None
    final: Literal["last", "each"] = added(default="last")
    exit: Exit | None = added(default=None)

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping, or from the number of turns alone."""
        if not isinstance(node.value, dict):
            node = Node({"turns": node}, node.mark)
        return parse_record(cls, node, path, problems)

    def turns_of(self, depth: int, n_layers: int) -> int:
        """How many times a layer is applied."""
        return self.turns if self.prelude <= depth < n_layers - self.coda else 1

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """What is injected before all turns."""
        return Cost() if self.inject is None else self.inject.cost(ctx, tokens).repeated(self.turns)

    @property
    def ends(self) -> int:
        """How often the stack's `final` acts in training."""
        return self.turns if self.final == "each" or self.exit is not None else 1

    def check(self, blocks: list[Block], others: Collection[str]) -> Iterator[Problem]:
        """Why a stack of these blocks cannot have such a loop; `others` are keys that it has beside it."""
        n_layers = len(blocks)
        if self.prelude + self.coda >= n_layers:
            told = f"prelude {self.prelude} and coda {self.coda} leave none of the {n_layers} layers to the loop"
            yield Problem("loop", told, self.mark())
            return
        for name in ("skips", "predict"):
            if name in others:
                told = f"stands beside {name}, which count on layers that are applied once"
                yield Problem("loop", told, self.mark())
        yield from self._wrong_ends(others)
        yield from self._refused(blocks[self.prelude : n_layers - self.coda])

    def _wrong_ends(self, others: Collection[str]) -> Iterator[Problem]:
        if self.exit is not None:
            yield from self.exit.check(others)
        for name in [name for name in ("exit", "final") if getattr(self, name) not in (None, "last")]:
            if self.coda:
                told = f"ends every turn, and coda {self.coda} has layers after the last one alone; set coda: 0"
                yield Problem(f"loop.{name}", told, self.mark("coda"))
        if self.final == "each" and "streams" in others:
            yield Problem("loop.final", "each acts on one stream, and streams are several", self.mark("final"))
        if self.final == "each" and "final" not in others:
            yield Problem("loop.final", "each has nothing to apply: the stack's `final` is empty", self.mark("final"))

    def _refused(self, blocks: Iterable[Block]) -> Iterator[Problem]:
        told: set[str] = set()
        for block in dict.fromkeys(blocks):
            for path, part in walk(block):
                kind: str = getattr(part, "type", "")
                why = _REFUSED["value_residual"] if getattr(part, "value_rank", 0) else _REFUSED.get(kind)
                if why is not None and kind not in told:
                    told.add(kind)
                    yield Problem("loop", f"{path} is {kind}, which {why}", self.mark())
                if getattr(part, "kv", "own") != "own" and "kv" not in told:
                    told.add("kv")
                    yield Problem("loop", f"{path}.kv {_EARLIER}", self.mark())


class LoopModule(nn.Module):
    """Which layers stand before a loop, in it and after it; the `length` of a turn, in layers; the turns, and the last
    of them; what is injected before each; whether what the last norm gives is `handed_on` to the next one; and whether
    evaluation reads each token where the gate says."""

    def __init__(self, spec: Loop, n_layers: int, ctx: BuildContext) -> None:
        super().__init__()
        first, end = spec.prelude, n_layers - spec.coda
        self.prelude, self.core, self.coda = slice(first), slice(first or None, end), slice(end, None)
        self.length, self.turns, self.last = end - first, range(spec.turns), spec.turns - 1
        self.inject = None if spec.inject is None else spec.inject.build(ctx.at("inject"))
        self.exit = None if spec.exit is None else ExitModule(spec.exit, ctx.at("exit"))
        self.handed_on = spec.final == "each"
        self.by_exit = spec.exit is not None and not spec.exit.only_trained

    def start(self, entered: Tensor) -> Tensor:
        """What the first turn finds, of the stream that enters the loop."""
        return entered if self.inject is None else torch.zeros_like(entered)

    def injected(self, stream: Tensor, entered: Tensor) -> Tensor:
        """What the first layer of a turn reads."""
        if self.inject is None:
            return stream
        found: Tensor = self.inject(stream, entered)
        return found
