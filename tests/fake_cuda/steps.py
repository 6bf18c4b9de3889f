"""A trial's own loop on the card that is not there: steps, a log line, validation, its state, and going on from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from triton.runtime.jit import JITFunction

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.model.model import EncoderDecoderModel
from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.tree.identity import canonical
from archlab.kernels.attention.pattern import Pattern
from archlab.search.data.dataset import Dataset, write
from archlab.search.data.tokenizers.family import Bytes
from archlab.search.evaluation.measures import About, Measure, Subject
from archlab.search.objectives import has_encoder
from archlab.search.recipe.recipe import Recipe, load_recipe
from archlab.search.training.held_out import autocast, evaluating
from archlab.search.training.loop import Loop
from archlab.search.training.module import build_model, seeds_of
from archlab.search.trial.trial import Trial
from tests.fake_cuda.planted import PLANTED
from tests.fake_cuda.watch import Watched

BLOCK_LISTS = Pattern.block_lists
CARD = torch.device("cuda", 0)
CONTEXT, ROWS = 64, 8
TEXT = {"train": 60, "validation": 10, "test": 10}


class Quiet:
    """A journal that keeps nothing."""

    def write(self, *_: Any, **__: Any) -> None: ...


def prepared(folder: Path) -> Dataset:
    (folder / "data").mkdir()
    texts = {name: [b"%d and one more is %d\n" % (i, i + 1) * 20 for i in range(count)] for name, count in TEXT.items()}
    write(folder / "data", Bytes().train([], "tokenizer"), texts, {"tokenizer": canonical(Bytes())})
    return Dataset.open(folder, "data")


class Card:
    """Takes the training steps of one model after another, and looks at what they ask of the card."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.dataset = folder, prepared(folder)
        self.fake, self.watched = FakeTensorMode(), Watched()
        JITFunction.run = lambda kernel, *args, grid, warmup=False, **meta: self.watched.launch(
            kernel, args, grid, meta
        )
        Pattern.block_lists = lambda pattern, *sizes: self.block_lists(pattern, *sizes)
        torch.cuda.get_rng_state = lambda *_: self.watched.generator()
        torch.cuda.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)
        torch.cuda.graph = self.watched.graph
        Tensor.data_ptr = lambda x: id(x)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False

    def block_lists(self, pattern: Pattern, *sizes: int) -> Any:
        """As the host finds them, by their values."""
        with _disable_current_modes():
            found = BLOCK_LISTS(pattern, *sizes)
        return tree_map(self.fake.from_tensor, found)

    def asked(self, name: str, recipe: dict[str, Any], change: dict[str, Any]) -> tuple[Trial, Recipe]:
        """A tiny entry of the zoo, patched, under a recipe of bfloat16."""
        spec = arch_dsl.resolve(arch_dsl.patch(zoo.load(name, "tiny"), change))
        context = min(CONTEXT, spec.max_positions or CONTEXT)
        spec = arch_dsl.resolve(spec, vocab=spec.vocab or self.dataset.vocab, max_positions=context)
        kind = {"objective": "span_corruption"} if isinstance(spec, EncoderDecoderModel) else {}
        fixed = {"tokens": 40 * ROWS * context, "context": context, "batch": ROWS, "accumulate": 2, "lr": 1e-3}
        read = load_recipe(fixed | {"precision": "bf16"} | kind | recipe)
        return Trial(canonical(spec), canonical(read), "data", 0), read

    def trial(self, name: str, recipe: dict[str, Any], change: dict[str, Any], planted: str = "") -> dict[str, Any]:
        """How often the kernels of its steps are launched, how many graphs are captured, and whether none should be."""
        trial, read = self.asked(name, recipe, change)
        self.watched.kernels.clear()
        with moved(self.fake):
            model = build_model(trial, read, CARD)
        model.separator = self.dataset.eod
        PLANTED[planted](model)
        with on_card(self.fake), self.watched:
            passes = self.steps(trial, read, model)
        return {"kernels": self.watched.kernels, "graphs": len(passes.graphs), "looks_back": passes.looks_back}

    def measured(self, name: str, recipe: dict[str, Any], change: dict[str, Any], measure: Any) -> dict[str, Any]:
        """Nothing but what a measure asks of the card about an entry."""
        trial, read = self.asked(name, recipe, change)
        with moved(self.fake):
            weights = build_model(trial, read, CARD).state_dict()
            about = About(arch_dsl.load(trial.model), read, self.dataset)
            with on_card(self.fake), self.watched:
                parse(Measure, measure).compute(Subject(about, CARD, weights, lambda: None))
        return {}

    def captured(self, name: str, recipe: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
        """Into how many graphs torch.compile divides the forward pass of an entry; the backward pass runs."""
        trial, read = self.asked(name, recipe, change)
        graphs = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        with moved(self.fake):
            model = build_model(trial, read, CARD)
        with on_card(self.fake), autocast(CARD, read.precision):
            tokens = torch.zeros(ROWS, read.context, dtype=torch.int64, device=CARD)
            call = Call(source_tokens=tokens if has_encoder(model) else None)
            torch.compile(model.loss, backend=backend, fullgraph=True)(tokens, tokens, call).backward()
        return {"graphs": len(graphs)}

    def steps(self, trial: Trial, recipe: Recipe, model: nn.Module) -> Any:
        """What the first loop's passes were launched by."""
        seed = seeds_of(trial, recipe).data
        loop = Loop(self.folder, trial.key, 0, recipe, self.dataset, model, seed)
        loop.update(0)
        loop.log(Quiet())
        with evaluating(model), self.watched.nothing_waits(), autocast(CARD, recipe.precision):
            loop.team.score(model, next(loop.curve.parts(recipe.micro_batch)), CARD)
        kept = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, loop.state())
        again = Loop(self.folder, trial.key, 0, recipe, self.dataset, model, seed)
        again.restore(kept)
        with self.watched.nothing_waits():
            again.update(1)
        return loop.passes


