"""The short form means the sites that it stands for."""

from __future__ import annotations

from typing import Any

import pytest

from archlab.arch_dsl import Model, SpecError, diff, identity, load, patch, resolve
from archlab.arch_dsl.patching.norm_knob import NORM, PLACEMENTS
from tests.arch_dsl.specs import KNOBS, SITES, site, with_branch


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


PLACED: dict[str, dict[str, Any]] = {
    "pre": {"pre": ["layernorm"], "final": ["layernorm"]},
    "post": {"join": {"type": "add_norm", "norm": "layernorm"}},
    "sandwich": {"pre": ["layernorm"], "post": ["layernorm"], "final": ["layernorm"]},
    "res_post": {"post": ["layernorm"], "final": ["layernorm"]},
    "peri": {"embed": ["layernorm"], "pre": ["layernorm"], "post": ["layernorm"], "final": ["layernorm"]},
    "residual_dual": {
        "join": {"type": "residual_dual", "norm": "layernorm"},
        "final": [{"type": "dual", "norm": "layernorm"}],
    },
    "deepnorm": {"join": {"type": "deepnorm", "norm": "layernorm"}},
    "depth_scaled": {"pre": ["layernorm", "depth_scale"], "final": ["layernorm"]},
}


def _placed(placement: str) -> Model:
    """The model that a placement stands for, written with sites."""
    sites = dict(PLACED[placement])
    top = {name: sites.pop(name) for name in ("embed", "final") if name in sites}
    block = {"attention": {"heads": 4, **sites}, "ffn": {"type": "mlp", **sites}}
    return load({"d_model": 64, "n_layers": 2, "vocab": 19, **top, "block": block})


def test_every_placement_is_tried():
    assert set(PLACED) == set(PLACEMENTS)


@pytest.mark.parametrize("placement", PLACED)
def test_placement_stands_for_its_sites_and_is_read_back(placement):
    norm = {"type": "layernorm", "placement": placement}
    block = {"norm": norm, "attention": {"heads": 4}, "ffn": {"type": "mlp"}}
    model = load({"d_model": 64, "n_layers": 2, "vocab": 19, "block": block})
    assert model == _placed(placement)
    assert NORM.read(model, ("block",)) == norm
    resolve(model)


@pytest.mark.parametrize("first", PLACED)
@pytest.mark.parametrize("second", PLACED)
def test_placement_after_another_undoes_it_completely(first, second):
    assert patch(_placed(first), {"block.norm.placement": second}) == _placed(second)
    bare = patch(_placed(first), {"block.norm": "none"})
    assert patch(bare, {"block.norm": {"type": "layernorm", "placement": second}}) == _placed(second)
    assert [site(bare, name) for name in ("embed", "final")] == [[], []]


def test_one_join_of_a_block_is_the_join_of_each_branch():
    soft = {"type": "weighted", "update": 0.22}
    branches = {"attention": {"heads": 4}, "ffn": {"type": "mlp"}}
    short: dict[str, Any] = {"d_model": 64, "n_layers": 2, "vocab": 9}
    short["block"] = {"norm": "rmsnorm", "join": soft, **branches}
    long = {name: {**branch, "join": soft} for name, branch in branches.items()}
    wanted = load({**short, "block": {"norm": "rmsnorm", **long}})
    assert load(short) == wanted and identity(resolve(load(short))) == identity(resolve(wanted))
    plain = load({**short, "block": {"norm": "rmsnorm", **branches}})
    assert patch(plain, {"block.join": soft}) == wanted
    assert patch(patch(wanted, {"block.join.update": 1.0}), {"block.join.type": "add"}) == plain
    sparse = patch(wanted, {"block.ffn": {"type": "moe"}, "block.extra": {"type": "mlp", "join": "highway"}})
    assert site(sparse, "block.ffn.join") == soft and site(sparse, "block.extra.join") == "highway"
    with pytest.raises(SpecError, match=r"block\.join: stands for block\.ffn\.join, which is given too"):
        load({**short, "block": {**short["block"], "ffn": {"type": "mlp", "join": "highway"}}})
    with pytest.raises(SpecError, match=r"block\.(norm|join): stands for block\.attention\.join, which is given too"):
        load({**short, "block": {**short["block"], "norm": {"type": "rmsnorm", "placement": "post"}}})


