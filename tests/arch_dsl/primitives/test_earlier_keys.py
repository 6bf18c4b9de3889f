"""Keys and values of earlier layers: cross-layer attention by its formula, and Gemma 3n's shared layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import Call
from archlab.arch_dsl.conformance.properties import holds_what_its_cost_says, reads_in_pieces
from archlab.arch_dsl.tree.identity import diff, identity
from tests.arch_dsl import formulas
from tests.arch_dsl.compiler.test_costs import kept
from tests.arch_dsl.conformance import TOKENS, Case, build, load, randomize
from tests.arch_dsl.specs import assert_plain_agrees

D, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 4
EARLIER = {"block.attention.kv": "earlier"}


def model(n_layers: int, overrides: dict[str, Any], **fields: Any) -> arch_dsl.Model:
    attention = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, **fields}
    sizes = {"d_model": D, "n_layers": n_layers, "vocab": 19, "max_positions": 12}
    return load({**sizes, "block": {"attention": attention}, "overrides": overrides})


def by_hand(module: Any, owners: list[int], windows: list[int]) -> Tensor:
    """Layer i with queries of its own, and the keys and values that layer owners[i] has (arXiv:2405.12981, sec. 3)."""
    x = module.embedding[TOKENS]
    held: dict[int, tuple[Tensor, Tensor]] = {}
    for depth, (owner, window) in enumerate(zip(owners, windows, strict=True)):
        own = module.block[depth].attention
        if owner == depth:
            pair = (own.key_projection.weight, own.value_projection.weight)
            held[depth] = tuple((x @ weight.T).unflatten(-1, (KV_HEADS, HEAD_DIM)) for weight in pair)  # type: ignore[assignment]
        else:
            assert not hasattr(own, "key_projection") and not hasattr(own, "value_projection")
        q = (x @ own.query_projection.weight.T).unflatten(-1, (HEADS, HEAD_DIM))
        out = formulas.attend(q, *held[owner], visible=lambda i, j, window=window: i - window < j <= i)  # type: ignore[misc]
        x = x + out.flatten(2) @ own.output_projection.weight.T
    return x


WINDOW = {"block.attention.mask": {"type": "window", "size": 3}}
FORMS: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "CLA2": ({"1::2": EARLIER}, [0, 0, 2, 2, 4, 4], [99] * 6),
    "CLA3": ({"1::3": EARLIER, "2::3": EARLIER}, [0, 0, 0, 3, 3, 3], [99] * 6),
    "first_layers_keep_theirs": ({"3::2": EARLIER}, [0, 1, 2, 2, 4, 4], [99] * 6),
    "last_layers_by_mask": ({"::2": WINDOW, "3:": EARLIER}, [0, 1, 2, 1, 2, 1], [3, 99, 3, 99, 3, 99]),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_layer_reads_the_nearest_earlier_keys_of_its_mask(name: str):
    overrides, owners, windows = FORMS[name]
    own = model(6, overrides)
    module = build(own)
    randomize(module, 0.2)
    expected = by_hand(module, owners, windows)
    found = module.hidden(TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    pull = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(9))
    paths, values = zip(*module.named_parameters(), strict=True)
    gradients = (torch.autograd.grad((each * pull).sum(), values) for each in (found, expected))
    for path, mine, theirs in zip(paths, *gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11, msg=path)


def test_keys_are_held_once():
    """Two of six layers hold keys and values, and four have no maps of them."""
    overrides, *_ = FORMS["CLA3"]
    plain, shared = (arch_dsl.cost(model(6, each), 12) for each in ({}, overrides))
    a_layer = 2 * KV_HEADS * HEAD_DIM
    assert (plain.cache, shared.cache) == (6 * 12 * a_layer, 2 * 12 * a_layer)
    assert plain.parameters - shared.parameters == 4 * D * a_layer
    assert plain.flops_model - shared.flops_model == 4 * 12 * 2 * D * a_layer


CASES = {
    "sites": {"query": ["rmsnorm", "rope"], "key": ["shift", "rmsnorm", "rope"], "value": ["gate"], "sdpa": ["gate"],
              "scores": ["forget_gate"], "bias": True, "mask": {"type": "window", "size": 3}},
    "memory": {"memory": 2, "switch": [{"of": ["key", "value"], "experts": 2}, {"of": "output", "experts": 2}]},
    "differential": {"type": "differential_attention", "head_dim": 2, "bias": ["key"], "zero": ["value"]},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_decodes_and_is_written_beside_other_parts(name: str):
    own = model(4, {"1::2": EARLIER}, **CASES[name])
    case = Case(name, own, ("attention",), plain=False)
    assert [holds(case) for holds in (reads_in_pieces, holds_what_its_cost_says)] == ["", ""]
    assert_plain_agrees(own)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"scores": ["alibi"]}, {"scores": ["sinks"]}, {"scores": ["t5_buckets"]}, {"memory": 2},
        {"scores": [{"type": "softcap", "cap": 3.0}]}, {"mask": {"type": "window", "size": 3}},
        {"weights": "sigmoid"}, {"type": "differential_attention"},
    ],
    ids=str,
)  # fmt: skip
def test_counts_what_autograd_keeps_of_keys_that_two_layers_read(fields: dict[str, Any]):
    own = model(4, {"1::2": EARLIER}, **fields)
    assert arch_dsl.cost(own, 12).activations == pytest.approx(kept(own, 12), rel=0.005)


def test_what_all_layers_have_for_their_keys_counts_as_that_of_the_owner():
    """A patch of one field is a variant: the sites that `block` gives to all layers need not be taken out of some."""
    sites = {"positional": "rope", "qk_norm": "rmsnorm", "value": ["gate"], "bias": ["key", "value", "output"]}
    short = model(4, {"1::2": EARLIER}, **sites)
    long = model(4, {"1::2": {**EARLIER, **{f"block.attention.{name}": [] for name in ("key", "value")},
                              "block.attention.bias": ["output"]}}, **sites)  # fmt: skip
    assert identity(short) == identity(long)
    assert arch_dsl.resolve(short) == short
    changed = [change.path for change in diff(model(4, {}, **sites), short)]
    assert changed == [f"block[1,3].attention.{name}" for name in ("bias", "kv", "key", "value")]


def test_values_are_carried_by_the_layers_that_have_some():
    """The rules see of a layer what it is: value_residual needs a second layer with values of its own."""
    assert model(4, {"1::2": EARLIER}, value=["value_residual"])
    with pytest.raises(arch_dsl.SpecError, match="needs a second layer that has it"):
        model(2, {"1": EARLIER}, value=["value_residual"])


def test_recomputed_layers_give_the_same_gradients():
    own = model(4, {"1::2": EARLIER})
    found = []
    for recompute in (False, True):
        module = build(own).train()
        module.recompute = recompute
        module.loss(TOKENS, TOKENS.roll(-1, 1)).backward()
        found.append({name: value.grad for name, value in module.named_parameters()})
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-12)


def test_agrees_with_the_shared_layers_of_gemma3n():
    """Its attention alone, layer on layer: the last layers read the last keys of their kind, whose rotations differ."""
    from transformers import Gemma3nTextConfig
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRotaryEmbedding, Gemma3nTextAttention

    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3nTextConfig(
        hidden_size=D, num_hidden_layers=5, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        layer_types=kinds, num_kv_shared_layers=2, sliding_window=3, attn_implementation="eager", vocab_size=19,
    )  # fmt: skip
    theirs = [Gemma3nTextAttention(config, depth).double().eval() for depth in range(5)]
    for layer in theirs:
        randomize(layer)
    full = {f"block.attention.{site}.rope.theta": 1e6 for site in ("query", "key")}
    overrides = {"0,2,3": WINDOW, "1,4": full, "3:": EARLIER}
    norms = {"query": ["rmsnorm", "rope"], "key": ["rmsnorm", "rope"], "value": [{"type": "rmsnorm", "weight": False}]}
    ours = build(model(5, overrides, scale=1.0, **norms))
    names = {"q_proj": "query_projection", "k_proj": "key_projection", "v_proj": "value_projection",
             "o_proj": "output_projection", "q_norm": "query.rmsnorm", "k_norm": "key.rmsnorm"}  # fmt: skip
    for layer, block in zip(theirs, ours.block, strict=True):
        weights = {f"{names[path.split('.')[0]]}.weight": value for path, value in layer.named_parameters()}
        block.attention.load_state_dict(weights, strict=False)
        assert weights.keys() == dict(block.attention.named_parameters()).keys()
    stream = ours.embedding[TOKENS]
    time = torch.arange(TOKENS.shape[1])
    rotary, shared = Gemma3nRotaryEmbedding(config), {}
    with torch.no_grad():
        for layer, kind in zip(theirs, kinds, strict=True):
            back = time[:, None] - time
            seen = (back >= 0) & ((back < 3) | (kind == "full_attention"))
            mask = torch.where(seen, 0.0, float("-inf")).double()[None, None]
            positions = rotary(stream, time[None], kind)
            stream = stream + layer(stream, positions, mask, shared_kv_states=shared)[0]
        torch.testing.assert_close(ours.hidden(TOKENS, Call()), stream, atol=2e-6, rtol=2e-6)
