"""Masks: which positions a query may read. With `documents: true`, none beyond its own document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from archlab.arch_dsl.language.spec import Count, Range, added
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Mask
from archlab.kernels.attention import CAUSAL, FULL, Blocks, Pattern

_Some = Annotated[int, Range(min=0)]


@Mask.register("causal")
class Causal(Mask):
    """Position i reads every position j <= i."""

    def pattern(self, heads: int = 1, depth: int = 0) -> Pattern:
        return CAUSAL

    def pairs(self, tokens: int) -> int:
        return tokens * (tokens + 1) // 2


@Mask.register("full")
class Full(Mask):
    """Position i reads every position: the mask of encoders (arXiv:1706.03762, section 3.2.3)."""

    looks_ahead: ClassVar[bool] = True

    def pattern(self, heads: int = 1, depth: int = 0) -> Pattern:
        return FULL


@Mask.register("prefix")
class Prefix(Mask):
    """Position i reads every position j <= i, and all of the prefix if it stands in it: prefix language models
    (arXiv:1910.10683, section 3.2.1).

    The call says how long the prefix of each row is; without one the mask is causal, and so is what it costs.
    """

    reads_prefix: ClassVar[bool] = True

    def pattern(self, heads: int = 1, depth: int = 0) -> Pattern:
        return CAUSAL


@Mask.register("window")
class Window(Mask):
    """Position i reads the last `size` positions, itself among them: i - size < j <= i (arXiv:2004.05150, sec. 3.1).

    With `first` it also reads the first positions of the sequence, j < first and j <= i, however far back: attention
    sinks (arXiv:2309.17453, section 3.2), or the learned vectors of a stack's `prompt`, which stand there (Hymba,
    arXiv:2411.13676, section 2.3). Decoding holds `size` + `first` keys, and rotates none anew.

    By the name `banded` it stands in GPT-3's locally banded layers (arXiv:2005.14165, section 2.1).
    """

    examples = ({"size": 3}, {"size": 3, "first": 2})

    version: ClassVar[int] = 2
    size: Count
    first: Count | None = added(default=None)

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.size + self.leading

    @property
    def leading(self) -> int:  # type: ignore[override]
        return self.first or 0

    def pattern(self, heads: int = 1, depth: int = 0) -> Pattern:
        return Pattern(window=self.size, first=self.first)

    def pairs(self, tokens: int) -> int:
        size = min(self.size, tokens)
        beyond = tokens - size  # queries that do not read everything before them
        kept = min(self.leading, beyond)
        return size * (size + 1) // 2 + beyond * size + kept * (kept + 1) // 2 + (beyond - kept) * kept

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.first and self.documents:
            yield "first", "are of the first document of a sequence alone, and documents are kept apart; leave one out"


Mask.alias("banded", type="window")


@Mask.register("local")
class Local(Mask):
    """Position i reads itself and `each_side` positions before and after it: |i - j| <= each_side, the local layers of
    encoders (arXiv:2004.05150, section 3.1; of ModernBERT, arXiv:2412.13663, section 2.1.2, with 64)."""

    examples = ({"each_side": 2},)

    looks_ahead: ClassVar[bool] = True
    each_side: Count

    def pattern(self, heads: int = 1, depth: int = 0) -> Pattern:
        return Pattern("full", window=self.each_side + 1)

    def pairs(self, tokens: int) -> int:
        size = min(self.each_side + 1, tokens)
        return tokens * (2 * size - 1) - size * (size - 1)


@Mask.register("strided")
class Strided(Mask):
    """Position i reads the last `size` positions, and every `stride`-th one before: i - size < j <= i, or i - j a
    multiple of `stride`: both parts of the strided Sparse Transformer in one head (arXiv:1904.10509, section 4.3).

    `size` defaults to `stride`, as there.
    """

    examples = ({"stride": 3}, {"stride": 4, "size": 2})

    version: ClassVar[int] = 2
    stride: Count
    size: Count | None = None

    def pattern(self, heads: int = 1, depth: int = 0) -> Pattern:
        return Pattern(window=self.size or self.stride, stride=self.stride)


@Mask.register("fixed")
class Fixed(Mask):
    """Position i reads its own stretch of `stride` positions up to itself, and the last `columns` positions of every
    stretch before: both parts of the fixed Sparse Transformer in one head (arXiv:1904.10509, section 4.3).

    By the name `chunked` there are 0 such columns: stretches are read apart, as in the layers of Llama 4 with RoPE.
    """

    examples = ({"stride": 4, "columns": 1},)

    version: ClassVar[int] = 2
    stride: Count
    columns: _Some

    def pattern(self, heads: int = 1, depth: int = 0) -> Pattern:
        return Pattern(stride=self.stride, columns=self.columns)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.columns > self.stride:
            yield "columns", f"must be at most the stride {self.stride}, found {self.columns}"


Mask.alias("chunked", type="fixed", columns=0)


@Mask.register("bigbird")
class BigBird(Mask):
    """Blocks of `block` positions read the `window` blocks around them, `globals` blocks at the ends of the sequence,
    and `random` others: BigBird, internal construction (arXiv:2007.14062, section 2 and appendix E.1).

    Half of the global blocks stand at the start, the rest at the end; they read everything, and all read them. Each
    head of each layer draws its random blocks by `seed`. Sequences of at most window + globals + 2 random blocks read
    everything, as in the published code.
    """

    examples = (
        {"block": 1, "random": 1},
        {"block": 1, "window_blocks": 1, "globals": 1, "random": 1},
        {"block": 1, "random": 2, "seed": 3},
    )

    version: ClassVar[int] = 2
    looks_ahead: ClassVar[bool] = True
    block: Count = 64
    window_blocks: Annotated[int, Range(min=1)] = 3
    globals: _Some = 2
    random: _Some = 3
    seed: _Some = 0

    def pattern(self, heads: int = 1, depth: int = 0) -> Pattern:
        seed = self.seed + depth
        return Pattern("full", blocks=Blocks(self.block, self.window_blocks, self.globals, self.random, seed, heads))

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.window_blocks % 2 == 0:
            yield "window_blocks", f"must be odd, as many blocks before as after, found {self.window_blocks}"
