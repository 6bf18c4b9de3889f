"""Facts of the place where a primitive stands: widths, depth, context. Never written in YAML, always derived."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils import _pytree

from archlab import kernels
from archlab.arch_dsl.parts.watching import Watch


@dataclasses.dataclass(frozen=True)
class NodeChoice:
    """Which implementation one node of a model got, why, what it asked for beside the op's defaults, and whether it
    fell back from one that is faster on the device."""

    path: str
    op: str
    implementation: str
    reason: str
    asked: str = ""
    fallback: bool = False


@dataclasses.dataclass(frozen=True)
class BuildContext:
    """Where a primitive is being built or counted.

    `width` is the last dimension of the tensor that it acts on; `heads` the dimension before it, or None where the
    tensor is `[batch, time, width]`; `hidden` the width of the branch's input, which gates read; `depth` the index of
    the layer; `site` the name of the site; `logit_scale` what attention multiplies q k^T by; `documents` whether its
    mask keeps documents apart, `ahead` whether it may read later positions; `window` how many keys decoding holds, None
    for all; `query_latent` the width of what latent attention makes its queries of. `gain` scales the initial values of
    value, output and feed-forward maps (DeepNorm). `shared` holds what a first layer owns for all others. `held` says
    that another node keeps the tensor here for the backward pass, and so counts it. `source_tokens` is None where no
    encoder's stream can be read, else how many tokens of it a cost is counted over. `own_positions` says that positions
    differ from sequence to sequence: `[batch, time]`.
    """

    d_model: int
    n_layers: int
    vocab: int
    max_positions: int | None
    std: float
    residual_std: float
    width: int
    hidden: int
    heads: int | None = None
    depth: int = 0
    site: str = ""
    logit_scale: float = 1.0
    documents: bool = False
    window: int | None = None
    query_latent: int | None = None
    ahead: bool = False
    gain: float = 1.0
    held: bool = False
    source_tokens: int | None = None
    own_positions: bool = False
    path: str = ""
    device: kernels.Device = dataclasses.field(default_factory=kernels.Device.current)
    dtype: torch.dtype = torch.float32
    backend: str = "auto"
    choices: list[NodeChoice] = dataclasses.field(default_factory=list)
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)

    def at(self, name: str, **changes: Any) -> Self:
        """The context one step further down, with these facts changed."""
        return self.where(path=f"{self.path}.{name}" if self.path else name, **changes)

    def where(self, **changes: Any) -> Self:
        """The context with these facts changed. Plans make millions, so it is copied without `__init__`."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.__dict__.update(changes)
        return new

    @property
    def channels(self) -> int:
        """The width of all heads together."""
        return (self.heads or 1) * self.width

    def elements(self, tokens: int) -> int:
        """How many elements the tensor here has that another node does not keep."""
        return 0 if self.held else tokens * self.channels

    def note(self, op: str, implementation: str, reason: str) -> None:
        """Enters a choice that was made for this node."""
        self.choices.append(NodeChoice(self.path, op, implementation, reason))

    def select(self, op: str, **ask: Any) -> Callable[..., Any]:
        """The implementation of an op for this device and dtype; the choice and its reason are noted in `choices`."""
        force = "" if self.backend == "auto" else self.backend
        choice = kernels.select(op, self.device, self.dtype, force=force, **ask)
        found = NodeChoice(self.path, op, choice.implementation, choice.reason, choice.asked, choice.fallback)
        self.choices.append(found)
        return choice.call


