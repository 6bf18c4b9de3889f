"""Our models beside transformers' own: the same weights, through the maps of the zoo, must give the same numbers.

`python -m tests.arch_dsl.parity` prints the table of the largest errors.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl import Call, Model, SpecError, canonical, zoo
from archlab.arch_dsl.compiler.modules import LanguageModel, build
from archlab.arch_dsl.compiler.modules import stored as stored_by
from archlab.arch_dsl.conformance.fields import alterations
from archlab.arch_dsl.conformance.hosts import Case
from archlab.arch_dsl.language.spec import Family, walk
from archlab.arch_dsl.model.initial_values import Init
from archlab.arch_dsl.parts.context import State
from archlab.arch_dsl.primitives.positions import Learned
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.identity import normal_form
from archlab.arch_dsl.tree.overrides import Overrides
from archlab.arch_dsl.weights.conversion import export_tensors, import_tensors
from archlab.arch_dsl.weights.layout import load_layout
from tests.slow_tests import ALL

VOCAB, LENGTH = 61, 40
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(6))
SOURCE = torch.randint(0, VOCAB, (2, 33), generator=torch.Generator().manual_seed(7))  # what encoders read
PADDING = torch.arange(33) >= torch.tensor([[33], [26]])
LOGITS, GRADIENTS = 1e-5, 1e-4  # largest relative errors in float32


@dataclass(frozen=True, eq=False)
class Published:
    """A model of transformers with a tiny configuration, and ours of the same architecture."""

    id: str
    theirs: Callable[[], nn.Module]
    spec: dict[str, Any]
    layout: str
    zoo: str | None = None  # the model of the zoo, with its size if it matters, that it is a small one of
    spread: float = 2.0  # of its random matrices, times 1 / sqrt(inputs); less where rounding would grow too much

    def __str__(self) -> str:
        return self.id


_layout = cache(load_layout)


def model_of(published: Published) -> Model:
    """Our spec, resolved."""
    return arch_dsl.resolve(arch_dsl.load(published.spec), vocab=VOCAB, max_positions=LENGTH)


@cache
def theirs_of(published: Published) -> nn.Module:
    """Their model with random parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = published.theirs().float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
            drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
            around = 1.0 if _is_norm(name) else 0.0
            value.copy_(around + drawn * (0.3 if value.ndim == 1 else published.spread / value.shape[-1] ** 0.5))
    return model


def _is_norm(name: str) -> bool:
    return any(word in name for word in ("norm", "ln_")) and name.endswith("weight")


@cache
def weights_of(published: Published) -> dict[str, Tensor]:
    """What a checkpoint of their model holds: tables that are tied once."""
    theirs = theirs_of(published)
    kept = {name for name, _ in (*theirs.named_parameters(), *theirs.named_buffers())}
    return stored(theirs, {name: value.clone() for name, value in theirs.state_dict().items() if name in kept})


