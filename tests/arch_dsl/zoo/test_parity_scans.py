"""Mamba and RWKV-4 against transformers, and Samba against a plain reading of its code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from tests.arch_dsl.conformance import randomize
from tests.arch_dsl.parity import (
    GRADIENTS,
    LOGITS,
    VOCAB,
    Published,
    decoded,
    errors,
    expected,
    model_of,
    outline,
    relative,
    theirs_of,
    trials_of,
    unexplained,
)


def mamba(**more: Any) -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 5,
        "layer_norm_epsilon": 10.0,
        "use_mambapy": False,
    }
    return MambaForCausalLM(MambaConfig(**{**fields, **more}))


def rwkv(**more: Any) -> nn.Module:
    """Without the halving of the stream every few layers, which keeps float16 from overflowing and changes nothing."""
    from transformers import RwkvConfig, RwkvForCausalLM

    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 0.03,
        "rescale_every": 0,
        "use_cache": False,  # whose states would be changed in place
    }
    model = RwkvForCausalLM(RwkvConfig(**{**fields, **more}))
    model.rwkv.ln_out.eps = 0.03  # which it does not take from its configuration, and too small to be seen
    return model


NORM = {"type": "rmsnorm", "eps": 10.0}  # large enough to be seen, as what a scan gives is the product of three
LAYER_NORM = {"type": "layernorm", "eps": 0.03}
MAMBA: dict[str, Any] = {"d_model": 32, "n_layers": 2, "block": {"norm": NORM, "mamba": {"state": 5}}}
GATE = {"type": "gate", "activation": "silu"}
MAMBA_WITH_BIASES = {
    **MAMBA,
    "block": {
        "norm": NORM,
        "mamba": {
            "state": 5,
            "bias": True,
            "dt_rank": 3,
            "expand": 3,
            "value": [{"type": "short_conv", "width": 3, "activation": "silu"}],
            "sdpa": [{**GATE, "bias": True}],
        },
    },
    "unembedding": {"tied": False},
}
ZERO = {"rwkv4": {"zero": ["receptance", "key", "output"]}, "channel_mix": {"zero": ["receptance", "value"]}}
RWKV: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 2,
    "embedding": {"std": 1e-4},
    "embed": [LAYER_NORM],
    "block": {"norm": LAYER_NORM, **ZERO},
    "unembedding": {"tied": False},
}
ALL = [
    Published("mamba", mamba, MAMBA, "mamba", "mamba"),
    Published(
        "mamba-biases",
        lambda: mamba(
            use_bias=True, use_conv_bias=False, time_step_rank=3, expand=3, conv_kernel=3, tie_word_embeddings=False
        ),
        MAMBA_WITH_BIASES,
        "mamba",
    ),
    Published("rwkv4", rwkv, RWKV, "rwkv", "rwkv4"),
    Published(
        "rwkv4-wide",
        lambda: rwkv(attention_hidden_size=40, intermediate_size=50, num_hidden_layers=3, tie_word_embeddings=True),
        {
            **RWKV,
            "n_layers": 3,
            "block": {"norm": LAYER_NORM, "rwkv4": {"width": 40}, "channel_mix": {"width": 50}},
            "unembedding": {"tied": True},
        },
        "rwkv",
    ),
]


@pytest.mark.parametrize("published", ALL, ids=str)
def test_logits_and_gradients_are_those_of_transformers(published):
    logits, gradients = errors(published)
    assert logits <= LOGITS and gradients <= GRADIENTS


@pytest.mark.parametrize("published", ALL, ids=str)
def test_logits_of_reading_token_by_token_are_those_of_transformers(published):
    assert relative(decoded(published), expected(published)) <= LOGITS


@pytest.mark.parametrize("published", ALL, ids=str)
def test_parameters_are_counted_as_theirs(published):
    theirs = sum(value.numel() for value in theirs_of(published).parameters())
    assert arch_dsl.cost(model_of(published)).parameters == theirs


@pytest.mark.parametrize("published", [each for each in ALL if each.zoo], ids=str)
def test_architecture_is_that_of_the_zoo(published):
    assert outline(model_of(published)) == outline(arch_dsl.resolve(zoo.load(published.zoo)))


@pytest.mark.parametrize("published", trials_of(ALL))
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []


# Initial values


def test_decays_bonuses_and_shares_start_as_in_transformers():
    """But for the bonus: transformers starts it at 1, and the models that were published at log 0.3 and a zigzag."""
    from transformers import RwkvConfig, RwkvForCausalLM

    theirs = RwkvForCausalLM(RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3)).rwkv.blocks
    ours = arch_dsl.compile(arch_dsl.resolve(arch_dsl.load({**RWKV, "n_layers": 3}), vocab=VOCAB)).block
    for mine, his in zip(ours, theirs, strict=True):
        pairs = {
            mine.rwkv4.decay: his.attention.time_decay,
            mine.rwkv4.time_mix_receptance: his.attention.time_mix_receptance,
            mine.rwkv4.time_mix_key: his.attention.time_mix_key,
            mine.rwkv4.time_mix_value: his.attention.time_mix_value,
            mine.channel_mix.mix_key: his.feed_forward.time_mix_key,
            mine.channel_mix.mix_receptance: his.feed_forward.time_mix_receptance,
        }
        for found, wanted in pairs.items():
            torch.testing.assert_close(found, wanted.flatten(), rtol=1e-5, atol=1e-5)
        zigzag = torch.tensor([0.0, 0.5, -0.5]).repeat(11)[:32]
        torch.testing.assert_close(mine.rwkv4.bonus.detach(), torch.tensor(0.3).log() + zigzag)


def test_rates_and_steps_start_as_published():
    module = arch_dsl.compile(arch_dsl.resolve(arch_dsl.load({**MAMBA, "d_model": 512}), vocab=VOCAB)).block[0].mamba
    rates = module.log_a.detach().exp()
    torch.testing.assert_close(rates, torch.arange(1.0, 6.0).expand(1024, 5))
    steps = torch.nn.functional.softplus(module.step_bias.detach()).log10()
    assert -3 <= steps.min() < -2.95 and -1.05 < steps.max() <= -1
    assert abs(float(steps.mean()) + 2) < 0.1 and abs(float(steps.std()) - 2 / 12**0.5) < 0.05
    weights = module.step_weight.detach()
    assert weights.shape == (1024, 32) and 0.99 * 32**-0.5 < weights.abs().max() <= 32**-0.5


# Samba


def reading(model: arch_dsl.Model, parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits by the code of Samba, one token after another: layers of Mamba and of attention over a window by turns."""
    p = parameters
    stream = p["embedding"][tokens]  # batch, time, channels
    for layer in range(model.n_layers):
        mixer = "mamba" if layer % 2 == 0 else "attention"
        at = lambda name, layer=layer, mixer=mixer: p[f"block.{layer}.{mixer}.{name}"]  # noqa: E731
        mix = _mamba if mixer == "mamba" else _window
        stream = stream + mix(model, at, _normed(stream, at("pre.rmsnorm.weight")))
        ffn = lambda name, layer=layer: p[f"block.{layer}.ffn.{name}.weight"]  # noqa: E731
        hidden = _normed(stream, ffn("pre.rmsnorm"))
        opened = torch.nn.functional.silu(hidden @ ffn("gate_projection").T) * (hidden @ ffn("input_projection").T)
        stream = stream + opened @ ffn("output_projection").T
    return _normed(stream, p["final.rmsnorm.weight"]) @ p["embedding"].T


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _mamba(model: arch_dsl.Model, at: Any, x: Tensor) -> Tensor:
    inner, gate = x @ at("value_projection.weight").T, x @ at("sdpa.gate.projection.weight").T
    kernel, bias = at("value.short_conv.weight")[:, 0], at("value.short_conv.bias")
    state = torch.zeros(len(x), inner.shape[-1], at("log_a").shape[1], dtype=x.dtype)
    found = []
    for t in range(x.shape[1]):
        seen = [inner[:, t - back] * kernel[:, 3 - back] for back in range(min(t, 3) + 1)]
        u = torch.nn.functional.silu(sum(seen) + bias)
        step = u @ at("rank_projection.weight").T @ at("step_weight").T + at("step_bias")
        step = torch.log1p(step.exp())
        writes, reads = u @ at("key_projection.weight").T, u @ at("query_projection.weight").T
        decay = torch.exp(step[..., None] * -at("log_a").exp())
        state = decay * state + (step * u)[..., None] * writes[:, None]
        y = (state * reads[:, None]).sum(-1) + at("skip") * u
        found.append(y * torch.nn.functional.silu(gate[:, t]))
    return torch.stack(found, 1) @ at("output_projection.weight").T


