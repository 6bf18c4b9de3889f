"""A decoder: token embeddings, a stack of blocks, a final norm, and logits. Its spec first, its module below."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kernels
from arch_dsl import rules
from arch_dsl.block import Block, Branches, block_cost
from arch_dsl.context import BuildContext, Call, Cost, NodeChoice
from arch_dsl.errors import Problem, SpecError
from arch_dsl.families import Carry, Mask, Norm, Position, Scale, build_site, check_site, site_cost
from arch_dsl.layers import Linear, constant, initialize, normal, parameter
from arch_dsl.notation import StdNotation
from arch_dsl.overrides import Overrides, layers_of, normal_form, ranges
from arch_dsl.patch import apply, settings_of
from arch_dsl.shortform import parse_with_knobs
from arch_dsl.source import Node
from arch_dsl.spec import Count, Positive, Range, Spec, added, walk
from kernels.activations import at_least_float32

LOSS_CHUNK = 2**24  # logits (rows x vocabulary) that the loss holds at a time


class Init(Spec):
    """Initial values: N(0, std^2) with std a number, or `small`: sqrt(2 / (5 d_model)) (arXiv:1910.05895, section 2.2).

    `residual` says what maps back to the stream get: `depth_scaled` std / sqrt(2 n_layers) (GPT-2), `plain` std, `wang`
    2 / (n_layers sqrt(d_model)) (GPT-J), `deepnorm` std (8 n_layers)^(-1/4), as do value and feed-forward maps then
    (arXiv:2203.00555, figure 2).
    """

    title: ClassVar[str] = "init"
    std: Annotated[float | str, StdNotation()] = 0.02
    residual: Literal["depth_scaled", "plain", "wang", "deepnorm"] = "depth_scaled"


class Embedding(Spec):
    """The table of token embeddings: of `width` channels that a linear map widens to d_model (arXiv:1909.11942,
    section 3.1), by default of d_model channels; initial values N(0, std^2), by default those of the model."""

    title: ClassVar[str] = "embedding"
    width: Count | None = None
    std: Positive | None = None


class Unembedding(Spec):
    """The map from the stream to logits: the transposed embedding table if `tied`, else a table of its own."""

    title: ClassVar[str] = "unembedding"
    tied: bool = True
    bias: bool = False


class Model(Spec):
    """A decoder-only language model. What is None is derived: `vocab` from the tokenizer, positions from the recipe."""

    title: ClassVar[str] = "model"
    d_model: Count
    n_layers: Annotated[int, Range(min=1, max=10_000)]
    block: Block
    overrides: Overrides = added(default=Overrides())
    vocab: Count | None = None
    max_positions: Count | None = None
    embedding: Embedding = added(default=Embedding())
    embed: tuple[Norm | Position | Scale, ...] = ()
    unembedding: Unembedding = Unembedding()
    logits: tuple[Scale, ...] = added(default=())
    final: tuple[Norm | Carry | Scale, ...] = ()
    init: Init = Init()

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From sites, knobs, or both; knobs are expanded into the sites that they stand for.

        A mapping with the key `zoo` is a published model and what it changes.
        """
        if isinstance(node.value, dict) and "zoo" in node.value:
            from arch_dsl.zoo.reference import expand  # whose models are read by this very function

            return expand(node, path, problems)
        return parse_with_knobs(cls, node, path, problems)

    def context(
        self, device: kernels.Device | None = None, dtype: torch.dtype = torch.float32, backend: str = "auto"
    ) -> BuildContext:
        """The facts that hold at the top of this model."""
        std = (2 / (5 * self.d_model)) ** 0.5 if self.init.std == "small" else float(self.init.std)
        residual_std, gain = _residual_std(self, std)
        return BuildContext(
            d_model=self.d_model,
            n_layers=self.n_layers,
            vocab=self.vocab or 1,
            max_positions=self.max_positions,
            std=std,
            residual_std=residual_std,
            gain=gain,
            width=self.d_model,
            hidden=self.d_model,
            device=device or kernels.Device.current(),
            dtype=dtype,
            backend=backend,
        )

    def layers(self) -> list[Block]:
        """The block of every layer: `block` with its overrides. Raises SpecError where a patch does not fit."""
        blocks = [self.block] * self.n_layers
        for layers, node in self.overrides.items():
            patched: dict[Block, Block] = {}
            for depth in layers_of(layers, self.n_layers):
                old = blocks[depth]
                if old not in patched:
                    patched[old] = self._patched(old, layers, node)
                blocks[depth] = patched[old]
        return blocks

    def _patched(self, block: Block, layers: str, node: Node) -> Block:
        alone = self.replace(block=block, overrides=Overrides())
        try:
            changed = apply(alone, settings_of(node, f"overrides.{layers}"))
        except SpecError as error:
            raise SpecError(
                dataclasses.replace(p, path=f"overrides.{layers}.{p.path}") for p in error.problems
            ) from error
        kept, found = (tuple(item for item in root.embed if not isinstance(item, Norm)) for root in (alone, changed))
        if kept != found or any(item not in alone.embed for item in changed.embed):
            message = "sets what is added to the embeddings, which all layers share; set it at `embed`"
            raise SpecError.of(f"overrides.{layers}", message, node.mark)
        return changed.block

    def check(self) -> list[Problem]:
        """Everything that makes no sense in this model, at once."""
        ctx = self.context()
        problems = []
        for name in ("embed", "final", "logits"):
            problems += check_site(getattr(self, name), ctx, name)
            problems += [
                Problem(
                    f"{name}.{index}.share", "stands once in a model: there is nothing to share", item.mark("share")
                )
                for index, item in enumerate(getattr(self, name))
                if getattr(item, "share", "none") != "none"
            ]
        for layers in self.overrides:
            if not layers_of(layers, self.n_layers):
                message = f"'{layers}' names no layer of {self.n_layers}"
                problems.append(Problem("overrides", message, self.overrides.mark(layers)))
        try:
            blocks = self.layers()
        except SpecError as error:
            return [*problems, *error.problems]
        for depth, block in first_places(blocks):
            where = "block" if block == self.block else f"block (layer {depth})"
            if not block:
                problems.append(Problem(where, "needs at least one branch; all are removed", self.mark("block")))
            for name, branch in block.items():
                problems += branch.check(ctx.at(name, depth=depth), f"{where}.{name}")
        return problems or rules.problems(self, blocks)


