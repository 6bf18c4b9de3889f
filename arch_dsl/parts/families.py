"""The families of primitives and what each kind must offer: build a module, and say what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.spec import Family, added
from archlab.arch_dsl.parts import fused
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.layers import Site, numbered
from archlab.kernels.attention import Pattern


class Primitive(Family):
    """One typed component. A member defines its spec, its module, its cost, and what it cannot be combined with."""

    by_layer: ClassVar[bool] = False  # whether it differs from layer to layer, so that no shared branch can hold it
    module: ClassVar[Callable[..., nn.Module] | None] = None  # made from the resolved spec and the context

    def build(self, ctx: BuildContext) -> nn.Module:
        """The module that computes it; `forward(x, call)` keeps the shape of x."""
        module = type(self).module
        if module is None:
            raise TypeError(f"{type(self).__name__} has no module")
        return module(self.resolve(ctx), ctx)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """Parameters, FLOPs and memory over a sequence of `tokens` tokens; see Cost for what is counted where."""
        return Cost()

    def resolve(self, ctx: BuildContext) -> Self:
        """The same choice with everything that can be derived from its place filled in."""
        return self

    def wrong(self, ctx: BuildContext) -> Iterable[tuple[str, str]]:
        """What makes no sense at this place: the field ("" for all of it), and the reason."""
        return ()

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        """The same as problems, with those of its parts."""
        found = self.wrong(ctx)
        return [Problem(f"{path}.{name}".removesuffix("."), message, self.mark(name)) for name, message in found]


class Module(nn.Module):
    """The module of a primitive: `class _Rope(Module, of=Rope)` is what `Rope.build` makes."""

    def __init_subclass__(cls, of: type[Primitive] | None = None) -> None:
        super().__init_subclass__()
        if of is not None:
            of.module = cls

    def __init__(self, spec: Primitive, ctx: BuildContext) -> None:
        super().__init__()


class Elementwise(Module):
    """y = act(x) with the `function` of its spec."""

    def __init__(self, spec: Any, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.activation = function_of(spec.function)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return self.activation(x)


class Norm(Primitive):
    """Rescales the last dimension."""

    noun: ClassVar[str] = "norm"
    share: Literal["none", "stack"] = added(default="none")


class Gate(Primitive):
    """Modulates a tensor by an activation of another one."""

    noun: ClassVar[str] = "gate"
    share: Literal["none", "stack"] = added(default="none")


class Scale(Primitive):
    """Maps every element by a function of it alone, or of it and its vector: a factor, a cap, a threshold."""

    noun: ClassVar[str] = "scale"


class Carry(Primitive):
    """Mixes in what another position or another layer holds."""

    noun: ClassVar[str] = "carry"
    share: Literal["none", "stack"] = added(default="none")


class Adapter(Primitive):
    """Changes what a trained branch gives by few parameters of its own."""

    noun: ClassVar[str] = "adapter"
    share: Literal["none", "stack"] = "none"


class Position(Primitive):
    """Adds positions to the token embeddings."""

    noun: ClassVar[str] = "positional encoding"


class Rotary(Primitive):
    """Rotates queries and keys by their positions."""

    noun: ClassVar[str] = "rotary encoding"


class Score(Primitive):
    """Changes the attention logits: by a bias, a cap (first in the list), or a learned sink (last in the list).

    The module of a bias has `forward(q, k, call)`, or `forward(q, k, call, projected)` if it has a `projection` of
    the branch's input, with q `[batch, time, heads, head_dim]` and k `[batch, time, kv_heads, head_dim]` as they meet;
    it gives what is added to the scaled logits, broadcastable to `[batch, heads, time, time]`.
    """

    noun: ClassVar[str] = "score modifier"
    kind: ClassVar[Literal["bias", "softcap", "sinks"]] = "bias"
    positional: ClassVar[bool] = False  # whether it is how positions enter, and so what the knob `positional` sets
    fading: ClassVar[bool] = False  # whether it adds to no other key more than to the query's own
    of_pairs: ClassVar[bool] = False  # whether it is made of queries and keys, and so has gradients without parameters
    gapless: ClassVar[bool] = False  # whether a key that a query cannot read must be hidden from all later queries
    hides: ClassVar[bool] = False  # whether it hides some keys and leaves the others as they are, without gradients
    share: Literal["none", "stack"] = added(default="none")

    def per_key(self, ctx: BuildContext) -> int:
        """How many numbers decoding keeps for it beside each key."""
        return 0

    def pairs(self, tokens: int) -> int:
        """How many (query, key) pairs of a sequence it leaves to a head."""
        return tokens * tokens

    def learned(self, ctx: BuildContext) -> bool:
        """Whether what it adds has gradients."""
        return self.kind == "bias" and not self.hides and bool(self.of_pairs or self.cost(ctx, 1).parameters)


class Weights(Primitive):
    """Makes the weights with which attention reads its values out of the logits.

    The module is a `Weighing` (primitives/weights.py), which keeps `squares` matrices of all pairs for the backward
    pass. Kernels stand in the place of that of `softmax`.
    """

    noun: ClassVar[str] = "weighting"
    squares: ClassVar[int] = 1


class Mask(Primitive):
    """Says which key positions a query position may read.

    `window` is how many keys decoding needs to hold, None for all; `leading` how many of them are the first of the
    sequence, where the others are the last. A mask that `looks_ahead` reads positions that come
    later, so that no causal objective can train it and it cannot decode; one that `reads_prefix` does so only within
    the prefix that a call gives.
    """

    noun: ClassVar[str] = "mask"
    window: ClassVar[int | None] = None
    leading: ClassVar[int] = 0
    looks_ahead: ClassVar[bool] = False
    reads_prefix: ClassVar[bool] = False
    documents: bool = added(default=False)

    def pattern(self, heads: int = 1, depth: int = 0) -> Pattern:
        """The pairs, for the kernels; of `heads` heads in the layer `depth`, where they differ."""
        raise TypeError(f"{type(self).__name__} has no pattern")

    def pairs(self, tokens: int) -> int:
        """How many (query, key) pairs the mask keeps in a sequence of `tokens` tokens, for one head."""
        return _pairs(self.pattern(), tokens)


@lru_cache(maxsize=4096)
def _pairs(pattern: Pattern, tokens: int) -> int:
    """Counted once, as plans ask millions of times."""
    return pattern.pairs(tokens, tokens)


class Decay(Primitive):
    """Discounts what the state of a linear recurrence holds, from token to token.

    The module has `projections()`, its linear maps of the branch's input, and `forward(products, call)`, which takes
    their products and gives a pair: log f <= 0 as `[heads]`, `[batch, time, heads]` or, one for each channel of the
    keys (`channels`), `[batch, time, heads, head_dim]`; and the step `[batch, time, heads]` by which values are
    multiplied, or None.
    """

    noun: ClassVar[str] = "decay"
    channels: ClassVar[bool] = False
    share: Literal["none", "stack"] = added(default="none")


class Join(Primitive):
    """Brings a branch's update back to the stream; `forward(stream, update, call)`."""

    noun: ClassVar[str] = "join"