@dataclasses.dataclass
class State:
    """What decoding carries from one call to the next: the tokens read so far, and what the nodes of each layer hold.

    A node keeps what it needs under its path, in whatever form it likes. `layers` is indexed by stack and depth
    (`block.0`), as nodes that layers share have one path. `documents` `[batch, 1]` is the number of the last token's
    document, where a token opens them. `source` is the encoder's stream with its padding, computed once.
    """

    tokens: int = 0
    documents: torch.Tensor | None = None
    source: torch.Tensor | None = None
    source_padding: torch.Tensor | None = None
    layers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Call:
    """One forward call: what the modules may know besides the stream.

    * `positions` `[time]` default to 0, 1, 2, …, or while decoding to those that follow what was read before. In layers
      that choose their tokens they are `[batch, time]`.
    * `documents` `[batch, time]` number the document of each token, for masks that keep documents apart; without them a
      row is one document.
    * `prefix` `[batch]`: how many tokens at the start of each row all read each other, for masks that have a prefix.
    * `padding` `[batch, time]` is True at tokens that nothing may read.
    * `source_tokens` `[batch, source_time]` are what an encoder reads, `source_padding` its padding; the encoder's last
      stream `source` `[batch, source_time, d_model]` is what cross-attention reads. Who gives it skips the encoder.
      `source_targets` `[batch, source_time]` (-100: none) are what `losses["encoder"]` has the encoder predict.
    * `state` carries what was read before from call to call; None outside decoding. `held` is the part of it that
      belongs to the current layer.
    * `offset` is how many layers a loop has applied again before the current one, whose number it raises.
    * `across` carries tensors from layer to layer within the call.
    * `losses` holds auxiliary losses by the path of their node, weighted; training adds them to its loss. `measures`
      holds what nodes tell about the call. A node sets its own entries, so that doing it twice changes nothing.
    * `earlier` holds the sums of `measures` over the micro-batches of this step that came before.
    * `watch` is told what passes through the sites of the model (arch_dsl/parts/watching.py); mostly nobody is.
    """

    positions: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    prefix: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    source_tokens: torch.Tensor | None = None
    source_padding: torch.Tensor | None = None
    source_targets: torch.Tensor | None = None
    source: torch.Tensor | None = None
    state: State | None = None
    held: dict[str, Any] | None = None
    offset: int = 0
    across: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    losses: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    measures: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    earlier: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    watch: Watch | None = None

    def fresh(self) -> Self:
        """The same call with nothing carried from layer to layer yet. Losses and measures go to this call's own."""
        return dataclasses.replace(self, across={})

    def behind(self, count: int) -> Self:
        """What the call says of its tokens, with so many vectors before them."""
        positions, prefix, padding = self.positions, self.prefix, self.padding
        if positions is not None:
            positions = torch.cat([positions[:1] + torch.arange(count, device=positions.device), positions + count])
        return dataclasses.replace(
            self,
            positions=positions,
            prefix=None if prefix is None else prefix + count,
            padding=None if padding is None else torch.nn.functional.pad(padding, (count, 0)),
        )

    def after(self, offset: int) -> Self:
        """The call as layers see it after so many that a loop has applied again. Itself where nothing is decoded and
        nobody watches."""
        if self.state is None and self.watch is None:
            return self
        return dataclasses.replace(self, offset=offset)

    def layer(self, name: str) -> Self:
        """The call as the layer `name` (`block.0`) sees it: with what its nodes hold, and told to who watches as its
        own. Itself where nothing is decoded and nobody watches."""
        if self.state is None and self.watch is None:
            return self
        if self.offset:
            stack, _, depth = name.rpartition(".")
            name = f"{stack}.{int(depth) + self.offset}"
        held = self.held if self.state is None else self.state.layers.setdefault(name, {})
        return dataclasses.replace(self, held=held, watch=None if self.watch is None else self.watch.at(name))

    def outside(self, name: str) -> Self:
        """The call as a site before or after the layers sees it: with what it holds, where something is decoded."""
        if self.state is None:
            return self
        return dataclasses.replace(self, held=self.state.layers.setdefault(name, {}))

    def positions_of(self, length: int, device: torch.device) -> torch.Tensor:
        """Integer positions `[time]` of the tokens of this call, or `[batch, time]` where they are given so."""
        if self.positions is not None:
            return self.positions
        if self.state is None:
            return torch.arange(length, device=device)
        return torch.arange(self.state.tokens, self.state.tokens + length, device=device)

    def key_positions(self, own: torch.Tensor, keys: int) -> torch.Tensor:
        """Integer positions `[keys]` of what the tokens of this call may read: their own `[time]`, and before them
        those that decoding holds, which precede one by one."""
        if self.state is None:
            return own
        return torch.cat([own[:1] + torch.arange(len(own) - keys, 0, device=own.device), own])