def stored(theirs: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of their model as its checkpoints hold them: those of all experts one by one,
    and under the names of old where these differ."""
    from transformers.core_model_loading import revert_weight_conversion

    if not any(".experts." in name or ".0.mixer." in name for name in tensors):
        return tensors
    found: dict[str, Tensor] = revert_weight_conversion(theirs, tensors)
    return found


def ours_of(published: Published, model: Model) -> LanguageModel:
    """Our model with their weights. Raises SpecError if they don't fit."""
    module = build(model, model.context())
    mine = stored_by(module)
    shapes = {name: tuple(value.shape) for name, value in mine.items()}
    imported = import_tensors(_layout(published.layout), model, weights_of(published), shapes)
    assert imported.fresh == []
    with torch.no_grad():
        for name, value in mine.items():
            value.copy_(imported.tensors[name])
    return module


@cache
def expected(published: Published) -> Tensor:
    """Their logits."""
    with torch.no_grad():
        return logits_of(theirs_of(published))


def decoded(published: Published) -> Tensor:
    """Our logits of reading its tokens one by one."""
    ours, state = ours_of(published, model_of(published)), State()
    with torch.no_grad():
        return torch.cat([ours(TOKENS[:, t : t + 1], Call(state=state)) for t in range(TOKENS.shape[1])], 1)


def logits_of(theirs: nn.Module) -> Tensor:
    """The logits of a model of transformers; one with an encoder reads a source with padding too."""
    if theirs.config.is_encoder_decoder:  # type: ignore[union-attr]
        logits: Tensor = theirs(SOURCE, (~PADDING).long(), decoder_input_ids=TOKENS).logits
    else:
        logits = theirs(TOKENS).logits
    return logits


def call_of(model: Model) -> Call:
    """What ours reads beside the tokens."""
    prefix = torch.tensor([7, 11])  # theirs have none, and so must ours
    source = {"source_tokens": SOURCE, "source_padding": PADDING} if "encoder" in model.stacks() else {}
    return Call(prefix=prefix, **source)


def errors(published: Published) -> tuple[float, float]:
    """The largest relative errors of the logits, and of the gradient of any weight of theirs."""
    model = model_of(published)
    theirs, ours = theirs_of(published), ours_of(published, model)
    targets = TOKENS.roll(-1, 1)
    logits = logits_of(theirs)
    theirs.zero_grad()
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    ours.loss(TOKENS, targets, call_of(model)).backward()
    mine = gradients_of(ours)
    gradients = export_tensors(_layout(published.layout), model, mine)
    wanted = stored(theirs, gradients_of(theirs))
    assert gradients.keys() == wanted.keys(), set(gradients) ^ set(wanted)
    # A gradient that is zero but for rounding (of a bias of keys, say) is measured by the others.
    floor = 1e-2 * max(float(value.abs().max()) for value in wanted.values())
    worst = max(
        float((gradients[name] - value).abs().max() / max(float(value.abs().max()), floor))
        for name, value in wanted.items()
    )
    return relative(ours(TOKENS, call_of(model)).detach(), logits.detach()), worst


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter, zero where the loss of tokens gives none, as to an indexer."""
    named = module.named_parameters()
    return {name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in named}


def relative(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def survivors(published: Published) -> Iterator[tuple[str, Model]]:
    """Every alteration of one field of our spec, but those that are known to be inert, that their weights and numbers
    do not refuse.

    """
    yield from surviving(published.id, model_of(published), partial(breaks, published))


def surviving(of: str, model: Model, breaks: Callable[[Model], bool]) -> Iterator[tuple[str, Model]]:
    """Every alteration of one field of a spec that is not known to be inert, and that breaks nothing.

    A block that only some layers have is altered in these alone: with ARCHLAB_ALL wholly, and otherwise in the branches
    that no block before it has, whose fields took the same values there.
    """
    for path, changed in _alterations(of, model):
        if changed != model and not breaks(changed):
            yield path, changed
    for name, stack in model.stacks().items():
        blocks, within = stack.layers(), f"{name}.block." if name else "block."
        done = set(stack.block.items())
        for block in dict.fromkeys(blocks[1:]) if stack.overrides else ():
            if block == stack.block:
                continue
            alike = model.with_stack(name, stack.replace(block=block, overrides=Overrides()))
            for path, changed in _alterations(of, alike):
                other = changed.stacks()[name].block
                if not path.startswith(within) or other == block:
                    continue
                branch = path.removeprefix(within).partition(".")[0]
                if not ALL and (branch, block[branch]) in done:
                    continue
                first, overrides = normal_form([other if each == block else each for each in blocks])
                try:
                    whole = arch_dsl.resolve(model.with_stack(name, stack.replace(block=first, overrides=overrides)))
                except SpecError:
                    continue  # needs layers that the others are not
                if not breaks(whole):
                    yield path, whole
            done.update(block.items())


def _alterations(name: str, model: Model) -> Iterator[tuple[str, Model]]:
    """Of every field that is not inert one value, or with ARCHLAB_ALL all; models draw different ones of the fields
    that they share."""
    parts = dict(walk(model))
    kinds = {spec.type if isinstance(spec, Family) else path for path, spec in parts.items()}
    tables = any(isinstance(spec, Learned) for spec in parts.values())
    inert = re.compile("|".join(pattern for pattern, _ in (*INERT, *(() if tables else (ROOM,)))))
    for path, changed in alterations(Case(name, model, tuple(kinds), plain=True), seed=None if ALL else name):
        if not inert.fullmatch(path):
            yield path, changed


def breaks(published: Published, changed: Model) -> bool:
    """Whether their weights do not fit a model, or its logits are not theirs."""
    try:
        module = ours_of(published, changed)
    except SpecError:
        return True
    with torch.no_grad():
        return not relative(module(TOKENS, call_of(changed)), expected(published)) <= LOGITS


# What changes no number of a model whose weights are given, and why.
INERT = (
    (r"init\..*|.*(?<!\.mask)\.(std|start|first|last|zero|a_min|a_max|dt_min|dt_max)", "initial values alone"),
    (r".*\.(balance|z_loss)(\..*)?", "a loss of training alone"),
    (r".*\.scores\.[0-9]+\.coefficient", "the weight of a loss of training alone"),
    (r".*\.scores\.[0-9]+\.key\.[0-9]+\.over", "an indexer has keys of one head"),
    (r".*\.capacity", "bounds what experts serve while training alone"),
    (r"constraint", "acts on weights while they are trained"),
    (r".*\.documents", "acts where a call says which document a token is of"),
)
ROOM = ("max_positions", "the size of tables of angles, beyond which they are computed")  # without a table of positions


def outline(model: Model) -> Any:
    """All choices of a model but its numbers and initial values."""
    kept, blocks = model.replace(init=Init()), []
    for name, stack in model.stacks().items():
        blocks.append([canonical(block) for block in dict.fromkeys(stack.layers())])
        kept = kept.with_stack(name, kept.stacks()[name].replace(block=Block({}.items()), overrides=Overrides()))
    return _without_numbers([canonical(kept), blocks])


def outline_of_zoo(name: str) -> Any:
    """That of a model of the zoo, NAME or NAME/SIZE."""
    name, slash, size = name.partition("/")
    return outline(arch_dsl.resolve(zoo.load(name, size if slash else None)))


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_numbers(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"[0-9.]+", "a number", value)  # of formulas
    return "a number" if isinstance(value, int | float) and not isinstance(value, bool) else value


# Models whose fields are altered in `make test`: between them, one of each kind of branch.
ALTERED = ("gpt2", "gptj", "llama", "mamba2", "mamba", "rwkv4")


def trials_of(models: list[Published]) -> list[Any]:
    """Test parameters: all models, of which most, as they take their time, are slow tests."""
    return [pytest.param(each, id=each.id, marks=[] if each.id in ALTERED else [pytest.mark.slow]) for each in models]


def unexplained(published: Published) -> list[str]:
    """The alterations after which the parity still holds, though nobody says why."""
    model = model_of(published)
    return [f"{path}: {'; '.join(map(str, arch_dsl.diff(model, changed)))}" for path, changed in survivors(published)]


def main() -> None:
    """Prints the largest relative error of the logits and of the gradients, model by model."""
    from tests.arch_dsl.zoo import (
        test_parity_classic,
        test_parity_encoder,
        test_parity_encoder_decoder,
        test_parity_experts,
        test_parity_families,
        test_parity_gemma3n,
        test_parity_hybrids,
        test_parity_kimi,
        test_parity_mixers,
        test_parity_modern,
        test_parity_moe,
        test_parity_recent,
        test_parity_scans,
        test_parity_xlstm,
    )

    dense = (test_parity_classic, test_parity_modern, test_parity_families, test_parity_gemma3n)
    experts = (test_parity_moe, test_parity_experts)
    mixed = (test_parity_mixers, test_parity_kimi, test_parity_scans, test_parity_xlstm, test_parity_hybrids)
    files = (*dense, *experts, *mixed, test_parity_recent, test_parity_encoder, test_parity_encoder_decoder)
    print("| model | map | logits | gradients |\n|---|---|---|---|")
    for published in (each for file in files for each in file.ALL):
        logits, gradients = errors(published)
        print(f"| {published} | `{published.layout}` | {logits:.1e} | {gradients:.1e} |")


if __name__ == "__main__":
    main()
