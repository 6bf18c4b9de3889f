"""Whole models against transformers' own: the same weights give the same logits and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import arch_dsl
from tests.arch_dsl.conformance import randomize

TOKENS = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(6))

Ours = Callable[[str], Tensor]  # the value of one of our parameters, or its gradient


def llama(tied: bool) -> tuple[dict, nn.Module]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    spec = {
        "d_model": 32,
        "n_layers": 2,
        "block": {
            "norm": "rmsnorm",
            "attention": {"heads": 4, "kv_heads": 2, "positional": "rope"},
            "ffn": {"type": "glu", "width": 40},
        },
        "unembedding": {"tied": tied},
    }
    return spec, LlamaForCausalLM(config)


def llama_weights(ours: Ours, tied: bool) -> dict[str, Tensor]:
    """Llama's parameters from ours."""
    found = {"model.embed_tokens.weight": ours("embedding"), "model.norm.weight": ours("final.rmsnorm.weight")}
    if not tied:
        found["lm_head.weight"] = ours("unembedding.weight")
    names = {
        "input_layernorm": "attention.pre.rmsnorm",
        "self_attn.q_proj": "attention.query_projection",
        "self_attn.k_proj": "attention.key_projection",
        "self_attn.v_proj": "attention.value_projection",
        "self_attn.o_proj": "attention.output_projection",
        "post_attention_layernorm": "ffn.pre.rmsnorm",
        "mlp.gate_proj": "ffn.gate_projection",
        "mlp.up_proj": "ffn.input_projection",
        "mlp.down_proj": "ffn.output_projection",
    }
    for layer in range(2):
        for theirs, own in names.items():
            found[f"model.layers.{layer}.{theirs}.weight"] = ours(f"block.{layer}.{own}.weight")
    return found


def gpt2() -> tuple[dict, nn.Module]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=61, n_positions=20, n_embd=32, n_layer=2, n_head=4, attn_implementation="eager")
    spec = {
        "d_model": 32,
        "n_layers": 2,
        "max_positions": 20,
        "block": {
            "norm": "layernorm",
            "attention": {"heads": 4, "bias": True, "positional": "learned"},
            "mlp": {"activation": "gelu_tanh", "bias": True},
        },
    }
    return spec, GPT2LMHeadModel(config).eval()


def gpt2_weights(ours: Ours) -> dict[str, Tensor]:
    """GPT-2's parameters from ours: its linear maps are stored transposed, query, key and value in one."""
    found = {"transformer.wte.weight": ours("embedding"), "transformer.wpe.weight": ours("embed.learned.table")}
    for kind in ("weight", "bias"):
        found[f"transformer.ln_f.{kind}"] = ours(f"final.layernorm.{kind}")
        for layer in range(2):
            theirs, own = f"transformer.h.{layer}", f"block.{layer}"
            merged = [ours(f"{own}.attention.{name}_projection.{kind}") for name in ("query", "key", "value")]
            found[f"{theirs}.attn.c_attn.{kind}"] = torch.cat(merged).T if kind == "weight" else torch.cat(merged)
            found[f"{theirs}.ln_1.{kind}"] = ours(f"{own}.attention.pre.layernorm.{kind}")
            found[f"{theirs}.ln_2.{kind}"] = ours(f"{own}.mlp.pre.layernorm.{kind}")
            for name, other in (
                ("attn.c_proj", "attention.output_projection"),
                ("mlp.c_fc", "mlp.input_projection"),
                ("mlp.c_proj", "mlp.output_projection"),
            ):
                value = ours(f"{own}.{other}.{kind}")
                found[f"{theirs}.{name}.{kind}"] = value.T if kind == "weight" else value
    return found


def neox() -> tuple[dict, nn.Module]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_act="gelu",
        use_parallel_residual=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    rope = {"type": "rope", "fraction": 0.5}
    spec = {
        "d_model": 32,
        "n_layers": 2,
        "block": {
            "parallel": {
                "attention": {"heads": 4, "bias": True, "pre": ["layernorm"], "positional": rope},
                "mlp": {"width": 48, "bias": True, "pre": ["layernorm"]},
            }
        },
        "final": ["layernorm"],
        "unembedding": {"tied": False},
    }
    return spec, GPTNeoXForCausalLM(config).eval()


def neox_weights(ours: Ours) -> dict[str, Tensor]:
    """GPT-NeoX's parameters from ours: query, key and value alternate by head."""
    found = {"gpt_neox.embed_in.weight": ours("embedding"), "lm_head.weight": ours("unembedding.weight")}
    for kind in ("weight", "bias"):
        found[f"gpt_neox.final_layer_norm.{kind}"] = ours(f"final.layernorm.{kind}")
        for layer in range(2):
            theirs, own = f"gpt_neox.layers.{layer}", f"block.{layer}.parallel.members"
            parts = [ours(f"{own}.attention.{name}_projection.{kind}") for name in ("query", "key", "value")]
            by_head = torch.stack([part.unflatten(0, (4, 8)) for part in parts], dim=1)
            found[f"{theirs}.attention.query_key_value.{kind}"] = by_head.flatten(0, 2)
            found[f"{theirs}.attention.dense.{kind}"] = ours(f"{own}.attention.output_projection.{kind}")
            found[f"{theirs}.input_layernorm.{kind}"] = ours(f"{own}.attention.pre.layernorm.{kind}")
            found[f"{theirs}.post_attention_layernorm.{kind}"] = ours(f"{own}.mlp.pre.layernorm.{kind}")
            found[f"{theirs}.mlp.dense_h_to_4h.{kind}"] = ours(f"{own}.mlp.input_projection.{kind}")
            found[f"{theirs}.mlp.dense_4h_to_h.{kind}"] = ours(f"{own}.mlp.output_projection.{kind}")
    return found


@pytest.mark.parametrize(
    ("published", "weights"),
    [
        pytest.param(lambda: llama(False), lambda ours: llama_weights(ours, False), id="llama"),
        pytest.param(lambda: llama(True), lambda ours: llama_weights(ours, True), id="llama-tied"),
        pytest.param(gpt2, gpt2_weights, id="gpt2"),
        pytest.param(neox, neox_weights, id="gpt-neox"),
    ],
)
def test_logits_and_gradients_are_those_of_transformers(published, weights):
    data, theirs = published()
    ours = arch_dsl.compile(arch_dsl.resolve(arch_dsl.load(data), vocab=61))
    randomize(ours, std=0.15)
    parameters = dict(ours.named_parameters())
    given = weights(lambda name: parameters[name].detach())
    missing, unexpected = theirs.load_state_dict(given, strict=False)
    assert unexpected == [] and set(missing) <= {"lm_head.weight"} and ("lm_head.weight" in given) == (missing == [])
    expected = theirs(TOKENS).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(TOKENS), expected, atol=1e-5, rtol=1e-5)

    targets = TOKENS.roll(-1, 1)
    ours.loss(TOKENS, targets).backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    gradients = weights(lambda name: parameters[name].grad)
    for name, value in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert sum(value.numel() for value in theirs.parameters()) == arch_dsl.cost(ours.spec, 17).parameters