def first_places(blocks: list[Block]) -> list[tuple[int, Block]]:
    """Each distinct block with the first layer that has it."""
    found: dict[Block, int] = {}
    for depth, block in enumerate(blocks):
        found.setdefault(block, depth)
    return [(depth, block) for block, depth in found.items()]


def _residual_std(model: Model, std: float) -> tuple[float, float]:
    """The std of maps back to the stream, and the factor on the std of value and feed-forward maps."""
    n_layers = model.n_layers
    if model.init.residual == "depth_scaled":
        return std * float((2 * n_layers) ** -0.5), 1.0
    if model.init.residual == "wang":
        return 2 / (n_layers * float(model.d_model**0.5)), 1.0
    if model.init.residual == "deepnorm":
        return std * float((8 * n_layers) ** -0.25), float((8 * n_layers) ** -0.25)
    return std, 1.0


def resolve(model: Model, *, vocab: int | None = None, max_positions: int | None = None) -> Model:
    """The model with everything derived: its vocabulary, positions, layers, head sizes and widths.

    Raises SpecError for what makes no sense, all of it at once, and for a size that conflicts with the spec's own.
    """
    complete = model.replace(vocab=model.vocab or vocab, max_positions=model.max_positions or max_positions)
    problems = complete.check()
    for name, given in (("vocab", vocab), ("max_positions", max_positions)):
        own = getattr(model, name)
        if own is not None and given is not None and own < given:
            message = f"{own} is less than the {given} that the data and the recipe need"
            problems.append(Problem(name, message, model.mark(name)))
    if complete.vocab is None:
        problems.append(Problem("vocab", "is not given, and no tokenizer says it", model.mark()))
    if problems:
        raise SpecError(problems)
    ctx = complete.context()
    if not complete.overrides:
        return complete.replace(block=_resolved(complete.block, ctx))
    resolved = {block: _resolved(block, ctx) for _, block in first_places(complete.layers())}
    block, overrides = normal_form([resolved[block] for block in complete.layers()])
    return complete.replace(block=block, overrides=overrides)


