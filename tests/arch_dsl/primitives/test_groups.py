"""Sequential groups, concatenated embeddings and low-rank updates of shared branches, written out in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from archlab.arch_dsl.compiler.modules import LanguageModel, build
from archlab.arch_dsl.conformance.hosts import LENGTH, TOKENS, VOCAB, load
from archlab.arch_dsl.model.model import cost
from archlab.arch_dsl.parts.context import Call, State
from archlab.arch_dsl.parts.layers import initialize
from tests.arch_dsl.specs import assert_plain_agrees, attention_case

ALONE = {"type": "weighted", "stream": 0.0}
NORM = {"type": "rmsnorm", "eps": 0.1}
LORA = [{"of": ["query", "key"], "rank": 3}, {"of": "value", "rank": 2}]
BLOCK: dict[str, Any] = {
    "sequential": {
        "shared": {
            "type": "sequential",
            "attention": {
                "heads": 2, "concat": "embeddings", "lora": LORA, "share": "stack", "pre": [NORM], "join": ALONE,
            },
            "mlp": {"width": 20, "lora": [{"rank": 4}], "share": "stack", "join": ALONE},
            "dense": {"activation": "identity", "join": ALONE},
        },
        "dense": {"activation": "gelu", "join": ALONE, "pre": [NORM]},
    }
}  # fmt: skip


def model(dtype: torch.dtype = torch.float64) -> LanguageModel:
    """Two layers with one shared block, all parameters drawn."""
    spec = load({"d_model": 16, "n_layers": 2, "vocab": VOCAB, "max_positions": LENGTH, "block": BLOCK})
    module = build(spec, spec.context(dtype=dtype, backend="reference")).to(dtype)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(0.4 * torch.randn(value.shape, generator=rng, dtype=torch.float64))
    return module


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight


def by_hand(given: dict[str, Tensor]) -> Tensor:
    """The logits: h + g(norm(h + shared(h))), with `shared` by the parameters of the first layer and each layer's own
    updates."""
    first = x = given["embedding"][TOKENS]
    attention, mlp = (f"block.0.sequential.members.shared.members.{name}." for name in ("attention", "mlp"))
    for layer in range(2):
        group = f"block.{layer}.sequential.members."

        def mapped(u: Tensor, name: str, of: str, key: str, owner: str, group: str = group) -> Tensor:
            own = f"{group}shared.members.{of}.lora.{key}."
            narrow = u @ given[f"{own}down.weight"].T
            return u @ given[f"{owner}{name}_projection.weight"].T + narrow @ given[f"{own}up.{name}.weight"].T

        u = rms(torch.cat([x, first], -1), given[f"{attention}pre.rmsnorm.weight"])
        q, k, v = (
            mapped(u, name, "attention", key, attention).unflatten(-1, (2, 8)).transpose(1, 2)
            for name, key in (("query", "query_key"), ("key", "query_key"), ("value", "value"))
        )
        logits = q @ k.mT / 8**0.5
        logits = logits.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), float("-inf"))
        mixed = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
        mixed = mixed @ given[f"{attention}output_projection.weight"].T
        hidden = gelu(mapped(mixed, "input", "mlp", "input", mlp)) @ given[f"{mlp}output_projection.weight"].T
        shared = hidden @ given[f"{group}shared.members.dense.projection.weight"].T
        read = rms(x + shared, given[f"{group}dense.pre.rmsnorm.weight"])
        x = x + gelu(read @ given[f"{group}dense.projection.weight"].T)
    return x @ given["embedding"].T


def test_a_shared_block_of_two_layers_is_what_was_written_out_by_hand():
    module = model()
    given = {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}
    wanted, found = by_hand(given), module(TOKENS)
    assert (found - wanted).abs().max() <= 1e-9 * wanted.abs().max()
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    for name, value in module.named_parameters():
        assert (value.grad - given[name].grad).abs().max() <= 1e-8 * given[name].grad.abs().max(), name


def test_what_it_decodes_is_what_it_reads_at_once():
    module, state = model(), State()
    with torch.no_grad():
        steps = [module(TOKENS[:, t : t + 1], Call(state=state)) for t in range(LENGTH)]
        assert (torch.cat(steps, 1) - module(TOKENS)).abs().max() <= 1e-9


def test_layers_share_maps_and_have_updates_of_their_own():
    module = model()
    names = [name for name, _ in module.named_parameters()]
    first, second = ([name for name in names if name.startswith(f"block.{layer}.")] for layer in range(2))
    assert "block.1.sequential.members.shared.members.attention.lora.query_key.down.weight" in second
    assert not [name for name in second if "attention" in name and "lora" not in name]
    assert len([name for name in first if "lora" in name]) == len([name for name in second if "lora" in name]) == 7
    assert cost(module.spec).parameters == sum(value.numel() for value in module.parameters())


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_updates_start_at_nothing(backend: str):
    """B is zero in a new model, so that one without updates gives the same."""
    plain = {"attention": {"heads": 4}, "glu": {"width": 24}}
    updated = {"attention": {"heads": 4, "lora": [{"rank": 3}]}, "glu": {"width": 24, "lora": [{"rank": 3}]}}
    found = []
    for block in (plain, updated):
        spec = load({"d_model": 16, "n_layers": 2, "vocab": VOCAB, "max_positions": LENGTH, "block": block})
        module = build(spec, spec.context(backend=backend))
        initialize(module, 0)
        found.append(module(TOKENS))
    assert torch.equal(*found)


@pytest.mark.parametrize("lora", [[{"of": ["query", "value"], "rank": 3}, {"of": ["key"], "rank": 2}], [{}]], ids=str)
def test_updates_are_written_as_plain_pytorch(lora: list[dict[str, Any]]):
    assert_plain_agrees(attention_case("updates", lora=lora, post=["gate"]).model)
