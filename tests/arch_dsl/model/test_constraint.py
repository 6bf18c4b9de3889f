"""Weights on the unit sphere: which vectors, at the start and after every step, tied and shared ones once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.layers import after_step
from archlab.search.recipe.parameter_groups import decay_groups, divided

WIDTH = 16
GLU = {"type": "glu", "width": 24}
PARTS: dict[str, Any] = {  # by name, a layer and what else the model has
    "attention and glu": ({"attention": {"heads": 4, "kv_heads": 2, "bias": True}, "ffn": GLU}, {}),
    "square maps": ({"attention": {"heads": 4}, "mlp": {"width": WIDTH}}, {"unembedding": {"tied": False}}),
    "experts": ({"attention": {"heads": 4}, "moe": {"width": 12, "experts": 3, "shared": 8}}, {}),
    "linear attention": ({"delta_net": {"heads": 2}, "ffn": GLU}, {}),
    "rwkv": ({"rwkv4": {}, "channel_mix": {"width": WIDTH}}, {}),
    "shared layers": ({"attention": {"heads": 4, "share": "stack"}, "ffn": GLU | {"share": "stack"}}, {}),
    "further tokens": ({"attention": {"heads": 4}, "ffn": GLU}, {"predict": {"type": "sequential"}}),
    "learned positions": ({"attention": {"heads": 4}, "ffn": GLU}, {"embed": ["learned"]}),
}
WRITING = ("output_projection.weight", "channel_mix.value_projection.weight", "predict.2.projection.weight")


def model(block: Any, **more: Any) -> arch_dsl.Model:
    sizes = {"d_model": WIDTH, "n_layers": 2, "vocab": 19, "max_positions": 12, "constraint": "unit_norm"}
    return arch_dsl.resolve(arch_dsl.load({**sizes, "block": block, **more}))


def vectors(module: torch.nn.Module) -> dict[str, Tensor]:
    """The length of every vector of the stream's width that a matrix has, by the matrix's path."""
    found = {}
    for path, value in module.named_parameters():
        along = -2 if any(part in path for part in WRITING) or "output_projections.weight" in path else -1
        if value.ndim > 1 and value.shape[along] == WIDTH and "norm" not in path:
            found[path] = value.detach().double().norm(dim=along)
    return found


@pytest.mark.parametrize("name", PARTS)
def test_vectors_have_length_one_at_the_start_and_after_a_step_of_any_size(name: str):
    block, more = PARTS[name]
    module = arch_dsl.compile(model(block, **more))
    for turn in range(2):
        lengths = vectors(module)
        assert {path for path, value in module.named_parameters() if hasattr(value, "constrained")} == set(lengths)
        for path, length in lengths.items():
            torch.testing.assert_close(length, torch.ones_like(length), msg=f"{path}, turn {turn}")
        randomize(module)
        measures = {"block.0.moe.assigned": torch.ones(3), "block.1.moe.assigned": torch.ones(3)}
        before = {path: value.detach().clone() for path, value in module.named_parameters()}
        after_step(module, measures)
        for path, value in module.named_parameters():
            if path not in lengths:
                assert torch.equal(value, before[path])
            else:
                cosine = torch.nn.functional.cosine_similarity(value, before[path], dim=value.constrained)
                torch.testing.assert_close(cosine, torch.ones_like(cosine))


def test_a_constraint_leaves_the_direction_of_initial_values():
    block, more = PARTS["square maps"]
    free, bound = (
        dict(arch_dsl.compile(arch_dsl.patch(model(block, **more), {"constraint": own})).named_parameters())
        for own in (None, "unit_norm")
    )
    for path, value in bound.items():
        if hasattr(value, "constrained"):
            cosine = torch.nn.functional.cosine_similarity(value, free[path], dim=value.constrained)
            torch.testing.assert_close(cosine, torch.ones_like(cosine))
        else:
            assert torch.equal(value, free[path])


def test_a_map_that_starts_at_zero_stays_until_it_is_trained():
    module = arch_dsl.compile(model({"attention": {"heads": 4, "zero": ["output"]}}))
    output = module.block[0].attention.output_projection.weight
    assert not output.any()
    with torch.no_grad():
        output[3, 2] = -1e-3
    after_step(module, {})
    assert output[3, 2] == -1 and output.abs().sum() == 1


def test_patterns_choose_what_is_constrained():
    constraint = {"type": "unit_norm", "parameters": ["embedding", "*.ffn.*"]}
    module = arch_dsl.compile(model({"attention": {"heads": 4}, "ffn": GLU}, constraint=constraint))
    named = {path for path, value in module.named_parameters() if hasattr(value, "constrained")}
    maps = ("gate", "input", "output")
    assert named == {"embedding", *(f"block.{i}.ffn.{name}_projection.weight" for i in range(2) for name in maps)}


def test_a_pattern_without_a_matrix_is_refused():
    wrong = {"type": "unit_norm", "parameters": ["*", "*.attenton.*"]}
    with pytest.raises(SpecError, match=r"constraint\.parameters: '\*\.attenton\.\*' matches no matrix"):
        arch_dsl.compile(model({"attention": {"heads": 4}}, constraint=wrong))


def test_weight_decay_leaves_what_is_constrained_alone_and_muon_takes_it():
    constraint = {"type": "unit_norm", "parameters": ["*.ffn.*"]}
    module = arch_dsl.compile(model({"attention": {"heads": 4}, "ffn": GLU}, constraint=constraint))
    named = list(module.named_parameters())
    decayed = {id(value) for group in decay_groups(named, 0.1) if group["weight_decay"] for value in group["params"]}
    maps = ("query", "key", "value", "output")
    attention = {f"block.{i}.attention.{name}_projection.weight" for i in range(2) for name in maps}
    assert {path for path, value in named if id(value) in decayed} == {"embedding", *attention}
    hidden = {path for path, _ in divided(named)[0]}
    assert hidden >= {f"block.0.ffn.{name}_projection.weight" for name in ("gate", "input", "output")}


def test_a_model_without_a_constraint_is_the_one_it_was():
    plain = model({"attention": {"heads": 4}}, constraint=None)
    assert "constraint" not in arch_dsl.dump(plain)
    module = arch_dsl.compile(plain)
    randomize(module)
    before = module.embedding.detach().clone()
    after_step(module, {})
    assert torch.equal(module.embedding, before)