_pytree.register_dataclass(
    Call,
    field_names=[item.name for item in dataclasses.fields(Call) if item.name not in ("state", "offset", "watch")],
    drop_field_names=["state", "offset", "watch"],
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a node costs in one forward pass over a sequence: exact parameters, and FLOPs of matrix products.

    `flops_matmul` counts full squares, as `torch.utils.flop_counter` does on the reference path; `flops_model` counts
    only the pairs that the mask keeps, as papers do.

    `activations` counts the elements that the forward pass keeps for the backward pass, without recomputation, as the
    CPU computes in float32 when a backend of `auto` may choose. What is kept counts once, at the node that reads it:
    a linear map keeps its input (maps that read the same tensor, one input), a norm its input and a statistic per
    vector, an activation what its derivative is made of, attention q, k, v, its output, the log-sum-exp, and a mask
    or bias that it needs as a matrix. Token ids, parameters and tables of positions do not count.

    `cache` counts the elements that decoding keeps when the sequence has been read. `embeddings` are those of the
    parameters that stand in tables of tokens and positions at the model's input. `idle` are the parameters that a
    token does not meet: those of the experts that it is not sent to. What only training has, heads of further tokens,
    counts among parameters and activations, and not among FLOPs: `trained_only` are its parameters, `trained_flops` its
    `flops_model`.
    """

    parameters: int = 0
    flops_matmul: int = 0
    flops_model: int = 0
    activations: int = 0
    cache: int = 0
    embeddings: int = 0
    idle: int = 0
    trained_only: int = 0
    trained_flops: int = 0
    children: dict[str, Cost] = dataclasses.field(default_factory=dict)

    @classmethod
    def product(cls, tokens: int, inputs: int, outputs: int, bias: bool = False) -> Cost:
        """A linear map of every token: 2 * tokens * inputs * outputs FLOPs."""
        flops = 2 * tokens * inputs * outputs
        return cls(inputs * outputs + (outputs if bias else 0), flops, flops)

    @classmethod
    def total(cls, children: dict[str, Cost]) -> Cost:
        """The sum of named parts, which stay visible as children."""
        kept = {name: child for name, child in children.items() if child != _NOTHING}
        parameters = flops_matmul = flops_model = activations = cache = embeddings = idle = only = more = 0
        for child in kept.values():  # in one pass, as plans make millions
            parameters += child.parameters
            flops_matmul += child.flops_matmul
            flops_model += child.flops_model
            activations += child.activations
            cache += child.cache
            embeddings += child.embeddings
            idle += child.idle
            only += child.trained_only
            more += child.trained_flops
        return cls(parameters, flops_matmul, flops_model, activations, cache, embeddings, idle, only, more, kept)

    def without_parameters(self) -> Cost:
        """The same work with parameters that another node owns."""
        return self._without("parameters", "embeddings", "idle")

    def only_trained(self) -> Cost:
        """The same as work that only training has."""
        children = {name: child.only_trained() for name, child in self.children.items()}
        own = {"trained_only": self.parameters, "trained_flops": self.flops_model, "idle": 0, "cache": 0}
        return dataclasses.replace(self, children=children, flops_matmul=0, flops_model=0, **own)

    def without_cache(self) -> Cost:
        """The same work in a part that is read once, and not again with every token that is decoded."""
        return self._without("cache")

    def _without(self, *counts: str) -> Cost:
        children = {name: child._without(*counts) for name, child in self.children.items()}
        return dataclasses.replace(self, children=children, **dict.fromkeys(counts, 0))

    def keeping(self, elements: int, *, parameters: int = 0, cache: int = 0) -> Cost:
        """The same with that many elements more kept for the backward pass, parameters more, and more of a cache."""
        work = (self.parameters + parameters, self.flops_matmul, self.flops_model, self.activations + elements)
        rest = (self.embeddings, self.idle, self.trained_only, self.trained_flops)
        return Cost(*work, self.cache + cache, *rest, self.children)

    def repeated(self, turns: int) -> Cost:
        """The same nodes applied so many times: their parameters count once."""
        if turns == 1:
            return self
        children = {name: child.repeated(turns) for name, child in self.children.items()}
        names = ("flops_matmul", "flops_model", "activations", "cache", "trained_flops")
        return dataclasses.replace(self, children=children, **{name: turns * getattr(self, name) for name in names})

    def times(self, count: int) -> Cost:
        """That many equal nodes, without their parts."""
        return Cost(*(count * getattr(self, item.name) for item in dataclasses.fields(self)[:-1]))

    @property
    def active(self) -> int:
        """Parameters that one token meets, without the experts that it is not sent to and what only training has."""
        return self.parameters - self.idle - self.trained_only

    @property
    def non_embedding(self) -> int:
        """Parameters without the tables at the input; with an output table of its own, that one included."""
        return self.parameters - self.embeddings

    def figures(self, tokens: int) -> dict[str, int]:
        """What is told of a whole model that costs this over `tokens` tokens; bytes in float32.

        A training step takes three times the FLOPs of its forward pass. The cache is an average over the context.
        """
        return {
            "active_parameters": self.active,
            "non_embedding": self.non_embedding,
            "flops_per_token": self.flops_model // tokens,
            "training_flops_per_token": 3 * (self.flops_model + self.trained_flops) // tokens,
            "activation_bytes": 4 * self.activations,
            "cache_bytes_per_token": 4 * self.cache // tokens,
        }


_NOTHING = Cost()