@contextmanager
def moved(fake: FakeTensorMode) -> Iterator[None]:
    """Inside it a module that moves to the card keeps the shapes of its tensors; one that is left behind is refused."""
    before = nn.Module.to

    def to(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
        known: dict[nn.Parameter, nn.Parameter] = {}  # by the tensor itself, which this keeps
        for part in module.modules():
            for name, x in part._parameters.items():
                if x is not None:
                    part._parameters[name] = known.setdefault(x, parameter(fake, x))
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = alike(fake, buffer)
        return module

    nn.Module.to = to
    try:
        yield
    finally:
        nn.Module.to = before


def alike(fake: FakeTensorMode, x: Tensor) -> Tensor:
    with fake:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CARD)


def parameter(fake: FakeTensorMode, x: nn.Parameter) -> nn.Parameter:
    found = nn.Parameter(alike(fake, x), requires_grad=x.requires_grad)
    found.__dict__.update({name: value for name, value in x.__dict__.items() if name not in found.__dict__})
    return found


@contextmanager
def on_card(fake: FakeTensorMode) -> Iterator[None]:
    """Inside it tensors have no values, those of arrays neither, and memory is pinned by saying so."""
    from_numpy, before = torch.from_numpy, (Tensor.pin_memory, Tensor.numpy, Tensor.tolist)

    def pinned(x: Tensor) -> Tensor:
        x.pinned = True
        return x

    def numpy(x: Tensor, **_: Any) -> np.ndarray[Any, Any]:
        assert x.device.type == "cpu"
        return np.full(tuple(x.shape), 1, str(x.dtype).removeprefix("torch."))

    torch.from_numpy = lambda array: fake.from_tensor(from_numpy(np.ascontiguousarray(array)))
    Tensor.numpy = numpy
    Tensor.tolist = lambda x: numpy(x).tolist()
    Tensor.pin_memory = pinned
    try:
        with fake, torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.from_numpy = from_numpy
        Tensor.pin_memory, Tensor.numpy, Tensor.tolist = before
