"""The tables of a model: of its tokens at the input, and the map to logits at the output."""

from __future__ import annotations

from typing import ClassVar

from archlab.arch_dsl.language.spec import Count, NotNegative, Positive, Spec, added


class Embedding(Spec):
    """The table of token embeddings: of `width` channels that a linear map widens to d_model (arXiv:1909.11942,
    section 3.1), by default of d_model channels; initial values N(0, std^2), by default those of the model."""

    title: ClassVar[str] = "embedding"
    width: Count | None = None
    std: Positive | None = None


class Embeddings(Embedding):
    """The tables of an encoder and a decoder: one if `shared`, else each has its own."""

    title: ClassVar[str] = "embeddings"
    shared: bool = True


class Unembedding(Spec):
    """The map from the stream to logits: the transposed embedding table if `tied`, else a table of its own.

    Where an encoder has a table of its own, it is the decoder's that is tied. A table of its own starts at N(0, std^2).
    """

    title: ClassVar[str] = "unembedding"
    tied: bool = True
    bias: bool = False
    std: NotNegative | None = added(default=None)
