"""A model: tables of tokens, a stack of blocks or an encoder and a decoder, and logits. Its spec and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch

from archlab import kernels
from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.parse import parse_record, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, Spec, added, walk
from archlab.arch_dsl.model import rules
from archlab.arch_dsl.model.constraint import Constraint
from archlab.arch_dsl.model.exits import Exit
from archlab.arch_dsl.model.initial_values import Init, residual_std
from archlab.arch_dsl.model.prediction import Prediction
from archlab.arch_dsl.model.stack import Stack, check_ends, check_stack, resolved_stack
from archlab.arch_dsl.model.stack_costs import stacks_cost
from archlab.arch_dsl.model.tables import Embedding, Embeddings, Unembedding
from archlab.arch_dsl.parts.context import BuildContext, Cost
from archlab.arch_dsl.parts.families import Rotary, Scale, site_cost
from archlab.arch_dsl.patching.shortform import parse_with_knobs
from archlab.arch_dsl.primitives.positions import Learned, Sinusoidal
from archlab.arch_dsl.primitives.scales import logit_form

LOSS_CHUNK = 2**24  # logits (rows x vocabulary) that the loss holds at a time
STACKS = ("encoder", "decoder")
Reader = Callable[[Node, str, list[Problem]], Any]  # as `parse_node`: a model, or INVALID after noting why


class Model(Spec):
    """A language model. What is None is derived: `vocab` from the tokenizer, positions from the recipe.

    It has one stack (`DecoderModel`), or an `encoder` and a `decoder` (`EncoderDecoderModel`). A `constraint` is what
    weights are put back to after every optimizer step.
    """

    title: ClassVar[str] = "model"
    d_model: Count
    vocab: Count | None = None
    max_positions: Count | None = None
    embedding: Embedding = added(default=Embedding())
    unembedding: Unembedding = Unembedding()
    logits: tuple[Scale, ...] = added(default=())
    constraint: Constraint | None = added(default=None)
    init: Init = Init()
    readers: ClassVar[dict[str, Reader]] = {}

    @classmethod
    def notation(cls, key: str) -> Callable[[Reader], Reader]:
        """Registers what reads a mapping with this key, as a reference to a model that is written elsewhere."""

        def register(reader: Reader) -> Reader:
            cls.readers[key] = reader
            return reader

        return register

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """A model of either kind, which a file may hold under `model:`, as a study does. With a key that was registered
        (`zoo`) a mapping is what its reader makes of it."""
        if not path and isinstance(node.value, dict) and "model" in node.value:  # the whole of a file
            others = [name for name in node.value if name != "model"]
            if others:
                message = f"stands beside {', '.join(others)}; a file holds a model alone, under `model:` or without it"
                return refuse(problems, "model", message, node.key_marks.get("model"))
            return cls.parse_node(node.value["model"], "model", problems)
        keys = node.value if isinstance(node.value, dict) else {}
        for key, reader in cls.readers.items():
            if key in keys:
                return reader(node, path, problems)
        if any(name in keys for name in STACKS):
            return parse_record(EncoderDecoderModel, node, path, problems)
        return parse_with_knobs(DecoderModel, node, path, problems)

    def stacks(self) -> dict[str, Stack]:
        """The stacks by their paths; the path of the only one is ''."""
        raise TypeError(f"{type(self).__name__} has no stacks")

    def with_stack(self, name: str, stack: Stack) -> Model:
        """The model with one stack replaced."""
        raise TypeError(f"{type(self).__name__} has no stacks")

    def context(
        self,
        device: kernels.Device | None = None,
        dtype: torch.dtype = torch.float32,
        backend: str = "auto",
        source_tokens: int = 1,
    ) -> BuildContext:
        """The facts that hold at the top of this model."""
        stacks = self.stacks()
        return BuildContext(
            d_model=self.d_model,
            n_layers=list(stacks.values())[-1].n_layers,
            vocab=self.vocab or 1,
            max_positions=self.max_positions,
            std=(2 / (5 * self.d_model)) ** 0.5 if self.init.std == "small" else float(self.init.std),
            residual_std=0.0,
            width=self.d_model,
            hidden=self.d_model,
            source_tokens=source_tokens if len(stacks) > 1 else None,
            device=device or kernels.Device.current(),
            dtype=dtype,
            backend=backend,
        )

    def place(self, ctx: BuildContext, name: str) -> BuildContext:
        """The facts that hold in one stack, from those at the top."""
        stack = self.stacks()[name]
        std, gain = residual_std(self.init, stack.effective_depth, self.d_model, ctx.std)
        facts = {"n_layers": stack.n_layers, "residual_std": std, "gain": gain}
        if not name:
            return ctx.where(**facts)
        return ctx.at(name, **facts, source_tokens=ctx.source_tokens if name == "decoder" else None)

    def check(self) -> list[Problem]:
        """Everything that makes no sense in this model, at once."""
        ctx = self.context()
        problems: list[Problem] = []
        for name, stack in self.stacks().items():
            problems += prefixed(check_stack(stack, self.place(ctx, name)), name)
        problems += check_ends(self.logits, ctx, "logits") + self.check_whole()
        if (own := self.unembedding).tied and own.std is not None:
            problems += [Problem("unembedding.std", "is that of a table of its own; set tied: false", own.mark("std"))]
        if problems:
            return problems
        for name, stack in self.stacks().items():
            problems += prefixed(rules.problems(stack, self.place(ctx, name)), name)
        return problems

    def check_whole(self) -> list[Problem]:
        """What makes no sense between the parts of this kind of model."""
        return []


class DecoderModel(Model, Stack):
    """A decoder-only language model, whose fields are those of its stack too.

    `predict` has it predict further tokens while it is trained, by heads that are dropped afterwards.
    """

    order: ClassVar[tuple[str, ...]] = (
        "d_model", "n_layers", "block", "overrides", "vocab", "max_positions", "embedding", "embed", "unembedding",
        "logits", "final", "prompt", "streams", "skips", "loop", "depths", "predict", "init",
    )  # fmt: skip
    predict: Prediction | None = added(default=None)

    def stacks(self) -> dict[str, Stack]:
        return {"": self}

    def with_stack(self, name: str, stack: Stack) -> Model:
        assert isinstance(stack, DecoderModel)
        return stack

    def check_whole(self) -> list[Problem]:
        return [] if self.predict is None else list(self.predict.check(self))


class DecoderStack(Stack):
    """The stack that reads what an encoder made.

    Its `positions` are its `own`, from 0, or go on `after_source`, whose padding is counted: so rotations of
    cross-attention and encodings of absolute positions see them (arXiv:2510.26622, section 3).
    """

    title: ClassVar[str] = "decoder"
    positions: Literal["own", "after_source"] = "own"


class EncoderDecoderModel(Model):
    """An encoder, and a decoder whose branches `cross_attention` read its last stream (arXiv:1706.03762, sec. 3.1)."""

    order: ClassVar[tuple[str, ...]] = (
        "d_model", "encoder", "decoder", "vocab", "max_positions", "embedding", "unembedding", "logits", "init",
    )  # fmt: skip
    embedding: Embeddings = Embeddings()
    encoder: Stack
    decoder: DecoderStack

    def stacks(self) -> dict[str, Stack]:
        return {"encoder": self.encoder, "decoder": self.decoder}

    def with_stack(self, name: str, stack: Stack) -> Model:
        return self.replace(**{name: stack})

    def check_whole(self) -> list[Problem]:
        problems = []
        parts = [part for _, part in walk((self.decoder.embed, *self.decoder.layers()))]
        seen = [part for part in parts if getattr(part, "type", "") == "cross_attention"]
        if not seen:
            message = "has no branch cross_attention, so nothing reads the encoder"
            problems.append(Problem("decoder", message, self.decoder.mark()))
        if self.init.residual == "deepnorm":
            message = "deepnorm is for one stack: beside an encoder it has other factors (arXiv:2203.00555, figure 2)"
            problems.append(Problem("init.residual", message, self.init.mark("residual")))
        for name, stack in self.stacks().items():
            if stack.loop is not None and stack.loop.exit is not None:
                message = "is for a model of one stack; an encoder and a decoder go through all turns"
                problems.append(Problem(f"{name}.loop.exit", message, stack.loop.exit.mark()))
        if self.decoder.positions == "own":
            return problems
        rotated = any(isinstance(part, Rotary) for _, part in walk(tuple(seen)))
        learned = any(isinstance(part, Learned) or getattr(part, "queries", "") == "positions" for part in parts)
        mark = self.decoder.mark("positions")
        if learned:
            message = "after_source leaves the tables of learned positions, which begin at 0; use a rotation"
            problems.append(Problem("decoder.positions", message, mark))
        elif not rotated and not any(isinstance(part, Sinusoidal) for part in parts):
            message = "after_source changes nothing here: neither cross-attention nor `embed` sees absolute positions"
            problems.append(Problem("decoder.positions", message, mark))
        return problems


def prefixed(problems: Iterable[Problem], name: str) -> list[Problem]:
    """The problems of a stack, with its path."""
    return [dataclasses.replace(item, path=f"{name}.{item.path}") for item in problems] if name else list(problems)


def resolve(model: Model, *, vocab: int | None = None, max_positions: int | None = None) -> Model:
    """The model with everything derived: its vocabulary, positions, layers, head sizes and widths.

    `max_positions` are those of tokens; prompts take more. Raises SpecError for what makes no sense, all of it at once,
    and for a size that conflicts with the spec's own.
    """
    if max_positions is not None:
        max_positions += max(stack.prompt or 0 for stack in model.stacks().values())
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
    for name, stack in complete.stacks().items():
        complete = complete.with_stack(name, resolved_stack(stack, complete.place(ctx, name)))
    return complete


def kept(model: Model) -> Model:
    """The model without what only training has."""
    if getattr(model, "predict", None):
        return model.replace(predict=None)
    if isinstance(model, DecoderModel) and model.loop and model.loop.exit and model.loop.exit.only_trained:
        return model.replace(loop=model.loop.replace(exit=None))
    return model


def exit_of(model: Model) -> Exit | None:
    """What the loop of a model has to exit by."""
    loop = model.loop if isinstance(model, DecoderModel) else None
    return None if loop is None else loop.exit


def cost(model: Model, tokens: int = 1024, source_tokens: int | None = None) -> Cost:
    """Parameters, FLOPs and memory over one sequence of `tokens` tokens, node by node, from the spec alone.

    An encoder reads `source_tokens` more, by default as many. Of the loss one chunk of log-probabilities counts, which
    is all that is held at a time.
    """
    source = source_tokens or tokens
    ctx = model.context(source_tokens=source)
    vocab, width = ctx.vocab, model.embedding.width
    size = vocab * (width or model.d_model)
    tables = 1 if getattr(model.embedding, "shared", True) else 2
    read = tokens + (0 if ctx.source_tokens is None else source)
    inputs = {"table": Cost(parameters=tables * size, embeddings=tables * size)}
    outputs: dict[str, Cost] = {}
    if width:
        map_ = Cost.product(read, width, model.d_model).keeping(read * width)
        inputs["projection"] = dataclasses.replace(map_, parameters=tables * map_.parameters)
    if width and model.unembedding.tied:
        outputs["projection"] = Cost.product(tokens, model.d_model, width).keeping(tokens * model.d_model)
    stacks = {name: (stack, model.place(ctx, name)) for name, stack in model.stacks().items()}
    return Cost.total(
        {
            "embedding": Cost.total(inputs),
            **stacks_cost(stacks, model.d_model, tokens, source),
            "unembedding": Cost.total({**outputs, "table": _logits_cost(model, tokens)}),
            "logits": site_cost(model.logits, ctx, "logits", _chunk(model, tokens)),
            "predict": _predict_cost(model, ctx, tokens).only_trained(),
            "exit": _exit_cost(model, ctx, tokens),
        }
    )


def _chunk(model: Model, tokens: int) -> int:
    """How many rows of logits are held at a time."""
    return min(tokens, max(LOSS_CHUNK // (model.vocab or 1), 1))


def _logits_cost(model: Model, tokens: int) -> Cost:
    """The table of logits, and what its loss over so many tokens keeps."""
    vocab, tied = model.vocab or 1, model.unembedding.tied
    inner = model.embedding.width or model.d_model if tied else model.d_model
    chunk = _chunk(model, tokens)
    kept = tokens * inner + chunk * vocab
    if chunk < tokens and logit_form(model.logits, model.d_model):
        # log Z, and where all tokens weigh alike the stream's gradient: the table's is that of a parameter
        kept += tokens * (1 if exit_of(model) else inner + 1)
    logits = Cost.product(tokens, inner, vocab, model.unembedding.bias).keeping(kept)
    if tied:
        logits = dataclasses.replace(logits, parameters=vocab if model.unembedding.bias else 0)
    return logits


def _predict_cost(model: Model, ctx: BuildContext, tokens: int) -> Cost:
    """The heads of further tokens, their logits and losses with them."""
    if not isinstance(model, DecoderModel) or model.predict is None:
        return Cost()
    found = model.predict.cost(model, model.place(ctx, ""), tokens)
    lengths = {ahead: max(tokens - ahead + 1, 0) for ahead in range(2, model.predict.tokens + 1)}
    losses = {str(ahead): _again_cost(model, ctx, read) for ahead, read in lengths.items()}
    return Cost.total({**found.children, "losses": Cost.total(losses)})


def _exit_cost(model: Model, ctx: BuildContext, tokens: int) -> Cost:
    """The gate of a loop, and in training logits and losses after all turns but the last."""
    found = exit_of(model)
    if found is None or not isinstance(model, DecoderModel) or model.loop is None:
        return Cost()
    turns = model.loop.turns
    gate = found.cost(ctx, tokens, turns, held=model.loop.inject is None)
    losses = _again_cost(model, ctx, tokens).repeated(turns - 1)
    return Cost.total({"gate": gate.only_trained() if found.only_trained else gate, "losses": losses.only_trained()})


def _again_cost(model: Model, ctx: BuildContext, tokens: int) -> Cost:
    """Logits and losses of another stream, by the tables of the model."""
    parts = {"table": _logits_cost(model, tokens).without_parameters()}
    if model.embedding.width and model.unembedding.tied:
        product = Cost.product(tokens, model.d_model, model.embedding.width).keeping(tokens * model.d_model)
        parts["projection"] = product.without_parameters()
    parts["logits"] = site_cost(model.logits, ctx, "logits", _chunk(model, tokens)).without_parameters()
    return Cost.total(parts)
