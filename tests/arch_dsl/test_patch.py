"""Knobs and sites mean the same; patches change what they name, carry derived sizes along, never lose each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import arch_dsl
from arch_dsl import Model, SpecError, diff, identity, load, patch, resolve
from arch_dsl.patch import apply, settings_of
from arch_dsl.source import Node, read_text

WRONG = Path(__file__).with_name("wrong_patches.txt").read_text()
KNOBS: dict[str, Any] = {
    "d_model": 64,
    "n_layers": 2,
    "vocab": 19,
    "block": {
        "norm": {"type": "rmsnorm", "placement": "pre"},
        "attention": {
            "heads": 8,
            "kv_heads": 2,
            "positional": "rope",
            "gate": {"position": "sdpa", "granularity": "headwise"},
        },
        "ffn": {"type": "glu"},
    },
}
SITES: dict[str, Any] = {
    "d_model": 64,
    "n_layers": 2,
    "vocab": 19,
    "block": {
        "attention": {
            "type": "attention",
            "pre": ["rmsnorm"],
            "heads": 8,
            "kv_heads": 2,
            "query": ["rope"],
            "key": ["rope"],
            "mask": "causal",
            "sdpa": [{"type": "gate", "granularity": "headwise", "activation": "sigmoid"}],
        },
        "ffn": {"type": "glu", "pre": ["rmsnorm"], "activation": "silu"},
    },
    "final": ["rmsnorm"],
}


@pytest.fixture
def model() -> Model:
    return load(KNOBS)


def site(model: Model, path: str) -> Any:
    """What stands at a path, as people read it."""
    return arch_dsl.canonical(arch_dsl.paths.get(model, tuple(path.split("."))), brief=True)


def with_branch(name: str, **fields: Any) -> dict[str, Any]:
    """KNOBS with fields of one branch added or replaced."""
    return {**KNOBS, "block": {**KNOBS["block"], name: {**KNOBS["block"][name], **fields}}}


def refused(model: Model, changes: Any) -> str:
    with pytest.raises(SpecError) as caught:
        patch(model, changes)
    return str(caught.value)


# Short form and sites


def test_short_form_is_the_site_form():
    assert load(KNOBS) == load(SITES)
    assert identity(resolve(load(KNOBS))) == identity(resolve(load(SITES)))
    assert diff(load(KNOBS), load(SITES)) == []


@pytest.mark.parametrize(
    ("knob", "sites"),
    [
        pytest.param({"norm": "layernorm"}, {"pre": ["layernorm"]}, id="norm"),
        pytest.param({"norm": "none"}, {}, id="no-norm"),
        pytest.param(
            {"norm": {"type": "rmsnorm", "placement": "sandwich", "eps": 1e-3}},
            {"pre": [{"type": "rmsnorm", "eps": 1e-3}], "post": [{"type": "rmsnorm", "eps": 1e-3}]},
            id="sandwich",
        ),
        pytest.param(
            {"norm": {"type": "layernorm", "placement": "post"}},
            {"join": {"type": "add_norm", "norm": "layernorm"}},
            id="post",
        ),
        pytest.param({"gate": "query"}, {"query": ["gate"]}, id="gate-word"),
        pytest.param(
            {"gate": {"position": "dense", "combine": "add"}},
            {"post": [{"type": "gate", "combine": "add"}]},
            id="dense",
        ),
        pytest.param({"gate": ["sdpa", "value"]}, {"sdpa": ["gate"], "value": ["gate"]}, id="two-gates"),
        pytest.param({"gate": "none"}, {}, id="no-gate"),
        pytest.param({"positional": "rope"}, {"query": ["rope"], "key": ["rope"]}, id="rope"),
        pytest.param({"positional": "alibi"}, {"scores": ["alibi"]}, id="alibi"),
        pytest.param({"positional": "none"}, {}, id="no-positions"),
        pytest.param({"qk_norm": "rmsnorm"}, {"query": ["rmsnorm"], "key": ["rmsnorm"]}, id="qk-norm"),
        pytest.param(
            {"positional": "rope", "qk_norm": "rmsnorm", "gate": "query"},
            {"query": ["gate", "rmsnorm", "rope"], "key": ["rmsnorm", "rope"]},
            id="order-at-queries",
        ),
        pytest.param(
            {"gate": "dense", "norm": {"type": "rmsnorm", "placement": "sandwich"}},
            {"pre": ["rmsnorm"], "post": ["gate", "rmsnorm"]},
            id="order-after-the-update",
        ),
    ],
)
def test_each_knob_sets_its_sites(knob: dict[str, Any], sites: dict[str, Any]):
    def spec(block: dict[str, Any], attention: dict[str, Any]) -> Model:
        return load({"d_model": 64, "n_layers": 2, "block": {**block, "attention": {"heads": 4, **attention}}})

    norm = {name: value for name, value in knob.items() if name == "norm"}
    short = spec(norm, {name: value for name, value in knob.items() if name != "norm"})
    assert short.block == spec({}, sites).block


@pytest.mark.parametrize(
    ("positional", "embed"), [("learned", ["learned"]), ("sinusoidal", ["sinusoidal"]), ("rope", [])]
)
def test_positions_of_the_embeddings_stand_at_the_model(positional, embed):
    assert site(load(with_branch("attention", positional=positional)), "embed") == embed
    assert site(patch(load(KNOBS), {"block.attention.positional": positional}), "embed") == embed


def test_final_norm_comes_with_every_placement_but_post(model):
    assert [
        site(patch(model, {"block.norm.placement": placement}), "final") for placement in ("pre", "sandwich", "post")
    ] == [["rmsnorm"], ["rmsnorm"], []]
    assert site(patch(model, {"block.norm": "none"}), "final") == []


# Patches


@pytest.mark.parametrize("written", [KNOBS, SITES], ids=["knobs", "sites"])
@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        pytest.param({"d_model": 128}, {"d_model: 64 → 128"}, id="field"),
        pytest.param(
            {"block.attention.gate.activation": "silu"},
            {
                "block.attention.sdpa: [{type: gate, granularity: headwise}] → "
                "[{type: gate, granularity: headwise, activation: silu}]"
            },
            id="field-of-a-knob",
        ),
        pytest.param(
            {"block.attention.gate.position": "value"},
            {
                "block.attention.value: [] → [{type: gate, granularity: headwise}]",
                "block.attention.sdpa: [{type: gate, granularity: headwise}] → []",
            },
            id="gate-moves",
        ),
        pytest.param(
            {"block.attention.gate": "none"},
            {
                "block.attention.sdpa: [{type: gate, granularity: headwise}] → []",
            },
            id="gate-goes",
        ),
        pytest.param(
            {"block.attention.sdpa.gate.combine": "add"},
            {
                "block.attention.sdpa: [{type: gate, granularity: headwise}] → "
                "[{type: gate, granularity: headwise, combine: add}]"
            },
            id="field-of-a-primitive",
        ),
        pytest.param(
            {"block.attention.sdpa.0.combine": "add"},
            {
                "block.attention.sdpa: [{type: gate, granularity: headwise}] → "
                "[{type: gate, granularity: headwise, combine: add}]"
            },
            id="primitive-by-number",
        ),
        pytest.param(
            {"block.norm.placement": "post"},
            {
                "block.attention.pre: [rmsnorm] → []",
                "block.attention.join.type: add → add_norm",
                "block.attention.join.norm: null → {type: rmsnorm, eps: 1.0e-06}",
                "block.ffn.pre: [rmsnorm] → []",
                "block.ffn.join.type: add → add_norm",
                "block.ffn.join.norm: null → {type: rmsnorm, eps: 1.0e-06}",
                "final: [rmsnorm] → []",
            },
            id="placement",
        ),
        pytest.param(
            {"block.norm.type": "layernorm"},
            {
                "block.attention.pre: [rmsnorm] → [layernorm]",
                "block.ffn.pre: [rmsnorm] → [layernorm]",
                "final: [rmsnorm] → [layernorm]",
            },
            id="type-of-a-knob",
        ),
        pytest.param(
            {"block.attention.positional.theta": 500},
            {
                "block.attention.query: [rope] → [{type: rope, theta: 500.0}]",
                "block.attention.key: [rope] → [{type: rope, theta: 500.0}]",
            },
            id="theta",
        ),
        pytest.param(
            {"block.attention.positional": "alibi"},
            {
                "block.attention.query: [rope] → []",
                "block.attention.key: [rope] → []",
                "block.attention.scores: [] → [alibi]",
            },
            id="alibi-for-rope",
        ),
        pytest.param(
            {"block.*.pre": "layernorm"},
            {
                "block.attention.pre: [rmsnorm] → [layernorm]",
                "block.ffn.pre: [rmsnorm] → [layernorm]",
            },
            id="all-branches",
        ),
        pytest.param(
            {"block.*.pre.*.eps": 0.1},
            {
                "block.attention.pre: [rmsnorm] → [{type: rmsnorm, eps: 0.1}]",
                "block.ffn.pre: [rmsnorm] → [{type: rmsnorm, eps: 0.1}]",
            },
            id="all-primitives-of-all-branches",
        ),
        pytest.param(
            {"block.*.gate": "none"},
            {
                "block.attention.sdpa: [{type: gate, granularity: headwise}] → []",
            },
            id="all-branches-that-have-the-knob",
        ),
        pytest.param(
            {"block.*.kv_heads": 4}, {"block.attention.kv_heads: 2 → 4"}, id="all-branches-that-have-the-field"
        ),
        pytest.param({"init": {"std": 0.1}}, {"init.std: 0.02 → 0.1"}, id="record"),
        pytest.param({"unembedding.tied": False}, {"unembedding.tied: true → false"}, id="boolean"),
        pytest.param({"vocab": None}, {"vocab: 19 → null"}, id="nothing"),
        pytest.param(
            {"block.ffn": {"width": 96}},
            {
                "block.ffn.pre: [rmsnorm] → []",
                "block.ffn.width: null → 96",
            },
            id="branch-as-a-whole",
        ),
        pytest.param(
            {"block.attention": {"heads": 4, "gate": "value"}},
            {
                "block.attention.pre: [rmsnorm] → []",
                "block.attention.heads: 8 → 4",
                "block.attention.kv_heads: 2 → null",
                "block.attention.query: [rope] → []",
                "block.attention.key: [rope] → []",
                "block.attention.value: [] → [gate]",
                "block.attention.sdpa: [{type: gate, granularity: headwise}] → []",
            },
            id="branch-in-short-form",
        ),
        pytest.param(
            {"block.attention.mask": {"type": "window", "size": "1k"}},
            {
                "block.attention.mask.type: causal → window",
                "block.attention.mask.size: null → 1000",
            },
            id="member",
        ),
        pytest.param({}, set(), id="nothing-at-all"),
    ],
)
def test_patch_changes_exactly(written, changes, changed):
    before = load(written)
    after = patch(before, changes)
    assert {str(change) for change in diff(before, after)} == changed
    assert before == load(written)
    assert (identity(before) == identity(after)) == (not changed)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"prepend": "gate"}, ["gate", "rope"]),
        ({"append": "rmsnorm"}, ["rope", "rmsnorm"]),
        ({"append": ["rmsnorm", "gate"]}, ["rope", "rmsnorm", "gate"]),
        ({"remove": "rope"}, []),
        ({"replace": {"rope": {"type": "rope", "theta": 5}}}, [{"type": "rope", "theta": 5.0}]),
        ({"replace": {"rope": ["rmsnorm", "rope"]}}, ["rmsnorm", "rope"]),
        ({"before": {"rope": "rmsnorm"}}, ["rmsnorm", "rope"]),
        ([], []),
        ("none", []),
        (None, []),
        ("rmsnorm", ["rmsnorm"]),
    ],
    ids=str,
)
def test_lists_are_edited_or_replaced(model, edit, expected):
    assert site(patch(model, {"block.attention.query": edit}), "block.attention.query") == expected


def test_another_type_keeps_the_fields_that_both_have(model):
    wide = patch(model, {"block.ffn.width": 100, "block.ffn.bias": True})
    assert site(patch(wide, {"block.ffn.type": "mlp"}), "block.ffn") == {
        "type": "mlp",
        "pre": ["rmsnorm"],
        "width": 100,
        "bias": True,
    }
    assert patch(model, {"block.ffn.type": "mlp"}).block["ffn"].activation == "gelu"  # glu's default is not kept


def test_derived_sizes_follow_what_is_patched(model):
    resolved = resolve(patch(model, {"d_model": 128}))
    assert resolved.block["attention"].head_dim == 16
    assert resolved.block["ffn"].width == 344
    assert resolve(patch(model, {"block.attention.heads": 4})).block["attention"].head_dim == 16
    grouped = patch(model, {"block.attention.kv_heads": None})
    assert resolve(grouped).block["attention"].kv_heads == 8
    assert identity(resolve(patch(model, {"block.attention.head_dim": 8}))) == identity(resolve(model))


@pytest.fixture
def group() -> Model:
    members = {"attention": {"heads": 4, "positional": "rope"}, "ffn": {"type": "glu"}}
    return load({"d_model": 64, "n_layers": 2, "block": {"norm": "rmsnorm", "parallel": members}})


def test_knobs_and_patches_reach_into_a_group(group):
    assert site(group, "block.parallel.pre") == ["rmsnorm"]
    assert site(group, "block.parallel.attention.query") == ["rope"]
    after = patch(
        group,
        {
            "block.parallel.attention.gate": "sdpa",
            "block.parallel.ffn.width": 96,
            "block.parallel.*.pre": "layernorm",
            "block.parallel.ffn.type": "mlp",
        },
    )
    assert {str(change) for change in diff(group, after)} == {
        "block.parallel.branches.attention.sdpa: [] → [gate]",
        "block.parallel.branches.attention.pre: [] → [layernorm]",
        "block.parallel.branches.ffn.pre: [] → [layernorm]",
        "block.parallel.branches.ffn.type: glu → mlp",
        "block.parallel.branches.ffn.width: null → 96",
        "block.parallel.branches.ffn.activation: silu → gelu",
    }


def test_norm_knob_leaves_the_norms_of_members_alone_when_it_cannot_say_them(group):
    own = patch(group, {"block.parallel.*.pre": "layernorm"})
    assert refused(own, {"block.norm.placement": "sandwich"}) == (
        "block.norm: the sites hold more than this knob can say; set norm whole"
    )
    whole = patch(own, {"block.norm": {"type": "rmsnorm", "placement": "sandwich"}})
    assert site(whole, "block.parallel.pre") == site(whole, "block.parallel.post") == ["rmsnorm"]
    assert site(whole, "block.parallel.attention.pre") == []


# What patches refuse


def variant(*components: str) -> list[Any]:
    """The settings of several components, each from its own YAML."""
    return [
        setting
        for index, text in enumerate(components)
        for setting in settings_of(read_text(text, f"{index}.yaml"), f"component {index}")
    ]


def wrong_patches() -> list[Any]:
    """(components, message) of every block `=== title` of wrong_patches.txt, where a + separates components."""
    found = []
    for block in WRONG.removeprefix("=== ").split("\n=== "):
        title, _, rest = block.partition("\n")
        texts, message = rest.split("\n---\n")
        found.append(pytest.param(texts.split("\n+\n"), message.rstrip("\n"), id=title))
    return found


@pytest.mark.parametrize(("components", "message"), wrong_patches())
def test_wrong_patch_is_told_in_full(model, components, message):
    with pytest.raises(SpecError) as caught:
        resolve(apply(model, variant(*components)))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("components", "path", "expected"),
    [
        (
            ["block.attention.query: {append: rmsnorm}", "block.attention.query: {prepend: gate}"],
            "block.attention.query",
            ["gate", "rope", "rmsnorm"],
        ),
        (
            ["block.attention.query: [gate]", "block.attention.query: {append: rope}"],
            "block.attention.query",
            ["gate", "rope"],
        ),
        (["block.norm: layernorm", "block.norm.placement: sandwich"], "block.ffn.post", ["layernorm"]),
        (
            ["block.norm: layernorm", "block.attention.pre: {append: rmsnorm}"],
            "block.attention.pre",
            ["layernorm", "rmsnorm"],
        ),
        (["block.ffn: {type: mlp}", "block.ffn.width: 96"], "block.ffn.width", 96),
        (["block.ffn.type: mlp", "block.ffn.activation: relu"], "block.ffn.activation", "relu"),
        (["block.attention.gate: value", "block.attention.qk_norm: rmsnorm"], "block.attention.value", ["gate"]),
    ],
    ids=lambda value: " + ".join(value) if isinstance(value, list) and ":" in str(value[0]) else "",
)
def test_settings_compose_where_none_is_lost(model, components, path, expected):
    assert site(apply(model, variant(*components)), path) == expected


# Identity


def test_order_of_branches_matters_and_order_of_keys_does_not():
    turned = {**KNOBS, "block": dict(reversed(KNOBS["block"].items()))}
    assert identity(resolve(load(turned))) != identity(resolve(load(KNOBS)))
    assert [str(change) for change in diff(load(KNOBS), load(turned))] == ["block: [attention, ffn] → [ffn, attention]"]
    keys = dict(reversed(KNOBS.items()))
    keys["block"] = {**KNOBS["block"], "attention": dict(reversed(KNOBS["block"]["attention"].items()))}
    assert identity(resolve(load(keys))) == identity(resolve(load(KNOBS)))


@pytest.mark.parametrize(
    "same",
    [
        with_branch("attention", mask="causal"),
        with_branch("attention", head_dim=8),
        with_branch("ffn", activation="silu", width=176),
        with_branch("attention", gate={"position": "sdpa", "granularity": "headwise", "heads": "specific"}),
        with_branch("attention", positional={"type": "rope", "theta": "10k"}),
        {**KNOBS, "d_model": 64.0, "init": {}, "unembedding": {"tied": True}, "embed": None},
    ],
    ids=["default-member", "derived-head", "derived-width", "default-word", "unit", "defaults"],
)
def test_spelling_does_not_change_the_identity(same):
    assert identity(resolve(load(same))) == identity(resolve(load(KNOBS)))


def test_branch_names_are_part_of_the_identity_as_initial_values_hang_on_them():
    renamed = {**KNOBS, "block": {("feed" if name == "ffn" else name): x for name, x in KNOBS["block"].items()}}
    assert identity(resolve(load(renamed))) != identity(resolve(load(KNOBS)))


def test_a_raised_version_of_a_primitive_or_its_op_is_another_identity(monkeypatch):
    from dataclasses import replace

    import kernels
    from arch_dsl.primitives.norms import LayerNorm

    model = resolve(load(KNOBS))
    before = identity(model)
    monkeypatch.setattr(LayerNorm, "version", 2)
    assert identity(model) == before
    monkeypatch.setitem(kernels.OPS, "rms_norm", replace(kernels.OPS["rms_norm"], version=3))
    data = arch_dsl.canonical(model)
    assert identity(model) != before
    assert data["final"] == [{"type": "rmsnorm", "version": 3, "eps": 1e-6}]
    assert load(data) == model
    monkeypatch.setitem(kernels.OPS, "rms_norm", replace(kernels.OPS["rms_norm"], version=4))
    with pytest.raises(SpecError, match="was made by version 3 of rmsnorm; this is 4, with other numbers"):
        load(data)


def test_nodes_of_plain_data_have_no_place(model):
    assert patch(model, Node.of({"d_model": 128})) == patch(model, {"d_model": 128})