def _window(model: arch_dsl.Model, at: Any, x: Tensor) -> Tensor:
    heads, window, width = 2, 16, 16
    q, k, v = (
        (x @ at(f"{name}_projection.weight").T).unflatten(-1, (heads, width)) for name in ("query", "key", "value")
    )
    turns = torch.arange(x.shape[1])[:, None] * 10000 ** (-torch.arange(0, width, 2) / width)  # float32, as in ours
    cos, sin = (f(turns).repeat(1, 2)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    q, k = (z * cos + torch.cat([-z[..., width // 2 :], z[..., : width // 2]], -1) * sin for z in (q, k))
    i = torch.arange(x.shape[1])
    far = (i[:, None] < i) | (i[:, None] - i >= window)
    logits = torch.einsum("bthd,bshd->bhts", q, k) / width**0.5
    weights = logits.masked_fill(far, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v).flatten(2) @ at("output_projection.weight").T


def test_samba_is_what_its_code_says():
    model = arch_dsl.resolve(arch_dsl.patch(zoo.load("samba", "tiny"), {"n_layers": 4}))
    module = arch_dsl.compile(model).double()
    randomize(module, 0.15)
    tokens = torch.randint(257, (2, 40), generator=torch.Generator().manual_seed(1))
    wanted = reading(model, dict(module.named_parameters()), tokens)
    torch.testing.assert_close(module(tokens), wanted, rtol=1e-9, atol=1e-9)
