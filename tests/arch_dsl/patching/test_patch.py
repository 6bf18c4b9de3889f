"""Patches change what they name, carry derived sizes along, and never lose each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl import Model, SpecError, canonical, diff, identity, load, patch, resolve
from archlab.arch_dsl.language.source import Node, read_text
from archlab.arch_dsl.patching.patch import apply, settings_of
from tests.arch_dsl.specs import KNOBS, SITES, site, told

WRONG = (Path(__file__).parents[1] / "wrong_patches.txt").read_text()


@pytest.fixture
def model() -> Model:
    return load(KNOBS)


def refused(model: Model, changes: Any) -> str:
    with pytest.raises(SpecError) as caught:
        patch(model, changes)
    return str(caught.value)


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
                "block.ffn.pre: [rmsnorm] → []",
                "block.ffn.join.type: add → add_norm",
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
        pytest.param({"init": {"std": 0.1}}, {"init.std: small → 0.1"}, id="record"),
        pytest.param({"unembedding.tied": False}, {"unembedding.tied: true → false"}, id="boolean"),
        pytest.param({"vocab": None}, {"vocab: 19 → null"}, id="nothing"),
        pytest.param(
            {"block.ffn": {"width": 96}},
            {
                "block.ffn.width: null → 96",
            },
            id="branch-as-a-whole",
        ),
        pytest.param(
            {"block.attention": {"heads": 4, "gate": "value"}},
            {
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


def test_another_type_keeps_of_a_site_what_may_stand_there():
    sites = {"query": ["rmsnorm", "rope"], "key": "rope", "sdpa": "scale", "pre": "rmsnorm"}
    mixer = {"type": "attention", "heads": 4, **sites}
    model = load({"d_model": 64, "vocab": 32, "n_layers": 1, "block": {"mixer": mixer, "ffn": "swiglu"}})
    scan = patch(model, {"block.mixer.type": "selective_scan"})
    kept = {"query": ["rmsnorm"], "sdpa": ["scale"], "pre": ["rmsnorm"]}  # rope has no meaning there
    assert site(scan, "block.mixer") == {"type": "selective_scan", **kept}
    for made in (scan, patch(model, {"block.mixer.type": "mamba"})):
        assert load(canonical(resolve(made))) == resolve(made)  # a trial can read what was planned


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
        found.append(pytest.param(texts.split("\n+\n"), told(message.rstrip("\n")), id=title))
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
        (
            [
                "block.attention.key: {prepend: shift}",
                "block.attention.qk_norm: rmsnorm",
                "block.attention.positional: none",
            ],
            "block.attention.key",
            ["shift", "rmsnorm"],
        ),
    ],
    ids=lambda value: " + ".join(value) if isinstance(value, list) and ":" in str(value[0]) else "",
)
def test_settings_compose_where_none_is_lost(model, components, path, expected):
    assert site(apply(model, variant(*components)), path) == expected


@pytest.mark.parametrize(
    "alike",
    [
        {"block.norm": "layernorm"},
        {"block.norm.placement": "sandwich"},
        {"block.norm": {"type": "rmsnorm", "placement": "deepnorm"}},
        {"block.join": {"type": "weighted", "update": 0.5}},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "branch",
    [{"block.ffn": {"type": "mlp", "width": 8}}, {"block.ffn_2": "geglu"}, {"block.parallel": {"mlp": {"width": 8}}}],
    ids=str,
)
def test_norms_and_joins_of_a_block_undo_no_branch_that_was_set(model, branch, alike):
    """In either order, as those of a grid come last."""
    assert canonical(patch(model, {**branch, **alike})) == canonical(patch(model, {**alike, **branch}))


def test_a_norm_that_a_branch_said_itself_is_not_undone(model):
    own = {"block.ffn": {"type": "mlp", "pre": ["layernorm"]}}
    assert "would undo block.ffn" in refused(model, {**own, "block.norm": "rmsnorm"})


def test_a_new_branch_takes_knobs_by_its_name(model):
    added = patch(model, {"block.attention_2": {"heads": 4, "positional": "rope", "gate": "value"}})
    assert site(added, "block.attention_2.query") == ["rope"] and site(added, "block.attention_2.value") == ["gate"]
    group = patch(model, {"block.parallel": {"attention": {"heads": 4, "positional": "rope"}, "mlp": {"width": 8}}})
    assert site(group, "block.parallel.branches.attention.key") == ["rope"]


def test_a_whole_block_brings_its_norm_along(model):
    block = {"norm": "layernorm", "attention": {"heads": 4, "positional": "rope"}, "ffn": "swiglu"}
    after = patch(model, {"block": block})
    assert site(after, "final") == site(after, "block.ffn.pre") == ["layernorm"]
    assert site(patch(model, {"final": [], "block.ffn": "geglu"}), "final") == []


def test_a_knob_replaces_what_a_published_mixer_has_by_itself(model):
    for gate, where in (("none", None), ("value", "value"), ("sdpa", "sdpa")):
        mixer = {"type": "gated_delta_net", "heads": 4, "gate": gate}
        after = patch(model, {"block.attention": mixer}).block["attention"]
        gated = [
            name for name in ("query", "key", "value", "sdpa") if any(i.type == "gate" for i in getattr(after, name))
        ]
        assert gated == ([where] if where else [])
    given = {"type": "gated_delta_net", "heads": 4, "gate": "sdpa", "sdpa": ["gate"]}
    assert "stands for block.attention.sdpa, which is given too" in refused(model, {"block.attention": given})


@pytest.mark.parametrize("side", ["", "encoder.", "decoder."])
def test_what_is_written_beside_a_knob_is_not_lost(side: str):
    block = {"attention": {"heads": 4, "mask": "full"}, "ffn": "glu"}
    sides = {name: {"n_layers": 2, "block": block} for name in ("encoder", "decoder")}
    plain = {"n_layers": 2, "embed": "learned", "block": block}
    model = load({"d_model": 64, "vocab": 32, "max_positions": 8, **(sides if side else plain)})
    for knob, value, where, item in (("gate", "value", "sdpa", "gate"), ("qk_norm", "rmsnorm", "query", "layernorm")):
        branch = {"heads": 4, "mask": "full", knob: value, where: [item]}
        message = refused(model, {f"{side}block.attention": branch})
        assert f"stands for {side}block.attention.{where}, which is given too" in message
    if not side:
        rope = {"heads": 4, "positional": "rope"}
        assert "stands for embed, which is given too" in refused(model, {"block.attention": rope})
        with pytest.raises(SpecError, match="stands for embed, which is given too"):
            load({**plain, "d_model": 64, "vocab": 32, "block": {**block, "attention": rope}})


def test_a_norm_that_a_member_of_a_group_said_is_not_undone(model):
    members = {"mlp": {"width": 8, "pre": ["layernorm"]}, "glu": {"width": 8}}
    assert "would undo block.parallel" in refused(model, {"block.parallel": members, "block.norm": "rmsnorm"})


def test_nodes_of_plain_data_have_no_place(model):
    assert patch(model, Node.of({"d_model": 128})) == patch(model, {"d_model": 128})


def test_a_gate_beside_another_undoes_nothing(model):
    both = patch(model, {"block.attention.gate": {"position": "value"}, "block.*.post": ["rezero"]})
    assert site(both, "block.attention.value") == ["gate"]
    assert [gate["activation"] for gate in site(both, "block.attention.post")] == ["identity"]
    assert resolve(patch(both, {"block.attention.gate": [{"position": "key"}, {"position": "sdpa"}]}))
    assert "would undo block.attention.gate" in refused(
        model, {"block.attention.gate": {"position": "value"}, "block.attention.value": []}
    )


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "res_post", "deepnorm", "depth_scaled"])
@pytest.mark.parametrize("branch", ["geglu", {"type": "mlp", "width": 8}])
def test_a_branch_that_is_new_or_set_whole_is_normed_as_the_others_are(model, placement: str, branch: Any):
    base = patch(model, {"block.norm.placement": placement})
    for name in ("ffn", "ffn_2"):
        after = patch(base, {f"block.{name}": branch})
        assert after.final == base.final
        for outer in ("pre", "post", "join"):
            assert getattr(after.block[name], outer) == getattr(base.block["attention"], outer)
        written = {"type": branch, "pre": []} if isinstance(branch, str) else {**branch, "pre": []}
        bare = patch(base, {f"block.{name}": written}).block[name]
        assert not bare.pre and not bare.post and bare.join.type == "add"
    both = {"block.norm": {"type": "layernorm", "placement": placement}, "block.ffn": branch}
    assert patch(base, both).block["ffn"].pre == patch(base, both).block["attention"].pre


def test_a_branch_among_branches_that_are_normed_unlike_is_as_it_is_written(model):
    unlike = patch(model, {"block.attention.pre": ["layernorm"]})
    assert patch(unlike, {"block.ffn": "geglu"}).block["ffn"].pre == ()
