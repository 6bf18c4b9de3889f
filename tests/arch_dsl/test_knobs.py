"""The short form means the sites that it stands for."""

from __future__ import annotations

from typing import Any

import pytest

from arch_dsl import Model, diff, identity, load, patch, resolve
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


def test_final_norm_comes_with_every_placement_but_post():
    model = load(KNOBS)
    assert [
        site(patch(model, {"block.norm.placement": placement}), "final") for placement in ("pre", "sandwich", "post")
    ] == [["rmsnorm"], ["rmsnorm"], []]
    assert site(patch(model, {"block.norm": "none"}), "final") == []
