"""Mistakes that once slipped through: each was accepted and ignored, refused though right, or ended in a traceback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.language.source import read_text
from archlab.arch_dsl.parts.layers import without_groups


def model(block: dict[str, Any]) -> arch_dsl.Model:
    return arch_dsl.load({"d_model": 16, "n_layers": 1, "block": block})


SERIAL = {"norm": "rmsnorm", "attention": {"heads": 2}, "ffn": {"type": "glu"}}
BRANCHES = [{"name": "attention", "type": "attention", "heads": 2}, {"name": "ffn", "type": "glu"}]


@pytest.mark.parametrize("text", ["4.1M", "8.2M", "16.1k", "2.01k", "0.3B"])
def test_number_with_a_unit_is_exact(text: str) -> None:
    number, unit = float(text[:-1]), {"k": 1e3, "M": 1e6, "B": 1e9}[text[-1]]
    assert arch_dsl.load({"d_model": text, "n_layers": 1, "block": SERIAL}).d_model == round(number * unit)


def test_branch_beside_a_list_of_branches_is_refused() -> None:
    with pytest.raises(SpecError, match=r"block.parallel.extra: stands beside `branches`"):
        model({"parallel": {"branches": BRANCHES, "extra": {"type": "glu"}}})


def test_one_branch_is_no_parallel_group() -> None:
    group = model({"parallel": {"branches": BRANCHES}})
    for wrong in (
        model({"parallel": {"branches": BRANCHES[:1]}}),
        arch_dsl.patch(group, {"block.parallel.ffn": "none"}),
    ):
        with pytest.raises(SpecError, match=r"block.parallel: needs at least two branches, found 1"):
            arch_dsl.resolve(wrong, vocab=11)


@pytest.mark.parametrize("path", ["block.attention.gate.activation.foo", "block.norm.eps.foo", "block.norm.type.foo"])
def test_path_below_a_field_of_a_knob_matches_nothing(path: str) -> None:
    gated = arch_dsl.patch(model(SERIAL), {"block.attention.gate": "sdpa"})
    with pytest.raises(SpecError, match="matches nothing"):
        arch_dsl.patch(gated, {path: 1})


def test_parallel_and_serial_blocks_start_from_the_same_weights() -> None:
    group = {"norm": "rmsnorm", "parallel": {"attention": {"heads": 2}, "ffn": {"type": "glu"}}}
    serial, parallel = (arch_dsl.compile(arch_dsl.resolve(model(block), vocab=11)) for block in (SERIAL, group))
    ours = dict(serial.named_parameters())
    shared = {name.replace(".parallel.members", ""): value for name, value in parallel.named_parameters()}
    matrices = [name for name, value in ours.items() if value.dim() == 2]
    assert len(matrices) == 8
    assert all(torch.equal(ours[name], shared[name]) for name in matrices)


def test_members_of_two_parallel_groups_start_apart() -> None:
    group = {"type": "parallel", "attention": {"heads": 2}, "ffn": {"type": "glu"}}
    module = arch_dsl.compile(arch_dsl.resolve(model({"first": group, "second": group}), vocab=11))
    start = dict(module.named_parameters())
    ours = [name for name in start if ".first." in name]
    assert len(ours) == 7
    assert not any(torch.equal(start[name], start[name.replace(".first.", ".second.")]) for name in ours)


def test_weights_find_their_group_where_there_are_two() -> None:
    names = ["a", "block.0.first.members.ffn.w", "block.0.second.members.ffn.w", "block.0.second.members.mlp.w"]
    short = {names[0]: "a", names[1]: names[1], names[2]: names[2], names[3]: "block.0.mlp.w"}
    assert without_groups(names) == short


def test_patch_may_set_several_encodings_at_once() -> None:
    patched = arch_dsl.patch(model(SERIAL), {"block.attention.positional": ["rope", "alibi"]})
    attention = patched.block["attention"]
    assert [item.type for item in (*attention.query, *attention.scores)] == ["rope", "alibi"]
    with pytest.raises(SpecError, match="there are several; set positional whole"):
        arch_dsl.patch(patched, {"block.attention.positional.theta": 500})


def test_patch_may_name_a_new_branch_by_its_type_alone() -> None:
    assert list(arch_dsl.patch(model(SERIAL), {"block.ffn_2": "swiglu"}).block) == ["attention", "ffn", "ffn_2"]


def test_patch_may_remove_several_primitives_of_a_site() -> None:
    site = ["rmsnorm", "depth_scale", "layernorm"]
    before = model({"attention": {"heads": 2, "pre": site}})
    after = arch_dsl.patch(before, {"block.attention.pre": {"remove": ["rmsnorm", "depth_scale"]}})
    assert after == model({"attention": {"heads": 2, "pre": ["layernorm"]}})


@pytest.mark.parametrize("layers", ["block", "overrides.1.block"])
def test_layer_without_branches_is_refused(layers: str) -> None:
    emptied = {f"{layers}.{name}": "none" for name in SERIAL if name != "norm"}
    with pytest.raises(SpecError, match="needs at least one branch; all are removed"):
        arch_dsl.resolve(arch_dsl.patch(model(SERIAL).replace(n_layers=2), emptied), vocab=11)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layers": 1e300}, r"n_layers: must be an integer, found 1e\+300"),
        ({"n_layers": "2B"}, "n_layers: must be at most 10000, found 2B"),
        ({"d_model": 10**400}, "d_model: is an integer of more than 399 digits"),
        ({"embedding": {"std": 10**400}}, "embedding.std: is an integer of more than 399 digits"),
    ],
)
def test_numbers_beyond_all_measure_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        arch_dsl.load({"d_model": 16, "n_layers": 1, "block": SERIAL, **fields})


def test_control_character_is_told_with_its_place() -> None:
    with pytest.raises(SpecError, match=r"^m.yaml:2:6: this is not YAML: unacceptable character #x0007"):
        read_text("é: 1\nab: x\ay\n", "m.yaml")
