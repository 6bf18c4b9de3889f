"""Per-layer embeddings against transformers' Gemma 3n and Gemma 4, and what they read of the stream's beginning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl import Call, SpecError
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.context import State

D, WIDTH, LAYERS, VOCAB = 16, 4, 3, 31  # of which float32 holds the roots
TOKENS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
NORM = {"type": "rmsnorm", "share": "stack"}
OURS = {"type": "per_layer_embedding", "width": WIDTH, "norm": NORM, "post": ["rmsnorm"]}


def model(branch: dict[str, Any] = OURS, more: dict[str, Any] | None = None, **fields: Any) -> arch_dsl.Model:
    sizes = {"d_model": D, "n_layers": LAYERS, "vocab": VOCAB, "max_positions": 12}
    scaled = {"embed": [{"type": "scale", "width_power": 0.5}], "final": ["rmsnorm"]}
    return arch_dsl.resolve(arch_dsl.load({**sizes, **scaled, "block": {**(more or {}), "tokens": branch}, **fields}))


def theirs(version: str) -> nn.Module:
    """Their model, with random weights, whose attention and feed-forward add nothing."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": D, "num_hidden_layers": LAYERS, "intermediate_size": 8, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 8, "layer_types": ["full_attention"] * LAYERS, "pad_token_id": None}
    words = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": WIDTH}
    more: dict[str, Any] = {"num_kv_shared_layers": 0, "use_cache": False}
    if version == "3n":
        more |= {"activation_sparsity_pattern": [0.0] * LAYERS, "laurel_rank": 2}
        config = transformers.Gemma3nTextConfig(**sizes, **heads, **words, **more)
        built = transformers.Gemma3nForCausalLM(config).double()
        built.model.per_layer_input_scale = torch.tensor(2.0, dtype=torch.float64).rsqrt()
    else:
        built = transformers.Gemma4ForCausalLM(
            transformers.Gemma4TextConfig(**sizes, **heads, **words, **more)
        ).double()
    randomize(built)
    for name, value in built.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.data.zero_()
    return built


def as_theirs(built: nn.Module) -> arch_dsl.Decoder:
    """Ours with their weights."""
    ours, inner = arch_dsl.compile(model()).double(), built.model
    tables = inner.embed_tokens_per_layer.weight.view(VOCAB, LAYERS, WIDTH)
    maps = inner.per_layer_model_projection.weight.view(LAYERS, WIDTH, D)
    given = {"embedding": inner.embed_tokens.weight, "final.rmsnorm.weight": inner.norm.weight}
    given["block.0.tokens.norm.weight"] = inner.per_layer_projection_norm.weight
    for depth, layer in enumerate(inner.layers):
        at = f"block.{depth}.tokens."
        given[f"{at}table"], given[f"{at}embedding_projection.weight"] = tables[:, depth], maps[depth]
        given[f"{at}gate_projection.weight"] = layer.per_layer_input_gate.weight
        given[f"{at}output_projection.weight"] = layer.per_layer_projection.weight
        given[f"{at}post.rmsnorm.weight"] = layer.post_per_layer_input_norm.weight
    with torch.no_grad():
        for name, value in ours.named_parameters():
            value.copy_(given.pop(name))
    assert not given
    return ours


def logits_of(built: nn.Module, version: str) -> Tensor:
    """Those of Gemma 4; of Gemma 3n by the lines of its layer, which adds the update to other streams than it reads."""
    if version == "4":
        return built(TOKENS).logits
    inner = built.model
    x = inner.embed_tokens(TOKENS)
    given = inner.project_per_layer_inputs(x, inner.get_per_layer_inputs(TOKENS))
    for depth, layer in enumerate(inner.layers):
        gated = layer.act_fn(layer.per_layer_input_gate(x)) * given[:, :, depth]
        x = x + layer.post_per_layer_input_norm(layer.per_layer_projection(gated))
    return built.lm_head(inner.norm(x))


@pytest.mark.parametrize("version", ["3n", "4"])
def test_logits_and_gradients_are_those_of_gemma(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # in which their norms compute
    built = theirs(version)
    ours = as_theirs(built)
    wanted, found = logits_of(built, version), ours(TOKENS)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    weights = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    inner, ple = built.model, [layer.tokens for layer in ours.block]
    pairs = {
        "tables": (torch.stack([each.table.grad for each in ple], 1).flatten(1), inner.embed_tokens_per_layer.weight),
        "maps": (
            torch.cat([each.embedding_projection.weight.grad for each in ple]),
            inner.per_layer_model_projection.weight,
        ),
        "norm": (ple[0].norm.weight.grad, inner.per_layer_projection_norm.weight),
        "gate": (ple[1].gate_projection.weight.grad, inner.layers[1].per_layer_input_gate.weight),
        "output": (ple[1].output_projection.weight.grad, inner.layers[1].per_layer_projection.weight),
        "embedding": (ours.embedding.grad, inner.embed_tokens.weight),
    }
    for name, (mine, value) in pairs.items():
        torch.testing.assert_close(mine, value.grad, rtol=1e-8, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")


def test_tokens_beyond_the_rows_of_a_table_read_row_0():
    few, all_ = (arch_dsl.compile(model({**OURS, **rows})).double() for rows in ({"rows": 7}, {}))
    randomize(all_)
    given = dict(all_.named_parameters())
    with torch.no_grad():
        for name, value in few.named_parameters():
            value.copy_(given[name][: len(value)])
            if name.endswith("table"):
                given[name][7:] = given[name][0]
    torch.testing.assert_close(few(TOKENS), all_(TOKENS), rtol=1e-12, atol=1e-12)
    assert few.block[0].tokens.table.shape == (7, WIDTH)


ATTENTION = {"attention": {"heads": 2, "pre": ["rmsnorm"]}}


@pytest.mark.parametrize(
    "fields", [{}, {"streams": {"type": "hyper", "n": 2}}, {"skips": ["x0_mix"]}], ids=["plain", "streams", "skips"]
)
def test_decoding_gives_the_same_logits(fields: dict[str, Any]):
    module, state = arch_dsl.compile(model(more=ATTENTION, **fields)).double(), State()
    randomize(module)
    with torch.no_grad():
        steps = [module(TOKENS[:, t : t + 1], Call(state=state)) for t in range(TOKENS.shape[1])]
        torch.testing.assert_close(torch.cat(steps, 1), module(TOKENS), rtol=1e-9, atol=1e-9)


def test_tables_are_parameters_without_flops():
    with_, without = (arch_dsl.cost(model(branch), 8) for branch in (OURS, {"type": "mlp", "width": WIDTH}))
    own = LAYERS * (VOCAB * WIDTH + D * WIDTH + D) + WIDTH  # beside the two maps of an mlp
    assert with_.parameters - without.parameters == own
    assert with_.embeddings - without.embeddings == LAYERS * VOCAB * WIDTH
    assert with_.flops_model - without.flops_model == LAYERS * 2 * 8 * D * WIDTH


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": 2}, "prompt: is no token, and a per_layer_embedding looks tokens up"),
        (
            {"predict": "parallel"},
            "predict: has heads that read the stream alone, and per_layer_embedding carries more",
        ),
        ({"branch": {**OURS, "rows": VOCAB}}, "block.tokens.rows: must be less than the 31 tokens, found 31"),
        ({"n_layers": 1}, "block.tokens.norm.rmsnorm.share: needs a second layer to share it with"),
    ],
)
def test_what_makes_no_sense_beside_it_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        model(**fields)
