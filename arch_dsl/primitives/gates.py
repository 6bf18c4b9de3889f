"""Gates: a tensor modulated by an activation of the branch's input, or of a learned constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor

from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation, WordOr
from archlab.arch_dsl.language.spec import Count, NotNegative, added
from archlab.arch_dsl.parts import fused
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Elementwise, Gate, Module
from archlab.arch_dsl.parts.fused import Factors
from archlab.arch_dsl.parts.layers import Itself, Linear, constant, undecayed
from archlab.arch_dsl.parts.saved_for_backward import kept_of
from archlab.kernels.activations import ACTIVATIONS, activation_of, at_least_float32


@Gate.register("gate")
class OutputGate(Gate):
    """y' = y * act(x W) or y + act(x W): a gate on y read from the branch's input x (arXiv:2505.06708, eq. 5).

    `granularity` says how fine the scores are: one per element, one per head, or one per token. With `heads: shared`
    the scores of all heads are averaged before the activation, so every head is gated alike. `input: none` replaces
    x W by a learned constant. The constant, or the bias, starts at `start`; the entries of W at N(0, std^2), by
    default those of the model.

    With `rank` W is the product of a map to so many channels and one from them, which has the bias: the output gate of
    Kimi Delta Attention (arXiv:2510.26692, section 4). `head_dim` stands for the channels of a head. With `channels` W
    reads only so many of the first channels of x: the attention gate of modded-nanogpt, there 12
    (github.com/KellerJordan/modded-nanogpt).
    """

    ops: ClassVar[tuple[str, ...]] = ("gate",)
    examples = (
        {},
        {"granularity": "headwise"},
        {"granularity": "scalar"},
        {"heads": "shared"},
        {"input": "none"},
        {"combine": "add", "activation": "tanh"},
        {"input": "none", "heads": "shared", "combine": "add"},
        {"bias": True, "granularity": "headwise", "activation": "silu", "start": 0.3},
        {"granularity": "headwise", "activation": "2 * sigmoid(x)", "std": 0.1},
        {"rank": 3, "bias": True, "start": 0.2},
        {"channels": 3, "granularity": "headwise", "bias": True, "start": 0.2},
    )
    granularity: Literal["elementwise", "headwise", "scalar"] = "elementwise"
    heads: Literal["specific", "shared"] = "specific"
    combine: Literal["multiply", "add"] = "multiply"
    activation: Activation = "sigmoid"
    input: Literal["hidden", "none"] = "hidden"
    bias: bool = False
    std: NotNegative | None = added(default=None)
    start: float = added(default=0.0)
    rank: Annotated[int | str | None, WordOr("head_dim", Count, "> 0", {"minimum": 1}, 3, optional=True)] = added(
        default=None
    )
    channels: Count | None = added(default=None)

    def inner(self, ctx: BuildContext) -> int | None:
        """The channels between the two maps of W; None where it is one."""
        return ctx.width if isinstance(self.rank, str) else self.rank

    def scores(self, ctx: BuildContext) -> tuple[int, ...]:
        """Shape of the scores of one token, before heads are averaged."""
        if self.granularity == "scalar":
            return (1,) if ctx.heads is None else (1, 1)
        last = ctx.width if self.granularity == "elementwise" else 1
        return (last,) if ctx.heads is None else (ctx.heads, last)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        scores = math.prod(self.scores(ctx))
        kept = 0 if self.combine == "add" else ctx.elements(tokens)
        if self.input == "none":
            return Cost(parameters=scores, activations=kept)
        own, result = kept_of(self.activation)
        opened = tokens * (ctx.width if self.heads == "shared" else scores)
        kept += (own + (result or self.combine == "multiply")) * opened
        if rank := self.inner(ctx):
            first = Cost.product(tokens, ctx.hidden, rank)
            second = Cost.product(tokens, rank, scores, self.bias).keeping(tokens * rank + kept)
            return Cost.total({"projection": first, "outer": second})
        return Cost.product(tokens, self.channels or ctx.hidden, scores, self.bias).keeping(kept)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.heads is None and self.granularity == "headwise":
            yield "granularity", "a headwise gate needs heads, and this site has none"
        if self.heads == "shared" and (ctx.heads is None or self.granularity != "elementwise"):
            yield "heads", "shared scores need heads and elementwise granularity (one score: scalar)"
        if self.input == "none" and self.bias:
            yield "bias", "a gate without input is a learned constant, which has no bias"
        if self.input == "none" and self.std is not None:
            yield "std", "a gate without input has no projection that could start at random; see start"
        if self.input == "none" and self.rank is not None:
            yield "rank", "a gate without input has no projection that could be of low rank"
        elif isinstance(self.rank, str) and ctx.heads is None:
            yield "rank", "head_dim is the width of a head, and this site has none; give a number"
        if self.channels is not None and self.input == "none":
            yield "channels", "a gate without input reads no channels"
        elif self.channels is not None and self.rank is not None:
            yield "channels", "a map of low rank reads all channels; leave out rank or channels"
        elif self.channels is not None and self.channels > ctx.hidden:
            yield "channels", f"the branch's input has {ctx.hidden} channels, found {self.channels}"
        if self.input == "hidden" and self.start and not self.bias:
            yield "start", "is where the bias starts, and this gate has none; set bias: true"


class _Gate(Module, of=OutputGate):
    def __init__(self, spec: OutputGate, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.shape = spec.scores(ctx)
        self.shared = spec.heads == "shared"
        named = spec.activation in ACTIVATIONS
        self.activation = spec.activation if named else function_of(spec.activation)
        self.combine = spec.combine
        self.channels = spec.channels
        self.projection: Linear | Itself | None = None
        self.outer: Linear | None = None
        if spec.input == "hidden":
            std, rank, count = ctx.std if spec.std is None else spec.std, spec.inner(ctx), math.prod(self.shape)
            if inner := rank or spec.channels:
                self.projection = Linear(ctx.hidden, rank, std=std) if rank else Itself()
                self.outer = Linear(inner, count, std=std, bias=spec.bias, start=spec.start)
            else:
                self.projection = Linear(ctx.hidden, count, std=std, bias=spec.bias, start=spec.start)
        else:
            self.constant = undecayed(self.shape, constant(spec.start))
        per_token = spec.input == "hidden" and spec.heads == "specific" and spec.granularity != "scalar"
        granularity = spec.granularity if per_token else "other"
        kind = spec.activation if named else "function"
        options = {"granularity": granularity, "activation": kind, "combine": spec.combine}
        self.gate: Callable[..., Tensor] = ctx.select("gate", **options)
        self.path, self.asked = ctx.path, options
        self.norm_gate: Callable[..., Tensor] | None = None
        sigmoid = (spec.activation, spec.combine) == ("sigmoid", "multiply")
        self.opens = ctx.heads is not None and granularity != "other" and sigmoid  # as attention can

    def scores(self, projected: Tensor) -> Tensor:
        """The scores of what the projection gave, before heads are averaged."""
        read = projected if self.channels is None else projected[..., : self.channels]
        whole: Tensor = read if self.outer is None else self.outer(read)
        return whole.unflatten(-1, self.shape)  # type: ignore[no-any-return]

    def opening(self, projected: Tensor) -> Tensor:
        """The scores `[batch, heads, time, head_dim or 1]` of a gate that attention multiplies its outputs by."""
        return self.scores(projected).transpose(1, 2)

    def forward(self, y: Tensor, call: Call, projected: Tensor | None = None) -> Tensor:
        scores = self.constant if projected is None else self.scores(projected)
        if self.shared:
            scores = scores.mean(-2, keepdim=True)
        gated = self.gate(y, scores, self.activation, self.combine)
        if call.watch is not None:
            opened = activation_of(self.activation)(at_least_float32(scores))
            call.watch.tell("gate", self.path, call.padding, scores=opened, before=y, after=gated)
        return gated

    def takes(self, norm: Any, node: str, ctx: BuildContext) -> bool:
        """Whether the norm before it, whose path is `node`, is computed in the same pass."""
        if ctx.heads is None or norm.joined or self.asked["granularity"] == "other" or callable(self.activation):
            return False
        asked = {**self.asked, "kind": norm.asked()["kind"]}
        for place, why in ((node, "that of the gate after it"), (self.path, "that of the norm before it")):
            self.norm_gate = fused.one_pass(ctx, place, "norm_gate", why, **asked)
        return self.norm_gate is not None

    def after(self, norm: Factors, y: Tensor, call: Call, projected: Tensor) -> Tensor:
        """y `[batch, time, heads, head_dim]` normed, then gated."""
        assert self.norm_gate is not None
        scores, (kind, weight, bias, eps) = self.scores(projected), norm
        return self.norm_gate(y, scores, weight, bias, eps, kind, self.activation, self.combine)


@Gate.register("activation")
class ActivationGate(Gate):
    """y' = act(y): a non-linearity without parameters (arXiv:2505.06708, table 3, row 6)."""

    function: Activation = "silu"

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(activations=kept_of(self.function)[0] * ctx.elements(tokens))


class _Activation(Elementwise, of=ActivationGate):
    pass


Gate.alias("rezero", type="gate", granularity="scalar", input="none", activation="identity")  # arXiv:2003.04887
Gate.alias("layer_scale", type="gate", input="none", activation="identity", start=1e-4)  # arXiv:2103.17239
