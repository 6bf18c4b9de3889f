"""Linear attention with a state that decays: one branch for retention, GLA, HGRN2, Mamba-2 and DeltaNet."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from archlab import kernels
from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation, ProjectionNotation, Projections, SizeNotation, multiple_of
from archlab.arch_dsl.language.spec import Count, Positive
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Decay, build_shared, check_part, check_sites, shared_cost, site_cost
from archlab.arch_dsl.parts.layers import Linear, constant, parameter, writing
from archlab.arch_dsl.parts.saved_for_backward import by_periods, kept_by, kept_of
from archlab.arch_dsl.parts.state import opens_document
from archlab.arch_dsl.primitives.branch import Headed, SublayerModule, linear, projections_of
from archlab.arch_dsl.primitives.decays import each_token, forgetting, only_where, stepped
from archlab.kernels.activations import at_least_float32
from archlab.kernels.linear_recurrence import width_class

NAMES = ("query", "key", "value", "output")


class Sizes(NamedTuple):
    """Heads, heads of queries and keys, channels of a query or key, channels of a value."""

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int

    def widths(self) -> dict[str, int]:
        """The widths of queries, keys and values, all heads together."""
        keys = self.key_heads * self.head_dim
        return {"query": keys, "key": keys, "value": self.heads * self.value_dim}


@Branch.register("linear_attention")
class LinearAttention(Headed):
    """o_t = scale S_t^T q_t per head, with the state S_t = f_t S_(t-1) + k_t v_t^T, then one output map: linear
    attention (arXiv:2006.16236, eq. 16 to 20) whose state fades by a `decay` f; without one f is 1.

    With `rule: delta` what the state already answers to k_t is taken back first: S_t = f_t S_(t-1) + beta_t k_t (v_t -
    (f_t S_(t-1))^T k_t)^T, with `beta` of a map of the branch's input per head (arXiv:2406.06484, eq. 3;
    arXiv:2412.06464, eq. 10). A beta up to 2, `2 * sigmoid(x)`, allows negative eigenvalues (arXiv:2411.12537).

    `key_heads` groups heads over fewer queries and keys (Mamba-2's B and C). `head_dim` is the size of a query or key,
    `value_dim` that of a value, by default the same; `2x` stands for 2 d_model for all heads together, and head_dim
    defaults to 1x. `scale` defaults to 1 / sqrt(head_dim). With `keys: decay` keys are 1 - f (HGRN2, arXiv:2404.07904,
    eq. 4). `skip` adds D_h v_t with a learned D that starts at 1 (Mamba-2, arXiv:2405.21060). With `documents` the
    state starts anew at each document. `query`, `key` and `value` act after the maps, `sdpa` on each head's output.
    """

    ops: ClassVar[tuple[str, ...]] = ("linear_recurrence",)
    recurrent: ClassVar[bool] = True
    order: ClassVar[tuple[str, ...]] = (
        "pre", "post", "join", "heads", "key_heads", "head_dim", "value_dim", "scale", "decay", "rule", "beta", "keys",
        "skip", "documents", "bias", "zero", "query", "key", "value", "sdpa", "share",
    )  # fmt: skip
    examples = (
        {"heads": 4},
        {"heads": 4, "key_heads": 2, "head_dim": 5, "value_dim": 6, "bias": True, "decay": "mamba2", "skip": True},
        {"heads": 2, "decay": "low_rank", "keys": "decay", "documents": True, "value_dim": 6},
        {"heads": 2, "rule": "delta", "key": ["l2norm"], "zero": ["output"], "scale": 1.0},
    )
    heads: Annotated[int | str, SizeNotation()]
    key_heads: Count | None = None
    head_dim: Annotated[int | str | None, SizeNotation(optional=True)] = None
    value_dim: Annotated[int | str | None, SizeNotation(optional=True)] = None
    scale: Positive | None = None
    decay: Decay | None = None
    rule: Literal["add", "delta"] = "add"
    beta: Activation = "sigmoid"
    keys: Literal["hidden", "decay"] = "hidden"
    skip: bool = False
    documents: bool = False
    bias: Annotated[Projections, ProjectionNotation(*NAMES)] = False
    zero: Annotated[Projections, ProjectionNotation(*NAMES)] = False

    def sizes(self, d_model: int) -> Sizes:
        """All sizes as numbers, rounded down where `uneven` has something to say."""
        heads, keys, values = self.heads, self.head_dim, self.value_dim
        if isinstance(heads, str):
            channels = next((size for size in (values, keys) if isinstance(size, int)), 1)
            heads = max(int(multiple_of(heads, d_model)) // channels, 1)
        keys, values = (
            max(int(multiple_of(size, d_model)) // heads, 1) if isinstance(size, str) else size
            for size in ("1x" if keys is None else keys, values)
        )
        assert isinstance(keys, int)
        return Sizes(heads, self.key_heads or heads, keys, keys if values is None else int(values))

    def resolve(self, ctx: BuildContext) -> Self:
        sizes = self.sizes(ctx.d_model)
        scale = None if self.scale == sizes.head_dim**-0.5 else self.scale
        decay = None if self.decay is None else self.decay.resolve(self.places(ctx)[2])
        return self.replace(**sizes._asdict(), scale=scale, decay=decay)

    @property
    def kind(self) -> Literal["none", "constant", "token", "channel"]:
        """What the decay is one for each of."""
        if self.decay is None:
            return "none"
        if self.decay.type in ("constant", "lightning"):
            return "constant"
        return "channel" if self.decay.channels else "token"

    def state(self, sizes: Sizes) -> int:
        """The elements of the states of all heads."""
        return sizes.heads * sizes.head_dim * sizes.value_dim

    def kept(self, sizes: Sizes, learned: bool, tokens: int) -> int:
        """What the recurrence keeps for the backward pass; `learned` says whether the decay has gradients."""
        return by_periods(partial(_kept, sizes, self.kind, self.rule == "delta", learned), tokens, PERIOD)

    def keeps_values(self) -> bool:
        """Whether values are kept beside what the recurrence keeps, as they are multiplied before it or after it."""
        return bool(self.skip or getattr(self.decay, "step", False))

    def value_heads(self, d_model: int) -> tuple[int, int]:
        sizes = self.sizes(d_model)
        return sizes.heads, sizes.value_dim

    def output_width(self, ctx: BuildContext) -> int | None:
        return self.sizes(ctx.d_model).widths()["value"]

    def places(self, ctx: BuildContext) -> tuple[BuildContext, BuildContext, BuildContext]:
        """The contexts of queries and keys, of values and outputs, and of the decay."""
        sizes = self.sizes(ctx.d_model)
        scale = self.scale or sizes.head_dim**-0.5
        keys = ctx.where(
            heads=sizes.key_heads, width=sizes.head_dim, logit_scale=scale, documents=self.documents, held=False
        )
        values = keys.where(heads=sizes.heads, width=sizes.value_dim)
        return keys, values, keys.at("decay", heads=sizes.heads, site="decay")

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """The FLOPs of the recurrent form: write, read, with the delta rule erase, at 2 for each element of the state;
        in `flops_model` one more for the decay, which is no product of matrices, as arXiv:2503.02130 counts in table 6.
        """
        sizes, (keys, values, decay) = self.sizes(ctx.d_model), self.places(ctx)
        widths = sizes.widths()
        read = {"query": self.read(ctx, tokens)}
        parts = {
            f"{name}_projection": self.map_cost(name, tokens, ctx.d_model, width, read.get(name, 0))
            for name, width in widths.items()
            if name != "key" or self.keys == "hidden"
        }
        for name, place in (("query", keys), ("key", keys), ("value", values)):
            parts[name] = site_cost(getattr(self, name), place, name, tokens)
        if self.decay is not None:
            parts["decay"] = shared_cost(self.decay, decay, tokens)
        own, result = kept_of(self.beta)
        if self.rule == "delta":
            kept = (own + result) * sizes.heads * tokens
            parts["beta_projection"] = Cost.product(tokens, ctx.d_model, sizes.heads).keeping(kept)
        products, elements = 4 if self.rule == "add" else 6, self.state(sizes)
        factors = widths["value"] if self.keeps_values() else 0
        factors += sizes.heads * sizes.head_dim if self.keys == "decay" else 0  # exp(log f)
        learned = self.decay is not None and self.decay.cost(decay, 1).parameters > 0
        parts["recur"] = Cost(
            parameters=sizes.heads if self.skip else 0,
            flops_matmul=products * tokens * elements,
            flops_model=(products + (self.decay is not None)) * tokens * elements,
            activations=self.kept(sizes, learned, tokens) + tokens * factors,
            cache=elements,
        )
        parts["sdpa"] = site_cost(self.sdpa, values, "sdpa", tokens)
        width = widths["value"]
        parts["output_projection"] = self.map_cost("output", tokens, width, ctx.d_model, tokens * width)
        return Cost.total(self.outer_cost(ctx, tokens) | parts)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        problems = super().check(ctx, path)
        if any(self._uneven(ctx.d_model)):
            return problems  # the rest would only echo it
        keys, values, decay = self.places(ctx)
        if self.decay is not None:
            problems += check_part(self.decay, decay, f"{path}.decay")
        return problems + check_sites(self, {"query": keys, "key": keys, "value": values, "sdpa": values}, path)

    def _uneven(self, d_model: int) -> Iterator[tuple[str, str]]:
        """The sizes that come to no whole number."""
        channels = next((size for size in (self.value_dim, self.head_dim) if isinstance(size, int)), None)
        if isinstance(self.heads, str):
            if channels is None:
                yield "heads", f"{self.heads} needs a value_dim or head_dim in channels, which says how many that are"
            elif (total := multiple_of(self.heads, d_model)) % channels or not total:
                yield "heads", f"heads of {channels} channels do not make up {self.heads} d_model, {total:g} channels"
            return
        for name, size in (("head_dim", self.head_dim or "1x"), ("value_dim", self.value_dim)):
            if isinstance(size, str) and (total := multiple_of(size, d_model)) % self.heads:
                name = "heads" if self.head_dim is None and name == "head_dim" else name
                yield name, f"{self.heads} heads do not divide {total:g} channels, {size} d_model {d_model}"

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if uneven := list(self._uneven(ctx.d_model)):
            yield from uneven
            return
        sizes = self.sizes(ctx.d_model)
        if sizes.heads % sizes.key_heads:
            yield "key_heads", f"{sizes.key_heads} heads of queries and keys do not divide {sizes.heads} heads"
        if self.rule == "add" and self.beta != "sigmoid":
            yield "beta", "says how much the delta rule writes; it needs rule: delta"
        if self.keys == "decay":
            if self.decay is None or not self.decay.channels:
                given = "there is none" if self.decay is None else f"{self.decay.type} has one for each head"
                yield "keys", f"are 1 - f for each channel, which needs a decay with channels; {given}"
            if sizes.key_heads != sizes.heads:
                yield "key_heads", "must be all heads where keys come from the decay, which every head has"
            for name in ("bias", "zero"):
                if getattr(self, name) == ("key",):
                    yield name, "there is no map of keys, which come from the decay"


PERIOD = 64  # tokens; the chunks of the recurrence divide it


@lru_cache(maxsize=4096)
def _kept(sizes: Sizes, kind: str, delta: bool, learned: bool, tokens: int) -> int:
    """What the recurrence keeps for the backward pass as it is computed on a CPU."""
    heads, groups, keys, values = sizes
    per_token = (1, tokens, heads)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (1, tokens, groups, keys),
        "k": (1, tokens, groups, keys),
        "v": (*per_token, values),
    }
    if kind != "none":
        shapes["log_decay"] = {"constant": (heads,), "token": per_token, "channel": (*per_token, keys)}[kind]
    if delta:
        shapes["beta"] = per_token
    recur = kernels.select("linear_recurrence", kernels.Device.parse("cpu"), torch.float32, decay=kind, delta=delta)
    return kept_by(recur.call, shapes, fixed="" if learned else "log_decay")


class _LinearAttention(SublayerModule, of=LinearAttention):
    # B batch, T time, H heads, G heads of queries and keys, D head_dim, V value_dim
    def __init__(self, spec: LinearAttention, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        keys, values, decay = spec.places(ctx)
        sizes = spec.sizes(ctx.d_model)
        width = sizes.widths()
        self.query_projection = linear(spec, "query", ctx.d_model, width["query"], ctx.std)
        self.key_projection = linear(spec, "key", ctx.d_model, width["key"], ctx.std) if spec.keys == "hidden" else None
        self.value_projection = linear(spec, "value", ctx.d_model, width["value"], ctx.std * ctx.gain)
        self.beta_projection = Linear(ctx.d_model, sizes.heads, std=ctx.std) if spec.rule == "delta" else None
        self.output_projection = writing(linear(spec, "output", width["value"], ctx.d_model, ctx.residual_std))
        self.decay = build_shared(spec.decay, decay) if spec.decay is not None else None
        self.add_sites(spec, {"query": keys, "key": keys, "value": values, "sdpa": values})
        self.skip = parameter((sizes.heads,), constant(1.0)) if spec.skip else None
        self.beta = function_of(spec.beta)
        self.heads, self.key_heads, self.scale = sizes.heads, sizes.key_heads, keys.logit_scale
        self.documents = spec.documents
        asked = {"decay": spec.kind, "delta": spec.rule == "delta", "keys": width_class(sizes.head_dim)}
        self.recur = ctx.select("linear_recurrence", **asked)

    def reads(self) -> list[Linear]:
        maps = (self.query_projection, self.key_projection, self.value_projection, *self.writes())
        own = [projection for projection in maps if projection is not None]
        decay: list[Linear] = self.decay.projections() if self.decay is not None else []  # type: ignore[operator]
        return [*own, *decay, *projections_of(self.query, self.key, self.value, self.sdpa)]

    def writes(self) -> list[Linear]:
        """The maps that say how much of a token is written."""
        return [] if self.beta_projection is None else [self.beta_projection]

    def opening(self, products: Iterator[Tensor]) -> Tensor | None:
        """How much of a token is written `[batch, time, heads]`, None for all."""
        return self.beta(at_least_float32(next(products))) if self.beta_projection is not None else None

    def recurrent(
        self, q_BTGD: Tensor, k_BTGD: Tensor, v_BTHV: Tensor, log_f: Tensor | None, step: Tensor | None,
        beta: Tensor | None, call: Call,
    ) -> Tensor:  # fmt: skip
        """The outputs of the recurrence `[batch, time, heads, value_dim]`; its state is held while decoding."""
        state = None if call.held is None else call.held.get(self.path)
        written = stepped(v_BTHV, step)
        out, last = self.recur(q_BTGD, k_BTGD, written, log_decay=log_f, beta=beta, state=state, scale=self.scale)
        if call.held is not None:
            call.held[self.path] = last
        return out  # type: ignore[no-any-return]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        query = next(products).unflatten(-1, (self.key_heads, -1))
        key = next(products).unflatten(-1, (self.key_heads, -1)) if self.key_projection is not None else None
        value = next(products).unflatten(-1, (self.heads, -1))
        beta = self.opening(products)
        log_f, step = self.decay(products, call) if self.decay is not None else (None, None)
        if call.watch is not None and log_f is not None:
            call.watch.tell("decay", f"{self.path}.decay", call.padding, log_f=each_token(log_f, value))
        if key is None and log_f is not None:
            key = -torch.expm1(log_f).to(query.dtype)
        q_BTGD = self.query(query, call, products)
        k_BTGD = self.key(key, call, products)
        v_BTHV = self.value(value, call, products)
        if call.padding is not None:
            k_BTGD = k_BTGD.masked_fill(call.padding[..., None, None], 0)
            log_f = only_where(~call.padding, log_f, v_BTHV)
        if self.documents and call.documents is not None:
            log_f = forgetting(opens_document(call, self.path), log_f, v_BTHV)
        out = self.recurrent(q_BTGD, k_BTGD, v_BTHV, log_f, step, beta, call)
        o_BTHV: Tensor = out if self.skip is None else out + (self.skip[:, None] * v_BTHV).to(out.dtype)
        if call.watch is not None:
            call.watch.tell("heads", self.path, call.padding, output=o_BTHV)
        o_BTHV = self.sdpa(o_BTHV, call, products)
        return self.output_projection(o_BTHV.flatten(-2))  # type: ignore[no-any-return]
