"""Two specs have one identity exactly if they mean the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archlab import arch_dsl, kernels
from archlab.arch_dsl import SpecError, diff, identity, load, resolve
from archlab.arch_dsl.primitives.norms import LayerNorm
from tests.arch_dsl.specs import KNOBS, with_branch


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
