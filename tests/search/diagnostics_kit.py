"""What diagnostics are held against: the same model in float64, whose attention is written out pair by pair.

The attention op of every module is replaced by one that makes the whole matrix and keeps it; what else is looked at
comes from forward hooks. Nothing of it knows that a model can be watched.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.arch_dsl.compiler.modules import LanguageModel
from archlab.arch_dsl.language.spec import walk
from archlab.arch_dsl.model.model import EncoderDecoderModel
from archlab.arch_dsl.primitives.heads import MultiHead, MultiHeadModule
from archlab.arch_dsl.tree.block import Branches
from archlab.kernels.attention import CAUSAL, Pattern
from archlab.search.data.batches import Batch
from archlab.search.data.dataset import Dataset, write
from archlab.search.data.tokenizers.family import Bytes
from archlab.search.evaluation.measures import About, Measure, Subject
from archlab.search.evaluation.sample import Sampled
from archlab.search.recipe.recipe import load_recipe
from tests.arch_dsl.formulas import ACTIVATIONS

CONTEXT, VOCAB = 24, 300


def make_dataset(root: Path) -> Dataset:
    """Documents of 5 to 40 bytes, so that windows hold ends of documents, and begin inside of them."""
    (root / "data").mkdir()
    texts = [bytes((17 * i + 5 * j * j) % 250 for j in range(5 + 11 * i % 36)) for i in range(30)]
    write(root / "data", Bytes().train([], "tokenizer"), dict.fromkeys(("train", "validation", "test"), texts), {})
    return Dataset.open(root, "data")


def make_about(dataset: Dataset, spec: Any, **recipe: Any) -> About:
    """A model from a spec or a mapping, for windows of CONTEXT tokens."""
    model = arch_dsl.load(spec) if isinstance(spec, dict) else spec
    changed = {"vocab": VOCAB}
    if model.max_positions is not None:
        changed["max_positions"] = max(model.max_positions, 3 * CONTEXT)
    model = arch_dsl.resolve(arch_dsl.patch(model, changed), max_positions=3 * CONTEXT)
    fields = {"tokens": 1000, "context": CONTEXT, "batch": 4, "lr": 1e-3, "precision": "fp32", **recipe}
    return About(model, load_recipe(fields), dataset)


def make_subject(about: About, *asked: Measure, model: nn.Module | None = None) -> Subject:
    """An untrained model in float64 whose parameters are uneven enough for attention to be, or a given one."""
    if model is None:
        model = arch_dsl.compile(about.model, seed=3).double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.2)
        model.separator = about.dataset.eod
    subject = Subject(about, torch.device("cpu"), {}, lambda: None, asked)
    subject.__dict__["model"] = model
    return subject


@dataclass
class Plain:
    """By module, a list over the layers that have it: attention `[batch, heads, queries, keys]` with the pairs that
    there are and what was read `[batch, heads, queries, width]`; scores of gates, with what came in and out; logarithms
    of forget gates `[batch, time, heads]`; the stream after a layer."""

    weights: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    gates: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    forgets: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    streams: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))


def _summed(kept: list[Tensor]) -> Any:
    """A hook that keeps the stream `[batch, time, d_model]` that a layer gives, the sum of several."""
    return lambda module, given, out: kept.append(out if out.dim() == 3 else out.sum(2))


def plainly(model: LanguageModel, asked: Batch) -> Plain:
    """What passes through a model that reads a whole sample at once."""
    found, hooks = Plain(), []
    before = {module: module.attend for module in model.modules() if isinstance(module, MultiHeadModule)}
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadModule):
            module.attend = _kept(found.weights[name])
        elif isinstance(module, Branches):
            hooks.append(module.register_forward_hook(_summed(found.streams[name])))
        elif type(module).__name__ == "_Gate":
            hooks.append(module.register_forward_hook(_scores(found.gates[name])))
        elif type(module).__name__ == "_HiddenForgetGate":
            kept = found.forgets[name]
            hook = module.projection.register_forward_hook(lambda m, given, out, kept=kept: kept.append(_logs(out)))
            hooks.append(hook)
    tokens, _, call = asked.tensors()
    try:
        with torch.no_grad():
            model.eval().hidden(tokens, call)
    finally:
        for module, attend in before.items():
            module.attend = attend
        for hook in hooks:
            hook.remove()
    return found


def _logs(logits: Tensor) -> Tensor:
    return (1 / (1 + (-logits).exp())).log()


def _scores(kept: list[tuple[Tensor, Tensor, Tensor]]) -> Any:
    """Keeps the scores of a gate, by the formula, with what it gated and the result."""

    def hook(module: Any, given: tuple[Any, ...], out: Tensor) -> None:
        logits = module.constant if len(given) == 2 else _of_rank(module, given[2]).unflatten(-1, module.shape)
        if module.shared:
            logits = logits.mean(-2, keepdim=True)
        function = module.activation if callable(module.activation) else ACTIVATIONS[module.activation]
        kept.append((function(logits).detach(), given[0].detach(), out.detach()))

    return hook


def _of_rank(module: Any, projected: Tensor) -> Tensor:
    """The scores of a gate from what its projection gave, which is the first of two maps where it has a rank, and the
    branch's input where it reads some channels of that."""
    if module.outer is None:
        return projected
    scores = torch.einsum("...r,or->...o", projected[..., : module.channels], module.outer.weight)
    return scores if module.outer.bias is None else scores + module.outer.bias