def _resolved(block: Block, ctx: BuildContext) -> Block:
    return Block((name, branch.resolve(ctx)) for name, branch in block.items())


def cost(model: Model, tokens: int = 1024) -> Cost:
    """Parameters, FLOPs and memory over one sequence of `tokens` tokens, node by node, from the spec alone.

    Of the loss one chunk of log-probabilities counts, which is all that is held at a time.
    """
    ctx = model.context()
    vocab, width = ctx.vocab, model.embedding.width
    size = vocab * (width or model.d_model)
    tables = {"table": Cost(parameters=size, embeddings=size)}
    outputs: dict[str, Cost] = {}
    if width:
        tables["projection"] = Cost.product(tokens, width, model.d_model).keeping(tokens * width)
    if width and model.unembedding.tied:
        outputs["projection"] = Cost.product(tokens, model.d_model, width).keeping(tokens * model.d_model)
    inner = width if width and model.unembedding.tied else model.d_model
    chunk = min(tokens, max(LOSS_CHUNK // vocab, 1))
    kept = tokens * inner + chunk * vocab
    logits = Cost.product(tokens, inner, vocab, model.unembedding.bias).keeping(kept)
    if model.unembedding.tied:
        logits = dataclasses.replace(logits, parameters=vocab if model.unembedding.bias else 0)
    return Cost.total(
        {
            "embedding": Cost.total(tables),
            "embed": site_cost(model.embed, ctx, "embed", tokens),
            "stack": _stack_cost(model, ctx, tokens),
            "final": site_cost(model.final, ctx, "final", tokens),
            "unembedding": Cost.total({**outputs, "table": logits}),
            "logits": site_cost(model.logits, ctx, "logits", chunk),
        }
    )


def _stack_cost(model: Model, ctx: BuildContext, tokens: int) -> Cost:
    """All layers; equal ones are counted once, and once more where the first owns what the others share."""
    found: dict[tuple[Block, bool], tuple[Cost, list[int]]] = {}
    blocks = model.layers() if model.overrides else [model.block] * model.n_layers
    settled: dict[Block, bool] = {}
    for depth, block in enumerate(blocks):
        again = settled.get(block, False)
        if (block, again) not in found:
            before = len(ctx.shared)
            one = block_cost(block, ctx.at(f"block.{depth}", depth=depth), tokens)
            found[block, again] = (one, [])
            settled[block] = len(ctx.shared) > before or again
        found[block, again][1].append(depth)
    parts = {}
    for one, depths in found.values():
        label = f"layer (x{len(depths)})" if len(found) == 1 else f"layers {ranges(depths)}"
        parts[label] = dataclasses.replace(one.times(len(depths)), children={"each": one})
    if len(found) == 1:
        ((label, part),) = parts.items()
        return dataclasses.replace(part, children={label: part.children["each"]})
    return Cost.total(parts)


class Decoder(nn.Module):
    """The compiled model. `choices` says which implementation every node got, and why.

    `separator` is the token that opens a document, for masks that keep documents apart; where it is None and the call
    numbers no documents, a row is one document.
    """

    separator: int | None = None

    def __init__(self, spec: Model, ctx: BuildContext) -> None:
        super().__init__()
        self.spec = spec
        width, tied = spec.embedding.width, spec.unembedding.tied
        self.embedding = parameter((ctx.vocab, width or spec.d_model), normal(spec.embedding.std or ctx.std))
        self.embedding_projection = Linear(width, spec.d_model, std=ctx.std) if width else None
        self.embed = build_site(spec.embed, ctx, "embed")
        places = ((depth, block) for depth, block in enumerate(spec.layers()))
        self.block = nn.ModuleList(Branches(block, ctx.at(f"block.{depth}", depth=depth)) for depth, block in places)
        self.final = build_site(spec.final, ctx, "final")
        self.unembedding_projection = Linear(spec.d_model, width, std=ctx.std) if width and tied else None
        self.unembedding = None if tied else Linear(spec.d_model, ctx.vocab, std=ctx.std)
        self.bias = parameter((ctx.vocab,), constant(0.0)) if spec.unembedding.bias else None
        self.logit_maps = build_site(spec.logits, dataclasses.replace(ctx, width=spec.d_model), "logits")
        self.choices: list[NodeChoice] = ctx.choices
        masks = (part for block in spec.layers() for _, part in walk(block) if isinstance(part, Mask))
        self.keeps_documents_apart = any(mask.documents for mask in masks)

    def hidden(self, tokens: Tensor, call: Call | None = None) -> Tensor:
        """The stream after the last norm: `[batch, time, d_model]` from token ids `[batch, time]`."""
        call = (call or Call()).fresh()
        if call.documents is None and self.separator is not None and self.keeps_documents_apart:
            call = dataclasses.replace(call, documents=(tokens == self.separator).cumsum(-1))
        stream = nn.functional.embedding(tokens, self.embedding)
        if self.embedding_projection is not None:
            stream = self.embedding_projection(stream)
        stream = self.embed(stream, call, iter(()))
        for layer in self.block:
            stream = layer(stream, call)
        if call.state is not None:
            call.state.tokens += tokens.shape[1]
        return self.final(stream, call, iter(()))  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of a stream `[..., d_model]`."""
        table = self.embedding if self.unembedding is None else self.unembedding.weight
        if self.unembedding_projection is not None:
            hidden = self.unembedding_projection(hidden)
        return self.logit_maps(nn.functional.linear(hidden, table, self.bias), Call(), iter(()))  # type: ignore[no-any-return]

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

        At most LOSS_CHUNK logits are held at a time; more are computed in chunks and again for the gradient. With
        `z_loss` the mean of z_loss log^2 Z over the same targets, Z = sum exp(logits) (arXiv:2204.02311, section 5),
        is left in `call.losses`.
        """
        call = call or Call()
        hidden = self.hidden(tokens, call).flatten(0, 1)
        wanted = targets.flatten()
        rows = max(LOSS_CHUNK // self.embedding.shape[0], 1)
        one = self._row_losses_and_squares if z_loss else self._row_losses
        if hidden.shape[0] <= rows:
            losses = one(hidden, wanted)
        else:
            pairs = zip(hidden.split(rows), wanted.split(rows), strict=True)
            losses = torch.cat([checkpoint(one, *pair, use_reentrant=False) for pair in pairs], dim=-1)
        count = (wanted != -100).sum()
        if z_loss:
            losses, squares = losses.unbind(0)
            call.losses["z_loss"] = z_loss * squares.sum() / count
        if reduction == "none":
            return losses.view_as(targets)
        return losses.sum() / count

    def _row_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(at_least_float32(self.logits(hidden)), targets, reduction="none")

    def _row_losses_and_squares(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The loss of each row and log^2 Z of those that have a target: `[2, rows]`."""
        logits = at_least_float32(self.logits(hidden))
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        return torch.stack([losses, logits.logsumexp(-1).masked_fill(targets == -100, 0).square()])


def compile(
    spec: Model, backend: str = "auto", *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """The module of a resolved spec, with initial values that are a pure function of (seed, parameter path).

    `backend` forces an implementation of all ops (`reference`, `torch`, `triton`) or leaves the choice to each node
    (`auto`). `dtype` is the one computed in (that of autocast, where that is used); parameters are float32.
    Raises SpecError if the spec is not resolved or makes no sense.
    """
    spec = resolve(spec)
    model = Decoder(spec, spec.context(kernels.Device.parse(torch.device(device).type), dtype, backend))
    initialize(model, seed)
    return model.to(device)


def kernel_choices(spec: Model, device: kernels.Device, dtype: torch.dtype = torch.float32) -> list[NodeChoice]:
    """Which implementation each node of a model would get on a device, which need not be present."""
    with torch.device("meta"):
        return Decoder(resolve(spec), spec.context(device, dtype)).choices