def test_knobs_leave_the_order_of_sites():
    block = {"mixer": {"type": "mamba2", "head_dim": 8, "value_dim": 16, "pre": ["rmsnorm"]}}
    mamba = patch(load({"d_model": 64, "n_layers": 2, "block": block}), {"block.mixer.gate.activation": "gelu"})
    assert [item if isinstance(item, str) else item["type"] for item in site(mamba, "block.mixer.sdpa")] == [
        "gate",
        "rmsnorm",
    ]
    own = {"heads": 4, "query": ["rope", "rmsnorm"], "key": ["rope", "rmsnorm"]}
    later = load({"d_model": 64, "n_layers": 2, "block": {"attention": own}})
    assert site(patch(later, {"block.attention.qk_norm": "l2"}), "block.attention.query") == ["rope", "l2"]


def test_knobs_stand_beside_branches_by_their_published_names():
    model = load({"d_model": 64, "n_layers": 2, "block": {"retnet": {"heads": 4, "qk_norm": "rmsnorm"}}})
    assert site(model, "block.retnet.query") == ["rmsnorm", "rope"]


@pytest.mark.parametrize("placement", PLACED)
def test_field_of_the_norm_is_turned_in_any_placement(placement):
    eps = {"type": "layernorm", "eps": 0.5}
    turned = patch(_placed(placement), {"block.norm.eps": 0.5})
    assert NORM.read(turned, ("block",)) == {**eps, "placement": placement}
    assert patch(turned, {"block.norm.eps": 1e-5}) == _placed(placement)


def test_norm_of_the_embeddings_that_no_placement_set_stays():
    bloom = load({**KNOBS, "embed": ["layernorm"]})
    assert site(patch(bloom, {"block.norm.placement": "post"}), "embed") == ["layernorm"]
    peri = patch(bloom, {"block.norm.placement": "peri"})
    assert site(peri, "embed") == ["layernorm", "rmsnorm"]
    assert patch(peri, {"block.norm.placement": "pre"}) == bloom


def test_placement_leaves_what_is_no_norm():
    own = {"pre": ["scale"], "post": ["gate", "scale"], "join": "highway"}
    block = {"norm": {"type": "l2", "placement": "sandwich"}, "attention": {"heads": 4, **own}}
    model = load({"d_model": 64, "n_layers": 2, "final": ["scale"], "block": block})
    assert site(model, "block.attention.pre") == ["l2", "scale"]
    assert site(model, "block.attention.post") == ["gate", "l2", "scale"]
    assert site(model, "block.attention.join") == "highway"
    assert site(model, "final") == ["l2", "scale"]


def test_placement_of_some_layers_is_an_override():
    block = {"norm": {"type": "layernorm", "placement": "peri"}, "attention": {"heads": 4}}
    data = {"d_model": 64, "n_layers": 3, "vocab": 19, "block": block}
    model = resolve(load({**data, "overrides": {"1:": {"block.norm.placement": "res_post"}}}))
    assert [list(layer["attention"].pre) != [] for layer in model.layers()] == [True, False, False]
    assert [site(model, name) for name in ("embed", "final")] == [["layernorm"], ["layernorm"]]


def test_override_cannot_norm_the_embeddings_of_all_layers():
    block = {"norm": "layernorm", "attention": {"heads": 4}}
    data = {"d_model": 64, "n_layers": 3, "vocab": 19, "block": block}
    with pytest.raises(SpecError, match="sets what is added to the embeddings"):
        resolve(load({**data, "overrides": {"1:": {"block.norm.placement": "peri"}}}))


def test_final_norm_comes_with_every_placement_but_post():
    model = load(KNOBS)
    assert [
        site(patch(model, {"block.norm.placement": placement}), "final") for placement in ("pre", "sandwich", "post")
    ] == [["rmsnorm"], ["rmsnorm"], []]
    assert site(patch(model, {"block.norm": "none"}), "final") == []
