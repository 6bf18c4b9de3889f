"""The module of a model: a decoder, or an encoder and a decoder, with their logits and their loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from archlab import kernels
from archlab.arch_dsl.compiler.slower import warn_of_fallbacks, warn_of_move
from archlab.arch_dsl.model import model as models
from archlab.arch_dsl.model.constraint import Constrained
from archlab.arch_dsl.model.model import DecoderModel, EncoderDecoderModel, Model, resolve
from archlab.arch_dsl.model.prediction import wanted
from archlab.arch_dsl.model.stack import StackModule
from archlab.arch_dsl.parts.context import BuildContext, Call, NodeChoice
from archlab.arch_dsl.parts.families import build_site
from archlab.arch_dsl.parts.layers import Linear, constant, initialize, normal, parameter, table, writing
from archlab.arch_dsl.primitives.scales import logit_form
from archlab.kernels.activations import at_least_float32
from archlab.kernels.op import forced

CUDA_CHUNKS = 4  # times LOSS_CHUNK on a GPU: gradients of the table are added up once for each chunk


class LanguageModel(Constrained):
    """What both kinds of model share: a table of tokens at the input, logits and their loss at the output.

    `choices` says which implementation every node got, and why; `built_for` for which kind of device, "" where that
    decided nothing. `separator` is the token that opens a document, for masks that keep documents apart; where it is
    None and the call numbers no documents, a row is one document.
    """

    separator: int | None = None
    fused_loss: bool = False
    built_for: str = "cpu"

    def add_input(self, spec: Model, ctx: BuildContext) -> None:
        """Builds the table of tokens."""
        width = spec.embedding.width
        self.embedding = table((ctx.vocab, width or spec.d_model), normal(spec.embedding.std or ctx.std))
        self.embedding_projection = writing(Linear(width, spec.d_model, std=ctx.std)) if width else None

    def add_output(self, spec: Model, ctx: BuildContext) -> None:
        """Builds the map to logits."""
        width, tied, std = spec.embedding.width, spec.unembedding.tied, spec.unembedding.std
        self.unembedding_projection = Linear(spec.d_model, width, std=ctx.std) if width and tied else None
        self.unembedding = None if tied else Linear(spec.d_model, ctx.vocab, std=ctx.std if std is None else std)
        if self.unembedding is not None:
            self.unembedding.weight.table = True  # type: ignore[attr-defined]
        self.bias = parameter((ctx.vocab,), constant(0.0)) if spec.unembedding.bias else None
        self.logit_maps = build_site(spec.logits, dataclasses.replace(ctx, width=spec.d_model), "logits")
        self.logit_form = logit_form(spec.logits, spec.d_model)
        self.linear_cross_entropy = self._chosen_loss(spec, ctx.at("loss"))
        self.choices: list[NodeChoice] = ctx.choices
        self.built_for = ctx.device.kind if ctx.backend == "auto" else ""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> LanguageModel:
        """Behind `to`, `cuda`, `half` and the like."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        warn_of_move(self.built_for, self.embedding.device)
        return self

    def _chosen_loss(self, spec: Model, ctx: BuildContext) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """The op for the loss; None where chunks of the formula are computed, and again for the gradient."""
        if self.logit_form is None:
            ctx.note("linear_cross_entropy", "reference", "the formula in chunks: logits have other maps than a cap")
            return None
        asked = {"bias": spec.unembedding.bias, "softcap": self.logit_form[1] is not None}
        call = ctx.select("linear_cross_entropy", **asked)
        self.fused_loss = ctx.choices[-1].implementation == "triton"
        return None if ctx.choices[-1].implementation == "reference" else call

    def embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings `[batch, time, d_model]` of token ids `[batch, time]`."""
        stream = nn.functional.embedding(tokens, self.embedding)
        return stream if self.embedding_projection is None else self.embedding_projection(stream)

    def hidden(self, tokens: Tensor, call: Call | None = None) -> Tensor:
        """The stream after the last norm: `[batch, time, d_model]` from token ids `[batch, time]`."""
        raise TypeError(f"{type(self).__name__} has no stream")

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of a stream `[..., d_model]`."""
        hidden, table = self._last(hidden)
        return self.logit_maps(nn.functional.linear(hidden, table, self.bias), Call(), iter(()))  # type: ignore[no-any-return]

    def _last(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What logits are the product of: the stream, in the width of the table, and the table."""
        table = self.embedding if self.unembedding is None else self.unembedding.weight
        return hidden if self.unembedding_projection is None else self.unembedding_projection(hidden), table

    def forward(self, tokens: Tensor, call: Call | None = None) -> Tensor:
        """Logits `[batch, time, vocab]` for the token after each of `tokens` `[batch, time]`."""
        return self.logits(self.hidden(tokens, call))

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        call: Call | None = None,
        reduction: Literal["mean", "none"] = "mean",
        z_loss: float = 0.0,
    ) -> Tensor:
        """Cross-entropy in nats: the mean over targets that are not -100, or `[batch, time]` (0 where ignored).

        At most LOSS_CHUNK logits are held at a time; with more, gradients are computed with the forward pass. With
        `z_loss` the mean of z_loss log^2 Z over the same targets, Z = sum exp(logits) (arXiv:2204.02311, section 5),
        is left in `call.losses`; the mean loss has its gradient already.
        """
        call = call or Call()
        return self.loss_of(self.hidden(tokens, call), targets, call, reduction, z_loss)

    def loss_of(self, hidden: Tensor, targets: Tensor, call: Call, reduction: str, z_loss: float) -> Tensor:
        """The loss of a stream after the last norm."""
        count = (targets != -100).sum()
        rows = reduction == "none"
        found, squares = self.losses(hidden, targets, bool(z_loss)) if rows else self.loss_sums(hidden, targets, z_loss)
        if squares is not None:
            call.losses["z_loss"] = z_loss * squares.sum() / count
        return found if rows else found / count

    def loss_sums(self, hidden: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor | None]:
        """The sum of a stream's cross-entropies, with the gradient of both, and that of log^2 Z if it is weighted."""
        if self.takes_op(targets):
            total, square = self._by_op(hidden, targets, z_loss, "sum")
            return (total - z_loss * square, square) if z_loss else (total, None)
        losses, squares = self.losses(hidden, targets, bool(z_loss))
        if squares is None:
            return losses.sum(), None
        square = squares.sum()
        return losses.sum() + z_loss * (square - square.detach()), square.detach()

    def losses(self, hidden: Tensor, targets: Tensor, squares: bool = False) -> tuple[Tensor, Tensor | None]:
        """The cross-entropy `[batch, time]` of every target, 0 where it is -100, from a stream; log^2 Z if asked."""
        if self.takes_op(targets):
            losses, found = self._by_op(hidden, targets, 0.0, "none")
            return losses.view_as(targets), found if squares else None
        rows, wanted = hidden.flatten(0, 1), targets.flatten()
        most = self.rows_at_once
        if rows.shape[0] <= most:
            found = self._row_losses(rows, wanted, squares)
        else:
            pairs = zip(rows.split(most), wanted.split(most), strict=True)
            chunks = [checkpoint(self._row_losses, *pair, squares, use_reentrant=False) for pair in pairs]
            found = torch.cat(chunks, dim=-1)
        return (found[0].view_as(targets), found[1]) if squares else (found.view_as(targets), None)

    @property
    def rows_at_once(self) -> int:
        """How many rows of logits are held at a time."""
        return max(models.LOSS_CHUNK // self.embedding.shape[0], 1)

    def takes_op(self, targets: Tensor) -> bool:
        """Whether the loss is the op's: a Triton kernel's always, else where there is more than one chunk."""
        return self.linear_cross_entropy is not None and (self.fused_loss or targets.numel() > self.rows_at_once)

    def _by_op(self, hidden: Tensor, targets: Tensor, z: float, reduction: str) -> tuple[Tensor, Tensor]:
        assert self.linear_cross_entropy is not None and self.logit_form is not None
        rows, table = self._last(hidden.flatten(0, 1))
        scale, softcap = self.logit_form
        most = self.rows_at_once * (CUDA_CHUNKS if hidden.is_cuda else 1)
        return self.linear_cross_entropy(
            rows, table, targets.flatten(), self.bias, scale, softcap, z=z, reduction=reduction, rows=most
        )

    def _row_losses(self, hidden: Tensor, targets: Tensor, squares: bool) -> Tensor:
        """The loss of each row `[rows]`, and if asked log^2 Z of those that have a target: `[2, rows]`."""
        logits = at_least_float32(self.logits(hidden))
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        if not squares:
            return losses
        return torch.stack([losses, logits.logsumexp(-1).masked_fill(targets == -100, 0).square()])

    def with_documents(self, call: Call, stack: StackModule, tokens: Tensor) -> Call:
        """The call with the number of each token's document, where masks keep these apart and a token opens them; and
        with the tokens, where parts of the stack read them."""
        if stack.reads_tokens:
            call.across["tokens"] = tokens
        if call.documents is not None or self.separator is None or not stack.keeps_documents_apart:
            return call
        documents, state = (tokens == self.separator).cumsum(-1), call.state
        if state is not None:
            documents = documents if state.documents is None else documents + state.documents
            state.documents = documents[:, -1:]
        return dataclasses.replace(call, documents=documents)


class Decoder(LanguageModel, StackModule):
    """The compiled decoder-only model."""

    def __init__(self, spec: DecoderModel, ctx: BuildContext) -> None:
        nn.Module.__init__(self)
        self.spec = spec
        self.add_input(spec, ctx)
        self.add_layers(spec, spec.place(ctx, ""))
        self.predict = spec.predict.build(spec.layers()[-1], spec.place(ctx, "")) if spec.predict else None
        self.read_by_heads = spec.predict is not None
        self.add_output(spec, ctx)

    def hidden(self, tokens: Tensor, call: Call | None = None) -> Tensor:
        call = self.with_documents((call or Call()).fresh(), self, tokens)
        return self.through(self.embedded(tokens), call)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        call: Call | None = None,
        reduction: Literal["mean", "none"] = "mean",
        z_loss: float = 0.0,
    ) -> Tensor:
        """As every model's. In training `call.losses` has those of heads too: `predict.2` is that of the token after
        the next one, weighted, over as many targets as the loss itself. Where tokens exit from a loop, the loss of
        training is over all of its turns (model/exits.py)."""
        out = None if self.loop is None else self.loop.exit
        if (self.predict is None and out is None) or not self.training or reduction == "none":
            return super().loss(tokens, targets, call, reduction, z_loss)
        call = call or Call()
        own = self.with_documents(call.fresh(), self, tokens)
        embedded, count = self.embedded(tokens), (targets != -100).sum()
        if out is not None:
            turns = self.turns(embedded, own)
            found = [self.losses(hidden, targets, bool(z_loss)) for hidden in turns]
            return out.expected_loss(turns, found, targets, call, z_loss)
        assert self.predict is not None
        loss = self.loss_of(self.through(embedded, own), targets, call, reduction, z_loss)
        read = own.across["before_last"], own.across["after_last"]
        for ahead, stream, inner in self.predict.streams(read, embedded, own, self.applied):
            last = self.final(stream, inner, iter(()))
            total, _ = self.loss_sums(last, wanted(targets, ahead, own.documents))
            call.losses[f"predict.{ahead}"] = self.predict.weight * total / count
        return loss


class EncoderDecoder(LanguageModel):
    """The compiled encoder-decoder. A call brings `source_tokens` `[batch, source_time]`, or the encoder's `source`.

    While decoding the source is read once, with the first tokens. With `source_targets` the encoder has a loss of its
    own, over the same logits: the mean over targets that are not -100, in `losses["encoder"]` (arXiv:2203.07814,
    section 4.2).
    """

    def __init__(self, spec: EncoderDecoderModel, ctx: BuildContext) -> None:
        super().__init__()
        self.spec = spec
        self.after_source = spec.decoder.positions == "after_source"
        self.add_input(spec, ctx)
        self.source_embedding: nn.Parameter | None = None
        self.source_projection: Linear | None = None
        if not spec.embedding.shared:
            width = spec.embedding.width
            self.source_embedding = table(self.embedding.shape, normal(spec.embedding.std or ctx.std))
            self.source_projection = writing(Linear(width, spec.d_model, std=ctx.std)) if width else None
        self.encoder = StackModule(spec.encoder, spec.place(ctx, "encoder"))
        self.decoder = StackModule(spec.decoder, spec.place(ctx, "decoder"))
        self.add_output(spec, ctx)

    def hidden(self, tokens: Tensor, call: Call | None = None) -> Tensor:
        """The decoder's stream after its last norm: `[batch, time, d_model]` from token ids `[batch, time]`."""
        call = self.with_documents(self.with_source((call or Call()).fresh()), self.decoder, tokens)
        if self.after_source:
            assert call.source is not None
            positions = call.positions_of(tokens.shape[1], tokens.device) + call.source.shape[1]
            call = dataclasses.replace(call, positions=positions)
        return self.decoder.through(self.embedded(tokens), call)

    def with_source(self, call: Call) -> Call:
        """The call with the encoder's stream `[batch, source_time, d_model]`; its own where it has one."""
        if call.source is not None:
            return call
        state = call.state
        if state is not None and state.source is not None:
            return dataclasses.replace(call, source=state.source, source_padding=state.source_padding)
        source = self.encode(call)
        if state is not None:
            state.source, state.source_padding = source, call.source_padding
        return dataclasses.replace(call, source=source)

    def encode(self, call: Call) -> Tensor:
        """The encoder's stream `[batch, source_time, d_model]` from the call's source tokens."""
        tokens = call.source_tokens
        if tokens is None:
            raise ValueError("an encoder-decoder reads a source: the call needs source_tokens")
        own = Call(
            padding=call.source_padding,
            losses=call.losses,
            measures=call.measures,
            earlier=call.earlier,
            watch=call.watch,
        )
        own = self.with_documents(own, self.encoder, tokens)
        source = self.encoder.through(self.source_embedded(tokens), own)
        if call.source_targets is not None:
            total, _ = self.loss_sums(source, call.source_targets)
            call.losses["encoder"] = total / (call.source_targets != -100).sum().clamp(min=1)
        return source

    def source_embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings `[batch, source_time, d_model]` of source tokens."""
        if self.source_embedding is None:
            return self.embedded(tokens)
        stream = nn.functional.embedding(tokens, self.source_embedding)
        return stream if self.source_projection is None else self.source_projection(stream)


def build(spec: Model, ctx: BuildContext) -> LanguageModel:
    """The module of a resolved spec, its parameters not initialised."""
    assert isinstance(spec, DecoderModel | EncoderDecoderModel)
    model = EncoderDecoder(spec, ctx) if isinstance(spec, EncoderDecoderModel) else Decoder(spec, ctx)
    model.mark_constrained(spec.constraint, spec.d_model)
    return model


def stored(module: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of a module holds, what layers share once: parameters, and state without a gradient."""
    held = module.state_dict().keys()
    return dict(module.named_parameters()) | {name: value for name, value in module.named_buffers() if name in held}


def compile(
    spec: Model, backend: str = "auto", *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """The module of a resolved spec, with initial values that are a pure function of (seed, parameter path).

    `backend` forces an implementation of all ops (`reference`, `torch`, `triton`) or leaves the choice to each node
    (`auto`), unless ARCHLAB_KERNELS forces one. Of a node that falls back from what is faster on the device is warned,
    once for each op in a process. `dtype` is the one computed in (that of autocast, where that is used); parameters are
    float32. Raises SpecError if the spec is not resolved or makes no sense.
    """
    spec = resolve(spec)
    backend = (forced() or backend) if backend == "auto" else backend
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # a plug-in's parameter may be drawn while it is made
        model = build(spec, spec.context(kernels.Device.parse(torch.device(device).type), dtype, backend))
    warn_of_fallbacks(model.choices)
    factors = spec.init.factors([name for name, _ in model.named_parameters()]) if spec.init.groups else {}
    initialize(model, seed, factors)
    model.constrain()
    return model.to(device)


def kernel_choices(spec: Model, device: kernels.Device, dtype: torch.dtype = torch.float32) -> list[NodeChoice]:
    """Which implementation each node of a model would get on a device, which need not be present."""
    with torch.device("meta"):
        return build(resolve(spec), spec.context(device, dtype, forced() or "auto")).choices
