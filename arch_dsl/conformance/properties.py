"""What every primitive is held to: properties of a model in which it stands, each a sentence and a function.

A function gives what is wrong, or '' where the property holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from archlab.arch_dsl.compiler.modules import LanguageModel, compile
from archlab.arch_dsl.conformance.effects import build, build_as_for_a_gpu, randomize
from archlab.arch_dsl.conformance.fields import accepted, choices, has_parameters, tried
from archlab.arch_dsl.conformance.hosts import (
    LENGTH,
    PADDING,
    SOURCE,
    TARGETS,
    TOKENS,
    UNSHARED,
    VOCAB,
    Case,
    load,
    resolve,
)
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.spec import Family, Spec, fields_of, walk
from archlab.arch_dsl.model.model import Model, cost
from archlab.arch_dsl.parts.context import Call, State
from archlab.arch_dsl.parts.families import Mask
from archlab.arch_dsl.primitives.rope_scaling import RopeScaling
from archlab.arch_dsl.tree.identity import canonical, dump

Property = Callable[[Case], str]
_TAUGHT_BESIDE = re.compile(r"\.lightning_indexer\.|\.depths\.(hidden|output)\.")
ROUNDING = 1e-11  # of a product in float64 whose other rows are others, as those of an expert are


def read(rows: int = len(SOURCE)) -> Call:
    """What the first rows are read with, which decoders leave alone: a call of its own, as losses and measures that an
    earlier one left would be inputs of a captured graph."""
    return Call(source_tokens=SOURCE[:rows], source_padding=PADDING[:rows])


READ = read()


def differentiate(module: LanguageModel) -> None:
    """Leaves the gradients of the loss, and of those that a call holds, in the parameters."""
    call = read()
    loss = module.loss(TOKENS, TARGETS, call)
    sum(call.losses.values(), loss).backward()


def keeps_shape(case: Case) -> str:
    """Hidden states, logits and the loss have their shapes, and are finite in float32."""
    module = build(case.model, backend="auto", dtype=torch.float32)
    hidden, logits, loss = module.hidden(TOKENS, READ), module(TOKENS, READ), module.loss(TOKENS, TARGETS, READ)
    if hidden.shape != (2, LENGTH, 16) or logits.shape != (2, LENGTH, VOCAB) or loss.shape != ():
        return f"shapes {tuple(hidden.shape)}, {tuple(logits.shape)}, {tuple(loss.shape)}"
    return "" if logits.isfinite().all() and loss.isfinite() else "some outputs are not finite"


def gradients_reach_everything(case: Case) -> str:
    """Every parameter has a finite gradient: of the loss of tokens, or what only a loss beside it teaches, of that."""
    module = build(case.model, backend="auto", dtype=torch.float32)
    module.loss(TOKENS, TARGETS, read()).backward()
    gradients = {name: value.grad for name, value in module.named_parameters() if not _TAUGHT_BESIDE.search(name)}
    differentiate(module)
    gradients |= {name: value.grad for name, value in module.named_parameters() if name not in gradients}
    bad = [name for name, grad in gradients.items() if grad is None or not grad.isfinite().all()]
    return f"no finite gradient: {', '.join(bad)}" if bad else ""


def looks_only_back(case: Case) -> str:
    """A changed token changes its own logits and later ones of its sequence, and no others.

    Only where a mask looks ahead does it change earlier ones; where a choice of experts does, it may.
    """
    module, ahead, masked = build(case.model), _looks_ahead(case), _looks_ahead(case, Mask)
    before = module(TOKENS, READ)
    for t in (0, 5, LENGTH - 1):
        other = TOKENS.clone()
        other[0, t] = 17
        moved = (module(other, READ) - before).abs().amax(-1)
        if masked and t and not moved[0, :t].sum() > 1e-6:
            return f"token {t} changes no earlier logits, though its mask looks ahead"
        if not ahead and moved[0, :t].sum() > ROUNDING:
            return f"token {t} changes earlier logits"
        if moved[1].sum() > ROUNDING:
            return f"token {t} changes another sequence"
        if not moved[0, t] > 1e-6:
            return f"token {t} does not change its own logits"
    return ""


def costs_are_exact(case: Case) -> str:
    """The parameters and the FLOPs that the spec says are those of the module."""
    module = compile(case.model, backend="reference")
    said = cost(case.model, LENGTH)
    found = sum(value.numel() for value in module.parameters())
    if said.parameters != found:
        return f"cost says {said.parameters} parameters, the module has {found}"
    with FlopCounterMode(display=False) as counter:
        module(TOKENS[:1], read(1))
    if said.flops_matmul != counter.get_total_flops():
        return f"cost says {said.flops_matmul} FLOPs of matrix products, there are {counter.get_total_flops()}"
    if said.flops_model <= said.flops_matmul:
        return ""
    blocks = [block for stack in case.model.stacks().values() for block in stack.layers()]
    recurrent = any(branch.recurrent for block in blocks for branch in block.values())
    return "" if recurrent else "cost says more FLOPs with the mask than without"


def round_trips(case: Case) -> str:
    """The canonical form and the YAML of a model load as that model, which is resolved."""
    plain = canonical(case.model)
    if parse(Model, plain) != case.model or canonical(parse(Model, plain)) != plain:
        return "its canonical form loads as another model"
    if parse(Model, yaml.safe_load(dump(case.model))) != case.model:
        return "its YAML loads as another model"
    return "" if resolve(case.model) == case.model else "resolving it again changes it"


def every_field_counts(case: Case, seed: str | None = None) -> str:
    """Another value of a field changes the identity, and outputs, initial values or gradients. With a `seed` each field
    takes one that is drawn."""
    reached, ignored = tried(case, seed)
    if ignored:
        return f"accepted and ignored: {', '.join(dict.fromkeys(ignored))}"
    missing = choices(case) - reached if case.plain else set()
    if missing:  # fields that matter only beside others
        missing -= {name for other in case.others() for name in accepted(other)}
    return f"took no other value that was tried: {', '.join(sorted(missing))}" if missing else ""


def precisions_agree(case: Case) -> str:
    """float64 on the reference and float32 on the chosen kernels give the same logits."""
    exact, fast = build(case.model), build(case.model, backend="auto", dtype=torch.float32)
    if exact(TOKENS, READ).dtype != torch.float64:
        return f"its outputs are {exact(TOKENS, READ).dtype} in a model of float64"
    return _apart(fast(TOKENS, READ).double(), exact(TOKENS, READ), 2e-4)


def merged_products_agree(case: Case) -> str:
    """Maps that read one tensor, computed as one product as on a GPU, give the same logits and gradients."""
    one, many = build_as_for_a_gpu(case.model), build(case.model)
    if apart := _apart(one(TOKENS, READ), many(TOKENS, READ), 1e-10):
        return apart
    for module in (one, many):
        differentiate(module)
    others = dict(many.named_parameters())
    for name, value in one.named_parameters():
        if apart := _apart(value.grad, others[name].grad, 1e-10):
            return f"gradient of {name}: {apart}"
    return ""


def positions_count_from_zero(case: Case) -> str:
    """Positions that are not given are 0, 1, 2 and so on."""
    module = build(case.model)
    return _apart(module(TOKENS, READ), module(TOKENS, replace(READ, positions=torch.arange(LENGTH))), 0.0)


def reads_in_pieces(case: Case) -> str:
    """Tokens that are read in pieces, with a state that is handed on, have the logits of reading them at once.

    A model whose masks look ahead says that it cannot.
    """
    if _looks_ahead(case):
        return _refuses_to_decode(build(case.model))
    tokens = TOKENS[:, : _longest(case)]
    for backend, dtype, most in (("reference", torch.float64, 1e-10), ("auto", torch.float32, 2e-4)):
        module = build(case.model, backend=backend, dtype=dtype)
        with torch.no_grad():
            if apart := _apart(_in_pieces(module, tokens, State()), module(tokens, READ), most):
                return f"{dtype}: {apart}"
    return ""


def holds_what_its_cost_says(case: Case) -> str:
    """What decoding holds when tokens have been read has as many elements as the cost says.

    Not where routers choose the tokens whose keys are held: the cost says how many those are in training.
    """
    if _looks_ahead(case) or any(stack.depths for stack in case.model.stacks().values()):
        return ""
    module = build(case.model)
    for tokens in (1, LENGTH):
        state = State()
        with torch.no_grad():
            _in_pieces(module, TOKENS[:1, :tokens], state)
        leaves = _pytree.tree_leaves(state.layers)
        held = [value for value in leaves if isinstance(value, Tensor) and value.is_floating_point()]
        said, found = cost(case.model, tokens, LENGTH).cache, sum(value.numel() for value in held)
        if said != found:
            return f"cost says {said} elements after {tokens} tokens, it holds {found}"
        kept = sum(value.untyped_storage().nbytes() // value.element_size() for value in held)
        if kept != found:
            return f"holds views of {kept} elements, of which it needs {found}"
    return ""


def _in_pieces(module: LanguageModel, tokens: Tensor, state: State) -> Tensor:
    """Logits of tokens that are read as several, one, one, and the rest."""
    several = max(tokens.shape[1] - 7, 1)
    pieces = (tokens[:, :several], *tokens[:, several : several + 2].split(1, 1), tokens[:, several + 2 :])
    call = replace(read(len(tokens)), state=state)
    return torch.cat([module(piece, call) for piece in pieces if piece.shape[1]], 1)


def _overriding(case: Case) -> list[Family]:
    """The branches of layers that are unlike the first one."""
    blocks = [block for stack in case.model.stacks().values() for block in stack.layers() if block != stack.block]
    return [branch for block in blocks for branch in block.values()]


def _looks_ahead(case: Case, kind: type[Spec] = Spec) -> bool:
    *_, last = case.model.stacks().values()
    return any(isinstance(spec, kind) and getattr(spec, "looks_ahead", False) for _, spec in walk(last))


def _refuses_to_decode(module: LanguageModel) -> str:
    try:
        module(TOKENS, replace(READ, state=State()))
    except ValueError as error:
        return "" if "looks ahead" in str(error) else f"says of decoding: {error}"
    return "decodes, though its mask looks ahead"


def _longest(case: Case) -> int:
    """How many tokens can be read in pieces: all, or those before frequencies begin to change with the length."""
    scalings = (spec for _, spec in walk(case.model) if isinstance(spec, RopeScaling) and spec.by_length)
    return min((scaling.original for scaling in scalings), default=LENGTH)  # type: ignore[attr-defined]


def one_graph(model: Model) -> str:
    """torch.compile captures it without a break, and torch.export exports it."""
    module = compile(model).eval()
    randomize(module)
    expected = module(TOKENS, read())
    torch._dynamo.reset()
    captured = torch.compile(module, fullgraph=True, backend="aot_eager")
    if apart := _apart(captured(TOKENS, read()), expected, 1e-5):
        return f"captured, {apart}"
    call = read()
    sum(call.losses.values(), captured(TOKENS, call).sum()).backward()
    if lost := [name for name, value in module.named_parameters() if value.grad is None]:
        return f"captured, no gradient: {', '.join(lost)}"
    program = torch.export.export(module, (TOKENS, read()))
    return _apart(program.module()(TOKENS, read()), expected, 1e-5)


def can_be_shared(case: Case) -> str:
    """With `share: stack`, the first layer's parameters are those of all layers."""
    changed: Any = canonical(case.model)
    stacks = [changed[name] if name else changed for name in case.model.stacks()]
    if min(stack["n_layers"] for stack in stacks) < 2 or not has_parameters(case):
        return ""
    if any(spec.type in case.tried for spec in _overriding(case)):
        return ""  # in layers that differ there is nothing to share
    kinds = {type(spec) for _, spec in walk(case.model) if isinstance(spec, Family) and spec.type in case.tried}
    if not any("share" in fields_of(kind) and kind.type not in UNSHARED for kind in kinds):
        return ""
    for stack in stacks:
        _share(stack["block"], case.tried)
    shared = load(changed)
    one, two = (sum(value.numel() for value in compile(model).parameters()) for model in (shared, case.model))
    if one >= two:
        return f"{one} parameters with `share: stack`, {two} without"
    return "" if cost(shared, LENGTH).parameters == one else f"cost says {cost(shared, LENGTH).parameters}, not {one}"


