"""What branches share in which a sequence reads itself: a mask, the attention through it, and what decoding holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Mask, Weights
from archlab.arch_dsl.parts.state import padding_of_keys, recent
from archlab.arch_dsl.primitives.heads import MultiHead, MultiHeadModule
from archlab.arch_dsl.primitives.masks import Causal
from archlab.arch_dsl.primitives.weights import Softmax, Weighing
from archlab.kernels.attention import CAUSAL, FULL, Pattern
from archlab.kernels.attention.listed import elements, listed
from archlab.kernels.attention.torch_ops import stretches


class SelfAttention(MultiHead):
    """Attention of a sequence to itself, through a mask. `more` learned keys may stand before those of tokens."""

    mask: Mask = Causal()
    weights: Weights = added(default=Softmax())

    @property
    def softmax(self) -> bool:
        return isinstance(self.weights, Softmax)

    @property
    def more(self) -> int:
        """How many learned keys every query reads beside those of tokens."""
        return 0

    def facts(self) -> dict[str, Any]:
        ahead = self.mask.looks_ahead or self.mask.reads_prefix
        return {"documents": self.mask.documents, "window": self.mask.window, "ahead": ahead}

    def cached(self) -> int:
        """How many numbers decoding holds of a token, beside those of scores; the spec must be resolved."""
        widths = self.widths()
        return widths["key"] + widths["value"]

    def attend_cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """What the attention itself costs; the spec must be resolved."""
        own, sizes, more = self.places(ctx)["scores"], self.sizes(), self.more
        pattern = self.mask.pattern(sizes.heads)
        by_head = pattern.blocks is not None and not pattern.blocks.cover(tokens)
        drawn = self.drawn(pattern, tokens) if by_head else 0
        masked = more > 0 or self.mask.documents or pattern not in (CAUSAL, FULL)
        seen = min(tokens, self.mask.window or tokens)
        pairs = 0 if more else self.products(pattern, tokens)
        a_pair = 2 * sizes.heads * (sizes.head_dim + sizes.value_dim)
        kept = self.kept(own, tokens, tokens + more, sizes.heads if by_head else int(masked), pairs) + drawn
        return Cost(
            flops_matmul=a_pair * tokens * (tokens + more),
            flops_model=a_pair * (self.pairs(tokens) + tokens * more),
            activations=kept if self.softmax else self.kept_by_weights(tokens),
            cache=seen * (self.cached() + sum(item.per_key(own) for item in self.scores)),
        )

    def pairs(self, tokens: int) -> int:
        """How many (query, key) pairs the mask and the scores leave to a head."""
        return min(self.mask.pairs(tokens), *(item.pairs(tokens) for item in self.scores), tokens * tokens)

    def kept_by_weights(self, tokens: int) -> int:
        """What attention keeps whose weights are no softmax, beside what these count themselves: queries, keys, values,
        outputs, and matrices of all pairs. The spec must be resolved."""
        heads, kv_heads, head_dim, value_dim = self.sizes()
        keys, capped = tokens + self.more, any(item.kind == "softcap" for item in self.scores)
        vectors = (tokens * heads + keys * kv_heads) * (head_dim + value_dim)
        return vectors + (self.weights.squares + capped) * heads * tokens * keys

    def weights_cost(self, ctx: BuildContext, tokens: int) -> dict[str, Cost]:
        """What weights cost that are no softmax; the spec must be resolved."""
        return {} if self.softmax else {"weights": self.weights.cost(self.weights_place(ctx), tokens)}

    def weights_place(self, ctx: BuildContext) -> BuildContext:
        """The context of the weights, with the width of a value; the spec must be resolved."""
        return self.places(ctx)["sdpa"].where(site="weights").at("weights")

    def products(self, pattern: Pattern, tokens: int) -> int:
        """How many pairs plain products compute of a head where they do it some queries at a time (kernels/attention);
        0 where another implementation is chosen, or all pairs are."""
        kinds = {item.kind for item in self.scores}
        if self.mask.documents or self.mask.reads_prefix or self.mask.leading:
            return 0
        if pattern.blocks is not None:
            return elements(pattern, tokens)[0] if not self.scores and listed(pattern, tokens) else 0
        if pattern.order == "full":
            return tokens * tokens if "bias" in kinds else 0
        if pattern == CAUSAL and kinds <= {"softcap"}:
            return 0
        return sum((part.stop - part.start) * (part.last - part.first) for part in stretches(tokens, tokens, pattern))

    def drawn(self, pattern: Pattern, tokens: int) -> int:
        """What drawing blocks for each head keeps: copies of keys and values and the places that they come from, in
        integers of 64 bits; or a byte per pair, from which the mask is made. The spec must be resolved."""
        heads, _, head_dim, value_dim = self.sizes()
        if self.more or not self.products(pattern, tokens):
            return heads * tokens * tokens // 4
        assert pattern.blocks is not None
        copied = elements(pattern, tokens)[1]
        return heads * (copied * (head_dim + value_dim) + 2 * (copied // pattern.blocks.size))

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        found = super().check(ctx, path)
        if wrong := self.mask.check(ctx, f"{path}.mask"):
            return found + wrong  # the rest would ask a pattern that is none
        gaps = self.mask.pattern(self.heads).stride is not None
        for index, item in enumerate(self.scores):
            where = f"{path}.scores.{index}"
            if item.gapless and gaps:
                message = f"has all later queries read a key, and {self.mask.type} shows it to some of them alone"
                found.append(Problem(where, f"{item.type} {message}", item.mark()))
            elif self.mask.leading and item.kind == "bias":
                message = "numbers keys by their places, and decoding drops those between the first and the window"
                found.append(Problem(where, f"{item.type} {message}; leave out `first` of the mask", item.mark()))
            elif not self.softmax and item.kind == "sinks":
                message = f"is a logit of a softmax, and the weights are {self.weights.type}"
                found.append(Problem(where, f"{item.type} {message}", item.mark()))
            elif not self.softmax and getattr(item, "prune", None) is not None:
                message = f"bounds weights of a softmax, and the weights are {self.weights.type}"
                found.append(Problem(f"{where}.prune", message, item.mark("prune")))
        if self.head_dim is None and ctx.d_model % (self.maps * self.heads):
            return found
        return found + self.weights.check(self.resolve(ctx).weights_place(ctx), f"{path}.weights")


class SelfAttentionModule(MultiHeadModule):
    """The mask, and which keys it hides; `weights` compute the attention where they are no softmax."""

    weights: Weighing | None

    # B batch, T time, S keys (those that decoding holds, and T), H heads, K key/value heads, D head_dim
    def __init__(self, spec: SelfAttention, ctx: BuildContext, pattern: Pattern | None = None) -> None:
        """`pattern` is what attention is asked for, by default that of the mask."""
        mask = spec.mask
        asked = mask.pattern(spec.sizes().heads, ctx.depth) if pattern is None else pattern
        super().__init__(spec, ctx, asked, documents=mask.documents, prefix=mask.reads_prefix)
        self.window, self.documents, self.reads_prefix = mask.window, mask.documents, mask.reads_prefix
        self.leading = mask.leading
        self.looks_ahead = mask.looks_ahead

    def choose(self, spec: Any, ctx: BuildContext, ask: dict[str, bool]) -> None:
        self.weights = None
        if spec.softmax:
            super().choose(spec, ctx, ask)
            return
        self.weights = spec.weights.build(spec.weights_place(ctx))
        self.apart = self.opens = False
        ctx.note("attention", "torch", f"{spec.weights.type} weights: plain products of all pairs, no kernel has them")

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, given: dict[str, Any]) -> Tensor:
        if self.weights is None:
            return super().weigh(q, k, v, gate, given)
        out: Tensor = self.weights(q, k, v, self.pattern, self.scale, self.scores.softcap, **given)
        return out

    def tell(self, call: Call, q_BTHD: Tensor, k_BSKD: Tensor, o_BTHD: Tensor, given: dict[str, Any]) -> None:
        """Of weights that are no softmax, and so no probabilities, the outputs alone."""
        if self.weights is None:
            super().tell(call, q_BTHD, k_BSKD, o_BTHD, given)
        elif call.watch is not None:
            call.watch.tell("heads", self.path, call.padding, output=o_BTHD)

    def refuse(self, call: Call) -> None:
        """Raises ValueError for a call that decodes what must be read at once."""
        if call.held is not None and (self.looks_ahead or (self.documents and call.documents is not None)):
            what = "a mask that looks ahead reads" if self.looks_ahead else "documents are kept apart by"
            raise ValueError(f"{self.path}: {what} all tokens at once, and cannot decode them one after another")

    def held(self, name: str, new: Tensor, call: Call) -> Tensor:
        """`new` `[B, T, …]` after what decoding holds by that name."""
        return recent(call, self.path, new, self.window, f".{name}", self.leading)

    def masked(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, products: Iterator[Tensor], call: Call) -> Tensor:
        """The update `[B, T, d_model]` from queries, keys and values: what the scores and the mask make of them."""
        hidden = self.hidden(q_BTHD, k_BSKD, call)
        if self.apart and call.positions is None:
            given = self.scores.parts(q_BTHD, k_BSKD, call, products)
        else:
            given = {"bias": self.scores(q_BTHD, k_BSKD, call, products)}
        return self.shown(q_BTHD, k_BSKD, v_BSKD, products, call, given, hidden)

    def hidden(self, own: Tensor, keys: Tensor, call: Call) -> dict[str, Tensor | None]:
        """What the call hides beside the mask's pattern: `own` `[batch, time, …]` are its queries, `keys` those that
        decoding holds too. Raises ValueError for a prefix that was not read to its end."""
        prefix = call.prefix if self.reads_prefix else None
        if call.held is not None and prefix is not None and bool((prefix > keys.shape[1]).any()):
            raise ValueError(f"{self.path}: a prefix is read at once, and here its end was not read yet")
        documents = call.documents if self.documents else None
        return {"prefix": prefix, "documents": documents, "padding": self.key_padding(own, keys, call)}

    def shown(
        self, q: Tensor, k: Tensor, v: Tensor, products: Iterator[Tensor], call: Call, given: dict[str, Any],
        hidden: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """The update, with the biases that are `given` and what the call has `hidden`."""
        return self.attention(q, k, v, products, call, **given, **hidden)

    def key_padding(self, own: Tensor, keys: Tensor, call: Call) -> Tensor | None:
        """Which of all keys `[batch, keys]` nothing may read; `own` `[batch, time, …]` are the queries of this call."""
        return padding_of_keys(call, self.path, own, keys.shape[1], self.window, self.leading)