class Branch(Primitive):
    """Reads the residual stream, transforms, joins back; `forward(stream, call)`.

    Of a `recurrent` one `flops_model` counts, as papers do, what is done to each element of its state, be it a product
    of matrices or not.
    """

    noun: ClassVar[str] = "branch"
    recurrent: ClassVar[bool] = False
    unshared: ClassVar[tuple[str, ...]] = ()  # the fields whose parts are each layer's own where the branch is shared
    share: Literal["none", "stack"] = added(default="none")


def build_shared(item: Primitive, ctx: BuildContext) -> nn.Module:
    """The module of a primitive; with `share: stack`, the one that the first layer owns.

    Where some of its parts are each layer's own, it is another module, all other parts of which are the first layer's.
    """
    if getattr(item, "share", "none") == "none":
        return item.build(ctx)
    key = place_of(ctx)
    if key not in ctx.shared:
        ctx.shared[key] = item.build(ctx)
    module: nn.Module = ctx.shared[key]
    own = [name for name in getattr(item, "unshared", ()) if getattr(item, name)]
    if not own or module.path == ctx.path:
        return module
    mine = item.build(ctx)
    for name, part in (*module.named_children(), *module.named_parameters(recurse=False)):
        if name not in own:
            setattr(mine, name, part)
    return mine


def shared_cost(item: Primitive, ctx: BuildContext, tokens: int) -> Cost:
    """What a primitive costs; with `share: stack` its parameters count where they are first met."""
    found = item.cost(ctx, tokens)
    if getattr(item, "share", "none") == "none":
        return found
    key = place_of(ctx)
    owner = ctx.shared.setdefault(key, ctx.path)
    if owner == ctx.path:
        return found
    own = {name: found.children[name] for name in getattr(item, "unshared", ()) if name in found.children}
    return Cost.total(found.without_parameters().children | own) if own else found.without_parameters()


def place_of(ctx: BuildContext) -> str:
    """A path without the number of the layer."""
    return ".".join(step for step in ctx.path.split(".") if not step.isdigit())


def build_site(items: tuple[Primitive, ...], ctx: BuildContext, name: str) -> Site:
    """The primitives of one site as a module."""
    place = ctx.where(site=name)
    own = zip(items, numbered(item.type for item in items), strict=True)
    return fused.site([(label, build_shared(item, place.at(f"{name}.{label}"))) for item, label in own], name, place)


def site_cost(items: tuple[Primitive, ...], ctx: BuildContext, name: str, tokens: int) -> Cost:
    """What the primitives of one site cost together."""
    if not items:
        return Cost()
    place = ctx.where(site=name)
    children: dict[str, Cost] = {}
    for item, label in zip(items, numbered(item.type for item in items), strict=True):
        children[label] = shared_cost(item, place.at(f"{name}.{label}", held=ctx.held and not children), tokens)
    return Cost.total(children)


def check_site(items: tuple[Primitive, ...], ctx: BuildContext, path: str) -> list[Problem]:
    """What is wrong with the primitives of one site, whose name is the last step of `path`."""
    if not items:
        return []
    place = ctx.where(site=path.rpartition(".")[2])
    return [found for index, item in enumerate(items) for found in check_part(item, place, f"{path}.{index}")]


def check_part(item: Primitive, ctx: BuildContext, path: str) -> list[Problem]:
    """What is wrong with a primitive that layers may share."""
    found = item.check(ctx, path)
    if getattr(item, "share", "none") != "none" and not item.cost(ctx, 1).parameters:
        message = f"{item.type} has no parameters here that layers could share"
        found.append(Problem(f"{path}.share", message, item.mark("share")))
    return found


def check_sites(holder: Primitive, places: Mapping[str, BuildContext], path: str) -> list[Problem]:
    """What is wrong with the primitives of the sites of a branch, given by their names with the context of each."""
    return [found for name in places for found in check_site(getattr(holder, name), places[name], f"{path}.{name}")]
