"""Which implementations the nodes of a model get: forced when it is built, and warned of where they are slower."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from archlab import arch_dsl, kernels
from archlab.arch_dsl.compiler import slower as slower_kernels
from archlab.search.models.print_model import _by_layers
from archlab.search.training.module import slower
from archlab.search.trial.fingerprint import differences, fingerprint

SINKS = {"attention": {"heads": 2, "scores": "sinks"}, "ffn": {"type": "glu"}}


def model(block: dict[str, Any], **more: Any) -> arch_dsl.Model:
    data = {"d_model": 16, "n_layers": 3, "block": block, **more}
    return arch_dsl.resolve(arch_dsl.load(data), vocab=19, max_positions=16)


def families(choices: list[arch_dsl.context.NodeChoice]) -> set[str]:
    return {choice.implementation for choice in choices if choice.op != "projections"}


def test_the_environment_is_read_when_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model({"ffn": {"type": "glu"}})
    monkeypatch.setenv("ARCHLAB_KERNELS", "reference")
    before = fingerprint()
    built = arch_dsl.compile(spec)
    assert families(built.choices) == families(arch_dsl.kernel_choices(spec, kernels.Device("cpu"))) == {"reference"}
    assert families(arch_dsl.compile(spec, "torch").choices) == {"torch"}, "an argument outweighs the environment"
    monkeypatch.delenv("ARCHLAB_KERNELS")
    assert families(built.choices) == {"reference"}
    assert families(arch_dsl.compile(spec).choices) == {"torch"}
    assert "kernels" not in fingerprint()
    assert differences(before, fingerprint()) == {"kernels": ["reference", ""]}
    monkeypatch.setenv("ARCHLAB_KERNELS", "fast")
    with pytest.raises(ValueError, match="ARCHLAB_KERNELS must be reference, torch or triton; received 'fast'"):
        arch_dsl.compile(spec)


def test_a_fallback_is_said_once_for_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slower_kernels, "_WARNED", set())
    monkeypatch.delenv("ARCHLAB_KERNELS", raising=False)
    spec = model(SINKS)
    with pytest.warns(slower_kernels.SlowerKernel) as told:
        built = arch_dsl.compile(spec, dtype=torch.bfloat16)
    (text,) = [str(one.message) for one in told]
    assert text.startswith("attention at block.0.attention is computed by reference: the formula; ")
    assert slower(built) == {"slower_kernels": "attention by reference"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arch_dsl.compile(spec, dtype=torch.bfloat16)
        assert slower(arch_dsl.compile(spec)) == {}, "in float32 torch computes it"
        arch_dsl.kernel_choices(spec, kernels.Device.parse("sm_90"), torch.float64)  # only asked about


def test_a_model_that_was_compiled_for_the_cpu_and_moved_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slower_kernels, "_WARNED", set())
    built_for = arch_dsl.compile(model({"ffn": {"type": "glu"}})).built_for
    with pytest.warns(slower_kernels.SlowerKernel, match="compiled for the CPU .* device='cuda'"):
        slower_kernels.warn_of_move(built_for, torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slower_kernels.warn_of_move(built_for, torch.device("cuda"))  # once
        slower_kernels.warn_of_move("cuda", torch.device("cuda"))
        arch_dsl.compile(model({"ffn": {"type": "glu"}})).to(torch.float64)


@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_layers_that_ask_for_different_things_are_told_apart(device: str) -> None:
    block = {"norm": "rmsnorm", "attention": {"heads": 4}, "ffn": {"type": "glu"}}
    alibi = {"block.attention.scores": ["alibi"]}
    choices = arch_dsl.kernel_choices(model(block, overrides={"1::2": alibi}), kernels.Device.parse(device))
    rows = {(path, choice.op): choice for path, choice in _by_layers(choices)}
    assert rows["block[1].attention", "attention"].asked == "relative"
    assert rows["block[0,2].attention", "attention"].asked == ""
    assert ("block.ffn", "glu") in rows
    first = ["block.attention"] if device == "cpu" else ["block[0].attention", "block[1-2].attention"]
    norms = [path.removesuffix(".pre.rmsnorm") for path, _ in rows if path.endswith(".pre.rmsnorm")]
    assert sorted(norms) == sorted([*first, "block.ffn"]), "the sums before them are told within the layer"


@pytest.mark.parametrize(
    ("scores", "sdpa", "op"),
    [
        pytest.param(["forget_gate"], ["gate"], "attention", id="elementwise"),
        pytest.param(["forget_gate"], [{"type": "gate", "granularity": "headwise"}], "attention", id="headwise"),
        pytest.param(["forget_gate"], [{"type": "gate", "activation": "silu"}], "gate", id="another_activation"),
        pytest.param(["forget_gate"], [{"type": "gate", "combine": "add"}], "gate", id="added"),
        pytest.param(["forget_gate"], ["gate", {"type": "scale", "by": 2.0}], "gate", id="not_alone"),
        pytest.param(["forget_gate"], ["rmsnorm", "gate"], "norm_gate", id="normed"),
        pytest.param([], ["gate"], "gate", id="attention_by_torch"),
    ],
)
def test_attention_opens_the_gate_that_is_all_of_its_site(scores: list[Any], sdpa: list[Any], op: str) -> None:
    spec = model({"attention": {"heads": 2, "scores": scores, "sdpa": sdpa}, "ffn": {"type": "glu"}})
    choices = arch_dsl.kernel_choices(spec, kernels.Device.parse("sm_90"))
    (gate,) = [
        choice for choice in choices if choice.path == "block.0.attention.sdpa.gate" and choice.op != "projections"
    ]
    assert (gate.op, gate.implementation) == (op, "triton")
    assert ("that of the attention before it" in gate.reason) == (op == "attention")


def test_nodes_that_are_joined_show_what_they_ask_for() -> None:
    attention = {"heads": 2, "positional": "rope", "qk_norm": {"type": "rmsnorm", "weight": False}}
    spec = model({"norm": {"type": "layernorm", "bias": False}, "attention": attention, "ffn": {"type": "glu"}})
    choices = arch_dsl.kernel_choices(spec, kernels.Device.parse("sm_90"))
    asked = {choice.path: (choice.op, choice.asked) for choice in choices}
    assert asked["block.0.attention.query.rmsnorm"] == ("rotary", "norm plain")
    assert asked["block.0.ffn.pre.layernorm"] == ("add_norm", "kind layer")


def test_initial_values_that_are_computed_need_no_memory_for_the_choices():
    gate = {"type": "forget_gate", "input": "fixed", "t_min": 2.0, "t_max": 9.0}
    spec = model({"attention": {"heads": 2, "scores": gate}})
    assert families(arch_dsl.kernel_choices(spec, kernels.Device("cpu"))) == {"torch"}
