"""What linear attention costs, which layers it may stand beside, how its sizes are written, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import SpecError, zoo
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.inspection.slots import slots
from archlab.arch_dsl.parts.context import Call, State
from archlab.arch_dsl.tree.identity import canonical, identity
from tests.arch_dsl.compiler.test_costs import kept
from tests.arch_dsl.primitives.test_linear_attention import LAYERS, LENGTH, MIXERS, TOKENS, VOCAB, D, model

# Costs

# arXiv:2503.02130, table 6: millions of parameters without the input table, FLOPs per token, and their formula beyond
# two for each parameter: a number times n_layer d_model d, with d = 128 the size of a head or of Mamba-2's state.
FOX = {"hgrn2": (756, 1.54e9, 5), "delta_net": (757, 1.54e9, 6), "mamba2_fox": (780, 1.65e9, 20)}


@pytest.mark.parametrize("name", FOX)
def test_sizes_and_flops_are_those_of_the_forgetting_transformer(name: str):
    model = arch_dsl.resolve(zoo.load(name, "760m"))
    cost = arch_dsl.cost(model, 16384)
    printed, flops, factor = FOX[name]
    assert cost.non_embedding // 10**6 == printed
    found = cost.figures(16384)["flops_per_token"]
    assert round(found / 1e7) == round(flops / 1e7)
    # The table counts 24 layers of all models. Mamba-2 has 48, and its formula with 48 would give 1.75e9: 20 is what
    # two of its layers need, 5 for each element of a state of 2 d_model x 128, as HGRN2's.
    assert found == pytest.approx(2 * cost.non_embedding + factor * 24 * 1536 * 128, rel=2e-3)
    assert model.n_layers == (48 if name == "mamba2_fox" else 24)


@pytest.mark.parametrize("name", MIXERS)
def test_activations_are_what_autograd_keeps(name: str):
    found = model({"type": name, **MIXERS[name]}, max_positions=300)
    for tokens in (20, 250):  # a part of a chunk, and as many as are counted in proportion
        assert arch_dsl.cost(found, tokens).activations == pytest.approx(kept(found, tokens), rel=0.002)


def test_decoding_holds_states_and_the_last_inputs_of_convolutions_whatever_the_length():
    mamba = model({"type": "mamba2", "value_dim": 6, "head_dim": 5})
    held = LAYERS * (8 * 5 * 6 + 3 * (8 * 6 + 5 + 5))
    assert [arch_dsl.cost(mamba, tokens).cache for tokens in (3, 100, 1000)] == [held] * 3


def part(cost: arch_dsl.Cost, name: str) -> Any:
    """The first node of that name."""
    found = (part(child, name) for child in cost.children.values())
    return cost.children.get(name) or next((each for each in found if each), None)


@pytest.mark.parametrize(
    ("mixer", "each"),
    [
        ({"heads": 2}, (4, 4)),
        ({"heads": 2, "decay": "mamba2"}, (4, 5)),
        ({"heads": 2, "rule": "delta"}, (6, 6)),
        ({"heads": 2, "rule": "delta", "decay": "low_rank"}, (6, 7)),
    ],
)
def test_flops_are_those_of_each_element_of_the_state(mixer: dict[str, Any], each: tuple[int, int]):
    recur = part(arch_dsl.cost(model({"type": "linear_attention", **mixer}), 10), "recur")
    elements = 10 * 2 * 12 * 12
    assert (recur.flops_matmul, recur.flops_model) == (each[0] * elements, each[1] * elements)


# Layers of several kinds


def test_every_fourth_layer_may_be_attention():
    data = {"d_model": D, "n_layers": 8, "vocab": VOCAB, "max_positions": 2 * LENGTH}
    block = {"norm": "rmsnorm", "mixer": {"type": "gla", "heads": 2}, "ffn": "swiglu"}
    attention = {"type": "attention", "heads": 4, "positional": "rope"}
    found = arch_dsl.resolve(arch_dsl.load({**data, "block": block, "overrides": {"3::4": {"block.mixer": attention}}}))
    kinds = [layer["mixer"].type for layer in found.layers()]
    assert kinds == ["linear_attention"] * 3 + ["attention"] + ["linear_attention"] * 3 + ["attention"]
    assert [item.type for item in found.layers()[3]["mixer"].pre] == ["rmsnorm"]  # normed as all are
    assert [item.type for item in found.layers()[3]["mixer"].query] == ["rope"]
    module = arch_dsl.compile(found, backend="reference").double()
    randomize(module)
    assert arch_dsl.cost(found).parameters == sum(value.numel() for value in module.parameters())
    state = State()
    pieces = [module(TOKENS[:, start:end], Call(state=state)) for start, end in ((0, 5), (5, 6), (6, LENGTH))]
    torch.testing.assert_close(torch.cat(pieces, 1), module(TOKENS), rtol=1e-9, atol=1e-9)


def test_bounds_are_shared_by_the_layers_that_have_them_and_grow_with_depth():
    data = {"d_model": D, "n_layers": 4, "vocab": VOCAB, "max_positions": 2 * LENGTH}
    block = {"mixer": {"type": "hgrn2", "heads": 2}}
    changed = {"::2": {"block.mixer": {"type": "attention", "heads": 2}}}
    found = arch_dsl.resolve(arch_dsl.load({**data, "block": block, "overrides": changed}))
    module = arch_dsl.compile(found)
    tables = [name for name, _ in module.named_parameters() if "table" in name]
    assert tables == ["block.1.mixer.decay.table.weight"]
    assert arch_dsl.cost(found).parameters == sum(value.numel() for value in module.parameters())
    assert module.block[3].mixer.decay.table is module.block[1].mixer.decay.table
    for depth in (1, 3):
        decay = module.block[depth].mixer.decay
        log_f, _ = decay(iter([torch.full((1, 1, D), -100.0)]), Call())  # sigmoid is 0
        torch.testing.assert_close(log_f.exp(), torch.full((1, 1, 2, D // 2), depth / 4))


# Sizes, names and mistakes


def test_sizes_may_be_multiples_of_the_stream():
    mamba = model({"type": "mamba2", "value_dim": 6}).block["mixer"]
    assert (mamba.heads, mamba.key_heads, mamba.head_dim, mamba.value_dim) == (8, 1, 128, 6)
    gla = model({"type": "gla", "heads": 2}).block["mixer"]
    assert (gla.heads, gla.key_heads, gla.head_dim, gla.value_dim) == (2, 2, 6, 12)
    assert model({"type": "retnet", "heads": 2}).block["mixer"].value_dim == 24
    written = {**canonical(gla), "type": "linear_attention"}
    assert identity(model(written)) == identity(model({"type": "gla", "heads": 2}))


def test_attention_becomes_linear_with_what_both_have():
    data = {
        "d_model": D,
        "n_layers": 2,
        "vocab": VOCAB,
        "block": {"attention": {"heads": 4, "head_dim": 5, "gate": "sdpa"}},
    }
    changed = arch_dsl.patch(arch_dsl.load(data), {"block.attention.type": "linear_attention"}).block["attention"]
    assert (changed.type, changed.heads, changed.head_dim) == ("linear_attention", 4, 5)
    assert [item.type for item in changed.sdpa] == ["gate"]


def test_knobs_of_gates_and_norms_turn_it_too():
    found = model({"type": "linear_attention", "heads": 4, "gate": "sdpa", "qk_norm": "l2norm"}).block["mixer"]
    assert [item.type for item in found.sdpa] == ["gate"]
    assert [item.type for item in (*found.query, *found.key)] == ["l2", "l2"]
    gated = arch_dsl.patch(model({"type": "hgrn2", "heads": 4}), {"block.mixer.gate": "sdpa"}).block["mixer"]
    assert [item.type for item in (*gated.query, *gated.sdpa)] == ["feature_map", "rmsnorm", "gate"]


def test_what_lies_between_two_mixers_comes_apart():
    def whole(mixer: dict[str, Any]) -> arch_dsl.Model:
        block = {"norm": "rmsnorm", "mixer": {"heads": 4, **mixer}, "ffn": "swiglu"}
        return arch_dsl.load({"d_model": D, "n_layers": LAYERS, "block": block})

    found = {slot.name: dict(slot.changes) for slot in slots(whole({"type": "gla"}), whole({"type": "delta_net"}))}
    conv = [{"type": "short_conv", "activation": "silu"}]
    assert found == {
        "gate": {"block.mixer.gate": "none"},
        "qk_norm": {"block.mixer.qk_norm": "l2"},
        "head_dim_and_value_dim": {"block.mixer.head_dim": None, "block.mixer.value_dim": None},
        "decay": {"block.mixer.decay": None},
        "rule": {"block.mixer.rule": "delta"},
        "query_short_conv": {"block.mixer.query": {"prepend": conv}},
        "key_short_conv": {"block.mixer.key": {"prepend": conv}},
        "value_short_conv": {"block.mixer.value": {"append": conv}},
    }
    names = [slot.name for slot in slots(whole({"type": "delta_net"}), whole({"type": "gated_delta_net"}))]
    assert names == ["gate", "decay"]
    names = [slot.name for slot in slots(whole({"type": "gated_delta_net"}), whole({"type": "kda"}))]
    assert names == ["gate", "decay"]


def test_a_decay_may_be_taken_out():
    plain = arch_dsl.patch(model({"type": "gla", "heads": 2}), {"block.mixer.decay": "none"})
    assert plain.block["mixer"].decay is None


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ({"heads": 5}, r"block.mixer.heads: 5 heads do not divide 24 channels, 1x d_model 24"),
        (
            {"heads": 4, "value_dim": "0.3x"},
            r"block.mixer.value_dim: 4 heads do not divide 7.2 channels, 0.3x d_model 24",
        ),
        ({"heads": "2x"}, r"block.mixer.heads: 2x needs a value_dim or head_dim in channels, which says how many"),
        ({"heads": "2x", "value_dim": 7}, r"heads: heads of 7 channels do not make up 2x d_model, 48 channels"),
        ({"heads": "wide"}, r"must be an integer or a multiple of d_model such as 2x, found 'wide'"),
        ({"heads": 4, "key_heads": 3}, r"key_heads: 3 heads of queries and keys do not divide 4 heads"),
        ({"heads": 4, "beta": "2 * sigmoid(x)"}, r"beta: says how much the delta rule writes; it needs rule: delta"),
        (
            {"heads": 4, "keys": "decay"},
            r"keys: are 1 - f for each channel, which needs a decay with channels; there is",
        ),
        ({"heads": 4, "keys": "decay", "decay": "mamba2"}, r"with channels; mamba2 has one for each head"),
        (
            {"heads": 4, "key_heads": 2, "keys": "decay", "decay": "low_rank"},
            r"key_heads: must be all heads where keys",
        ),
        ({"heads": 4, "query": ["rope"]}, r"rope must stand on query and key alike"),
        ({"heads": 4, "decay": {"type": "mamba2", "a_max": 0.5}}, r"decay.a_max: must be at least a_min 1"),
        ({"heads": 4, "decay": {"type": "mamba2", "factor": 0}}, r"decay.factor: must be greater than 0"),
        ({"heads": 4, "decay": {"type": "kda", "dt_min": 0.2}}, r"decay.dt_max: must be at least dt_min 0.2"),
        ({"heads": 4, "sdpa": [{"type": "gate", "rank": "head"}]}, r"rank: 'head' is not a rank; did you mean 'head"),
        (
            {"heads": 4, "sdpa": [{"type": "gate", "input": "none", "rank": 2}]},
            r"sdpa.0.rank: a gate without input has no projection that could be of low rank",
        ),
        (
            {"heads": 4, "post": [{"type": "gate", "rank": "head_dim"}]},
            r"post.0.rank: head_dim is the width of a head, and this site has none; give a number",
        ),
        ({"heads": 4, "decay": {"type": "constant", "share": "stack"}}, r"constant has no parameters here that layers"),
        ({"heads": 4, "decay": {"type": "lower_bound"}}, r"'lower_bound' is not a decay; did you mean 'lower_bounded'"),
    ],
)
def test_what_makes_no_sense_is_refused(mixer: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        model({"type": "linear_attention", **mixer})
