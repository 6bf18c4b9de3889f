"""A model as a tree with shapes and costs, the kernels that its nodes get, and what stays out of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from archlab import arch_dsl, kernels
from archlab.arch_dsl.inspection.text_tree import tree

MODEL = arch_dsl.resolve(
    arch_dsl.load(
        {
            "d_model": 16,
            "n_layers": 2,
            "max_positions": 8,
            "block": {
                "norm": {"type": "rmsnorm", "placement": "sandwich"},
                "attention": {
                    "heads": 4,
                    "kv_heads": 2,
                    "positional": "rope",
                    "mask": {"type": "window", "size": 4},
                    "gate": {"position": "sdpa", "granularity": "headwise"},
                },
                "ffn": {"type": "glu", "width": 24},
            },
            "unembedding": {"tied": False},
        }
    ),
    vocab=19,
)


def test_tree_shows_every_node_with_shape_and_cost():
    lines = tree(MODEL, tokens=8)
    assert [("  " * line.depth + line.name, line.what, line.shape, line.cost.parameters) for line in lines] == [
        ("model", "d_model 16, n_layers 2, vocab 19", "", 4720),
        ("  embedding", "table [19, 16]", "[B,T,D]", 304),
        ("  block", "x 2", "[B,T,D]", 4096),
        ("    attention", "attention: heads 4, kv_heads 2, head_dim 4", "[B,T,D]", 864),
        ("      pre", "rmsnorm", "[B,T,D]", 16),
        ("      query_projection", "", "", 256),
        ("      key_projection", "", "", 128),
        ("      value_projection", "", "", 128),
        ("      query", "rope", "[B,T,4,4]", 0),
        ("      key", "rope", "[B,T,2,4]", 0),
        ("      mask", "{type: window, size: 4}", "", 0),
        ("      attend", "", "[B,4,T,T]", 0),
        ("      sdpa", "{type: gate, granularity: headwise}", "[B,T,4,4]", 64),
        ("      output_projection", "", "", 256),
        ("      post", "rmsnorm", "[B,T,D]", 16),
        ("      join", "add", "", 0),
        ("    ffn", "glu: width 24, activation silu", "[B,T,D]", 1184),
        ("      pre", "rmsnorm", "[B,T,D]", 16),
        ("      gate_projection", "", "", 384),
        ("      input_projection", "", "", 384),
        ("      activation", "silu", "[B,T,24]", 0),
        ("      output_projection", "", "", 384),
        ("      post", "rmsnorm", "[B,T,D]", 16),
        ("      join", "add", "", 0),
        ("  final", "rmsnorm", "[B,T,D]", 16),
        ("  unembedding", "table [19, 16]", "[B,T,V]", 304),
    ]


def test_costs_of_the_tree_add_up():
    total = arch_dsl.cost(MODEL, 8)
    assert total.parameters == sum(value.numel() for value in arch_dsl.compile(MODEL).parameters())
    layer = 2 * 8 * (16 * (16 + 8 + 8 + 4) + 16 * 16 + 3 * 16 * 24)  # projections, gate, output, feed-forward
    square, seen = 4 * 16 * 8 * 8, 4 * 16 * (1 + 2 + 3 + 4 * 5)
    logits = 2 * 8 * 16 * 19
    assert total.flops_matmul == 2 * (layer + square) + logits
    assert total.flops_model == 2 * (layer + seen) + logits


def nodes(device: str, dtype: torch.dtype = torch.float32) -> dict[str, tuple[str, str]]:
    """Op and implementation of every node of the first layer and of the top, by path."""
    choices = arch_dsl.kernel_choices(MODEL, kernels.Device.parse(device), dtype)
    return {choice.path: (choice.op, choice.implementation) for choice in choices if _shown(choice)}


def _shown(choice: arch_dsl.context.NodeChoice) -> bool:
    return "block.1" not in choice.path and choice.op != "projections"


@pytest.mark.parametrize(("device", "fused"), [("cpu", "torch"), ("sm_80", "triton"), ("sm_90", "triton")])
def test_kernels_are_chosen_node_by_node(device, fused):
    summed = "rms_norm" if device == "cpu" else "add_norm"  # with the sum before the norm, in one pass
    gated = "gate" if device == "cpu" else "attention"  # which multiplies its outputs by the sigmoid
    found = nodes(device, torch.bfloat16 if device != "cpu" else torch.float32)
    found.pop("loss", None)
    assert found == {
        "block.0.attention.pre.rmsnorm": ("rms_norm", fused),
        "block.0.attention.query.rope": ("rotary", fused),
        "block.0.attention.key.rope": ("rotary", fused),
        "block.0.attention.sdpa.gate": (gated, fused),
        "block.0.attention.post.rmsnorm": ("rms_norm", fused),
        "block.0.attention": ("attention", fused),
        "block.0.ffn.pre.rmsnorm": (summed, fused),
        "block.0.ffn.post.rmsnorm": ("rms_norm", fused),
        "block.0.ffn": ("glu", fused),
        "final.rmsnorm": (summed, fused),
    }


def test_every_choice_says_why():
    choices = arch_dsl.kernel_choices(MODEL, kernels.Device.parse("sm_90"))
    ops = {"rms_norm", "add_norm", "rotary", "attention", "glu", "linear_cross_entropy", "projections"}
    assert {choice.op for choice in choices} == ops
    assert all(choice.reason for choice in choices)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_backend_forces_every_node(backend):
    choices = arch_dsl.compile(MODEL, backend=backend).choices
    assert {choice.implementation for choice in choices if choice.op != "projections"} == {backend}


@pytest.mark.parametrize(("device", "plan"), [("cpu", "separate"), ("sm_80", "merged")])
def test_products_of_one_tensor_are_planned_for_the_device(device, plan):
    choices = arch_dsl.kernel_choices(MODEL, kernels.Device.parse(device))
    assert {choice.implementation for choice in choices if choice.op == "projections"} == {plan}


def test_building_and_running_a_model_loads_no_service():
    code = """
import sys, torch, arch_dsl
model = arch_dsl.resolve(arch_dsl.load({"d_model": 8, "n_layers": 1, "block": {"norm": "rmsnorm", "mlp": {}}}), vocab=5)
arch_dsl.compile(model).loss(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)).backward()
print(*sorted({"ray", "optuna", "mlflow", "pandas", "dash", "transformers"} & set(sys.modules)))
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=root)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


@pytest.mark.parametrize("site", [{"scores": {"type": "t5_buckets", "share": "stack"}}, {"value": "value_residual"}])
def test_tree_shows_the_first_layer_apart_where_layers_share(site):
    block = {"attention": {"heads": 4, **site}, "ffn": {"type": "glu"}}
    model = arch_dsl.resolve(arch_dsl.load({"d_model": 16, "n_layers": 3, "vocab": 19, "block": block}))
    lines = tree(model, tokens=8)
    assert [(line.name, line.what) for line in lines if line.depth < 3][2:5] == [
        ("block", "3 layers, of which the first shares something with all"),
        ("layers 0", ""),
        ("layers 1-2", ""),
    ]
    parts = [line.cost.flops_matmul for line in lines if line.name.endswith(("projection", "attend"))]
    assert 2 * sum(parts[: len(parts) // 2]) == sum(parts) == lines[3].cost.flops_matmul * 2