PROPERTIES: dict[str, Property] = {
    "keeps shapes, finite": keeps_shape,
    "gradients reach every parameter": gradients_reach_everything,
    "looks only back": looks_only_back,
    "costs are exact": costs_are_exact,
    "loads from its canonical form and its YAML": round_trips,
    "every field changes the result": every_field_counts,
    "float32 on fast kernels agrees with float64": precisions_agree,
    "merged products agree": merged_products_agree,
    "positions count from 0": positions_count_from_zero,
    "layers can share it": can_be_shared,
    "reads in pieces as at once": reads_in_pieces,
    "holds what its cost says": holds_what_its_cost_says,
}


def _apart(a: Tensor | None, b: Tensor | None, most: float) -> str:
    """How far two results are apart; '' within `most` of the largest value, or of 1 where all are smaller."""
    assert a is not None and b is not None
    if a.shape != b.shape:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    scale = max(1.0, b.abs().max().item())
    if (apart := (a - b).abs().max().item()) <= most * scale:
        return ""
    return f"results are {apart:.2g} apart" + (f", of at most {scale:.2g}" if scale > 1 else "")


def _share(data: Any, types: tuple[str, ...]) -> None:
    """Sets `share: stack` on all primitives of these types in a canonical form."""
    if isinstance(data, dict) and data.get("type") in types:
        data["share"] = "stack"
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    for value in inner:
        _share(value, types)