def _kept(kept: list[tuple[Tensor, Tensor, Tensor]]) -> Any:
    """Attention by its formula over the whole matrix, which is kept."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
        pattern: Pattern = CAUSAL,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        prefix: Tensor | None = None,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
        **pieces: Tensor | None,
    ) -> Tensor:
        relative, decay, reach = (pieces.pop(name, None) for name in ("relative", "decay", "reach"))
        assert all(value is None for value in pieces.values()), "attention has more to it"
        group = q.shape[1] // k.shape[1]
        k, v = (torch.stack([x[:, head // group] for head in range(q.shape[1])], 1) for x in (k, v))
        logits = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        queries, keys = logits.shape[-2:]
        if bias is not None:
            logits = logits + bias
        seen = torch.zeros(logits.shape, dtype=torch.bool)
        for b in range(len(q)):
            told = [None if x is None else x[b].tolist() for x in (prefix, documents, padding)]
            for i, j in itertools.product(range(queries), range(keys)):
                at = i + keys - queries
                seen[b, :, i, j] = reads(pattern, at, j, keys, *told)
                if relative is not None:
                    logits[b, :, i, j] += relative[:, at - j + keys - 1]
                if decay is not None:
                    own = decay[min(b, len(decay) - 1)]
                    logits[b, :, i, j] += own[:, at] - own[:, j]
                    if reach is not None:
                        logits[b, own[:, j] > reach[min(b, len(reach) - 1)][:, i], i, j] = -math.inf
        seen = seen & (logits > -math.inf)
        exponents = torch.where(seen, logits.exp(), 0)
        total = exponents.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.exp()[:, None, None]
        weights = exponents / total
        out = weights @ v
        kept.append((weights, seen, out))
        return out

    return attend


def reads(
    pattern: Pattern, i: int, j: int, keys: int, prefix: Any, documents: list[int] | None, padding: list[bool] | None
) -> bool | Tensor:
    """Whether query i reads key j, or with blocks which heads do."""
    if pattern.blocks is not None:
        heads = pattern.allowed(torch.tensor([[i]]), torch.tensor([j]), keys)
        assert padding is None and documents is None
        return True if heads is None else heads[:, 0, 0]
    if pattern.order == "cross":
        return padding is None or not padding[j] or all(padding)
    read = j <= i if pattern.order == "causal" else True
    if pattern.columns is not None and pattern.stride is not None:
        read = read and (
            i // pattern.stride == j // pattern.stride or j % pattern.stride >= pattern.stride - pattern.columns
        )
    elif pattern.window is not None:
        far = bool(pattern.stride) and (i - j) % (pattern.stride or 1) == 0
        read = read and (abs(i - j) < pattern.window or far or j < (pattern.first or 0))
    read = read or (prefix is not None and max(i, j) < prefix)
    read = read and (documents is None or documents[i] == documents[j])
    return read and (padding is None or not padding[j] or i == j)


WINDOWS = 3
ATTENTION: dict[str, Any] = {"heads": 4, "kv_heads": 2}


def small(attention: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    block = {"norm": "rmsnorm", "attention": ATTENTION | (attention or {}), "ffn": {"type": "mlp", "width": 24}}
    return {"d_model": 16, "n_layers": 2, "block": block, **fields}


def attention_of(name: str) -> Iterator[Any]:
    """The parts of the layers of a model of the zoo."""
    return (part for stack in zoo.load(name, "tiny").stacks().values() for _, part in walk(tuple(stack.layers())))


VARIANTS: dict[str, dict[str, Any]] = {
    "sinks": small({"scores": ["sinks"]}),
    "softcap": small({"scores": [{"type": "softcap", "cap": 2.0}]}),
    "alibi_sinks": small({"scores": ["alibi", "sinks"]}),
    "t5": small({"scores": [{"type": "t5_buckets", "buckets": 8, "max_distance": 10, "share": "stack"}]}),
    "kerple": small({"scores": ["kerple"]}),
    "transformer_xl": small({"scores": ["transformer_xl"]}),
    "forget_gate": small({"scores": ["forget_gate"]}),
    "forget_gate_learned": small({"scores": [{"type": "forget_gate", "input": "learned", "t_min": 2, "t_max": 9}]}),
    "window": small({"mask": {"type": "window", "size": 5}}),
    "documents": small({"mask": {"type": "causal", "documents": True}}),
    "window_first": small({"mask": {"type": "window", "size": 5, "first": 3}}, prompt=3),
    "window_documents": small({"mask": {"type": "window", "size": 5, "documents": True}}),
    "memory": small({"memory": 3, "mask": {"type": "window", "size": 6}}),
    "prompt": small(prompt=4),
    "positions": small({"queries": "positions"}, max_positions=64),
    "shared": small({"share": "stack"}),
    "gated": small({"query": ["gate"], "sdpa": [{"type": "gate", "heads": "shared", "activation": "tanh"}]}),
    "constant_gate": small({"sdpa": [{"type": "gate", "input": "none"}]}),
    "layers_differ": small(overrides={"1": {"block.attention.heads": 2, "block.attention.kv_heads": 1}}),
}
ZOO = [name for name in zoo.names() if any(isinstance(part, MultiHead) for part in attention_of(name))]


def about_of(dataset: Dataset, name: str) -> About:
    """A variant or a small model of the zoo, with an objective that can train it."""
    spec = VARIANTS[name] if name in VARIANTS else zoo.load(name, "tiny")
    objective = "prefix" if isinstance(spec, EncoderDecoderModel) else "masked" if name == "bigbird" else "causal"
    return make_about(dataset, spec, objective=objective)


def measured(subject: Subject, *measures: Measure) -> list[Any]:
    """What each finds, all being asked together."""
    together = make_subject(subject.about, *measures, model=subject.model)
    return [measure.compute(together) for measure in measures]


def every(about: About) -> list[Sampled]:
    """All diagnostics that mean something for a model."""
    found = [member() for member in Measure.members.values() if issubclass(member, Sampled)]
    return [each for each in found if each.refusal(about) is None]
