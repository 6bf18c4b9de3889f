"""Layers that differ: slices and patches of the block, one identity for each stack, costs, and what is refused."""

from __future__ import annotations

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import SpecError, patch
from archlab.arch_dsl.language.source import Node, read_text
from archlab.arch_dsl.tree.overrides import Overrides, layers_of
from tests.arch_dsl.conformance import TOKENS, build

WINDOW = {"type": "window", "size": 3}


def model(overrides: dict, n_layers: int = 4, **top) -> arch_dsl.Model:
    block = {"norm": "rmsnorm", "attention": {"heads": 4, "kv_heads": 2}, "ffn": {"type": "mlp", "width": 24}}
    data = {"d_model": 16, "n_layers": n_layers, "vocab": 19, "max_positions": 12, "block": block, **top}
    return arch_dsl.load({**data, "overrides": overrides})


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0", [0]),
        ("-1", [5]),
        ("1::2", [1, 3, 5]),
        ("::3", [0, 3]),
        ("2:4", [2, 3]),
        ("-2:", [4, 5]),
        ("4,0, 1", [0, 1, 4]),
        ("0,-1,2:4", [0, 2, 3, 5]),
        ("6", []),
        ("7:", []),
    ],
)
def test_slices_name_layers(text: str, layers: list[int]):
    assert layers_of(text, 6) == layers


def test_a_patch_changes_the_layers_of_its_slice_and_no_other():
    spec = model({"1::2": {"block.attention.mask": WINDOW}})
    assert [block["attention"].mask.type for block in spec.layers()] == ["causal", "window"] * 2
    module = build(arch_dsl.resolve(spec))
    assert [layer.attention.window for layer in module.block] == [None, 3, None, 3]


def test_knobs_wildcards_and_lists_of_layers_work_and_later_slices_act_on_earlier_ones():
    spec = model(
        {
            "::2": {"block.attention.gate": "sdpa", "block.*.pre.rmsnorm.eps": 0.5},
            "0,3": {"block.attention.kv_heads": 4},
            "-1": {"block.ffn": "none", "block.glu": {"width": 8}},
        }
    )
    layers = spec.layers()
    assert [len(block["attention"].sdpa) for block in layers] == [1, 0, 1, 0]
    assert [block["attention"].pre[0].eps for block in layers] == [0.5, 1e-6, 0.5, 1e-6]
    assert [block["attention"].kv_heads for block in layers] == [4, 2, 2, 4]
    assert [list(block) for block in layers] == [["attention", "ffn"]] * 3 + [["attention", "glu"]]
    assert build(arch_dsl.resolve(spec))(TOKENS).isfinite().all()


@pytest.mark.parametrize(
    "other",
    [
        {"1,3": {"block.attention.mask": WINDOW}},
        {"1": {"block.attention.mask": WINDOW}, "-1": {"block.attention.mask": WINDOW}},
        {":": {"block.attention.mask": WINDOW}, "::2": {"block.attention.mask": "causal"}},
        {"1::2": {"block.attention.mask": WINDOW, "block.attention.kv_heads": 2}},
    ],
)
def test_one_stack_has_one_identity_however_it_is_spelled(other: dict):
    first, second = (
        arch_dsl.resolve(model(spelled)) for spelled in ({"1::2": {"block.attention.mask": WINDOW}}, other)
    )
    assert arch_dsl.identity(first) == arch_dsl.identity(second)
    assert arch_dsl.resolve(arch_dsl.load(arch_dsl.canonical(first))) == first


def test_overrides_that_change_nothing_are_none():
    assert arch_dsl.identity(arch_dsl.resolve(model({"1": {"block.attention.kv_heads": 2}}))) == arch_dsl.identity(
        arch_dsl.resolve(model({}))
    )
    assert "overrides" not in arch_dsl.canonical(arch_dsl.resolve(model({})))


def test_a_patch_of_the_block_reaches_the_layers_that_do_not_override_it():
    base = model({"1::2": {"block.attention.mask": WINDOW}})
    gated = patch(base, {"block.attention.gate": "value", "block.attention.mask": {"type": "window", "size": 7}})
    masks = [block["attention"].mask.window for block in gated.layers()]
    assert masks == [7, 3, 7, 3]
    assert all(block["attention"].value for block in gated.layers())


def test_a_patch_reaches_into_a_slice_or_adds_one():
    base = model({"1::2": {"block.attention.mask": WINDOW}})
    wider = patch(base, {"overrides.1::2.block.attention.mask": {"type": "window", "size": 5}})
    assert [block["attention"].mask.window for block in wider.layers()] == [None, 5, None, 5]
    more = patch(base, {"overrides.-1.block.attention.kv_heads": 1})
    assert [block["attention"].kv_heads for block in more.layers()] == [2, 2, 2, 1]
    assert [block["attention"].mask.window for block in more.layers()] == [None, 3, None, 3]
    assert patch(base, {"overrides": {}}).layers() == [base.block] * 4


