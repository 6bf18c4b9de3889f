"""Watching a model: its sites tell what passes through them, by kind, place and layer, to who asks for it.

Nothing is computed or kept for it where nobody watches. For who does, gates and rotations are computed by themselves
where a kernel would join them to what stands before. Kinds:

* `stream`: `output` `[batch, time, d_model]`, the stream after a layer, or the sum of several; its path is "".
* `update`: `output` `[batch, time, d_model]`, what a branch adds to the stream.
* `site`: `output`, the tensor after the last item of a site that has items.
* `attention`: what the op of softmax attention gets: `query` `[batch, heads, time, head_dim]`, `key` `[batch, kv_heads,
  keys, head_dim]`, `given`, its other arguments but the values, and `memory`, how many learned keys stand before those
  of tokens; `documents` as the op would get them if it had no memory.
* `heads`: `output` `[batch, time, heads, head_dim]`, what every head of a mixer gives, before its site `sdpa`.
* `gate`: `scores`, after the activation; what was gated as `before` and `after`.
* `decay`: `log_f` `[batch, time, heads]` or `[batch, time, heads, channels]`, with a batch of 1 where all tokens
  have the same: the logarithm of what a forget gate or the decay of a linear recurrence keeps.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("stream", "update", "site", "attention", "heads", "gate", "decay")
_LAYER = re.compile(r"(?:(encoder|decoder)\.)?block\.([0-9]+)(?:\.|$)")


@dataclass(frozen=True)
class Sight:
    """What passed a place: `tensors` by name, which nobody may change.

    `stack` is "" in a model that has one; `layer` counts from 0, and is None outside of layers; `path` is the place
    within its layer (`attention.sdpa.gate`), the same where layers share their parameters. `padding` `[batch, time]` is
    True at tokens that do not count.
    """

    kind: str
    stack: str
    layer: int | None
    path: str
    tensors: dict[str, Any]
    padding: torch.Tensor | None


@dataclass(frozen=True)
class Watch:
    """Who watches one forward call: `see` gets what is of `kinds`. `layer` is the path of the layer that computes."""

    kinds: frozenset[str]
    see: Callable[[Sight], None]
    layer: str = ""

    def at(self, layer: str) -> Watch:
        """The same within a layer (`block.0`)."""
        return Watch(self.kinds, self.see, layer)

    def tell(self, kind: str, path: str, padding: torch.Tensor | None, /, **tensors: Any) -> None:
        """A place, whose path in the model is that of the first layer that has it, tells what passes, and what of it
        does not count."""
        if kind not in self.kinds:
            return
        own = _LAYER.match(path)
        inside = path if own is None else path[own.end() :]
        place = _LAYER.match(self.layer)
        stack, layer = ("", None) if place is None else (place[1] or "", int(place[2]))
        self.see(Sight(kind, stack, layer, inside, tensors, padding))


def watching() -> AbstractContextManager[None]:
    """The context of a call that is watched: what torch.compile made of a module does not tell anything, so the module
    itself is run. Where nothing was compiled, the compiler is not imported, which takes a second."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