def test_costs_and_parameters_are_the_sum_of_unequal_layers():
    spec = arch_dsl.resolve(model({"0": {"block.ffn": "none"}, "2:": {"block.attention.mask": WINDOW}}))
    said = arch_dsl.cost(spec, 12)
    assert said.parameters == sum(value.numel() for value in build(spec).parameters())
    stack = said.children["stack"].children
    assert list(stack) == ["layers 0", "layers 1", "layers 2-3"]
    full, windowed = (stack[name].children["each"].children["attention"] for name in ("layers 1", "layers 2-3"))
    assert full.flops_matmul == windowed.flops_matmul
    assert full.flops_model - windowed.flops_model == 4 * 16 * (78 - (6 + 9 * 3))


def test_shared_parameters_belong_to_the_first_layer_that_has_them():
    norm = {"type": "rmsnorm", "share": "stack"}
    spec = arch_dsl.resolve(patch(model({"0": {"block.attention.pre": []}}), {"block.attention.pre": [norm]}))
    module = build(spec)
    assert arch_dsl.cost(spec, 12).parameters == sum(value.numel() for value in module.parameters())
    assert module.block[1].attention.pre.rmsnorm is module.block[3].attention.pre.rmsnorm
    assert [name for name, _ in module.named_parameters() if "attention.pre" in name] == [
        "block.1.attention.pre.rmsnorm.weight"
    ]


def test_initial_values_of_what_layers_keep_do_not_change():
    plain = dict(arch_dsl.compile(arch_dsl.resolve(model({}))).named_parameters())
    other = dict(arch_dsl.compile(arch_dsl.resolve(model({"-1": {"block.ffn": "none"}}))).named_parameters())
    assert set(other) < set(plain)
    assert all(torch.equal(value, plain[name]) for name, value in other.items())


def test_branches_come_and_go_by_patches():
    base = model({})
    more = patch(base, {"block.mlp": {"width": 8, "pre": ["layernorm"]}})
    assert list(more.block) == ["attention", "ffn", "mlp"]
    assert list(patch(more, {"block.ffn": None}).block) == ["attention", "mlp"]
    assert list(patch(base, {"block.extra": {"type": "swiglu", "width": 8}}).block)[-1] == "extra"
    for wrong in ({"block.extra": {"width": 8}}, {"block.ffn2": "none"}):
        with pytest.raises(SpecError, match="matches nothing"):
            patch(base, wrong)


FILE = """d_model: 16
n_layers: 4
vocab: 19
max_positions: 12
block: {attention: {heads: 4}}
overrides:
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "  odd: {block.attention.kv_heads: 2}",
            "m.yaml:7:3: overrides: 'odd' names no layers; write a number, a slice",
        ),
        ("  9: {block.attention.kv_heads: 2}", "m.yaml:7:3: overrides: '9' names no layer of 4"),
        ("  1: {attention.kv_heads: 2}", "m.yaml:7:7: overrides.1: 'attention.kv_heads' is not of a layer"),
        ("  1: {}", "m.yaml:7:6: overrides.1: must be a mapping from paths to values, found a mapping"),
        ("  1: {block.attention.kv_head: 2}", "m.yaml:7:7: overrides.1.block.attention.kv_head: matches nothing"),
        ("  1: {block.attention.kv_heads: 3}", "m.yaml:7:33: block (layer 1).attention.kv_heads: 3 key/value heads do"),
        ("  1: {block.attention.positional: learned}", "m.yaml:7:6: overrides.1: sets what is added to the embeddings"),
        ("  - 1", "m.yaml:7:3: overrides: must be a mapping from layers"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, message: str):
    with pytest.raises(SpecError) as error:
        arch_dsl.resolve(arch_dsl.load(read_text(FILE + text + "\n", "m.yaml")))
    assert message in str(error.value)


def test_equality_and_plain_data():
    patches = {"1": {"block.attention.kv_heads": 2}}
    one, two = (Overrides.parse_node(Node.of(patches), "", []) for _ in range(2))
    assert one == two and hash(one) == hash(two) and one.plain() == patches
    assert one != Overrides() and repr(Overrides()) == "Overrides({})"


def test_a_difference_says_of_which_layers_it_speaks():
    base, other = model({}), model({"1::2": {"block.attention.mask": WINDOW, "block.ffn": "none"}})
    assert [str(change) for change in arch_dsl.diff(base, other)] == [
        "block[1,3].attention.mask.type: causal → window",
        "block[1,3].attention.mask.size: null → 3",
        "block[1,3].ffn: {type: mlp, pre: [rmsnorm], width: 24} → null",
    ]
    assert arch_dsl.diff(other, model({"1::2": {"block.attention.mask": WINDOW, "block.ffn": None}})) == []
    assert [str(c) for c in arch_dsl.diff(other, model({}, n_layers=5))][-1] == "n_layers: 4 → 5"


def test_what_differs_alike_in_unlike_layers_is_told_once():
    base, windows = model({}), {"1::2": {"block.attention.mask": WINDOW}}
    other = model({**windows, "0,1": {"block.ffn.width": 32}, "2,3": {"block.ffn.width": 16}})
    told = [f"{change.path} {change.after}" for change in arch_dsl.diff(base, other)]
    assert told == [
        "block[0-1].ffn.width 32",
        "block[1,3].attention.mask.type window",
        "block[1,3].attention.mask.size 3",
        "block[2-3].ffn.width 16",
    ]
    both = model({**windows, "0::1": {"block.ffn.width": 32}})
    assert "block.ffn.width" in [change.path for change in arch_dsl.diff(base, both)]
