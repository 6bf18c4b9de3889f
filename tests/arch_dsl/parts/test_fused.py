"""Neighbours that a kernel computes in one pass: the same numbers, the same parameters, and only where it does."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl.compiler.modules import LanguageModel
from archlab.arch_dsl.parts import fused
from archlab.arch_dsl.parts.context import Call
from archlab.search.training.parallel import pipeline

ATTENTION = {"heads": 2, "positional": "rope", "qk_norm": "rmsnorm", "gate": "sdpa"}
LLAMA = {
    "d_model": 16,
    "n_layers": 2,
    "max_positions": 8,
    "vocab": 19,
    "block": {"norm": "rmsnorm", "attention": ATTENTION, "ffn": {"type": "glu", "width": 24}},
}
POST = {
    **LLAMA,
    "block": {
        "norm": {"type": "layernorm", "placement": "post"},
        "attention": {"heads": 2, "positional": "learned"},
        "ffn": {"type": "mlp", "width": 24},
    },
}
SANDWICH = {
    **LLAMA,
    "block": {
        "parallel": {
            "pre": [{"type": "rmsnorm", "unit_offset": True}],
            "post": ["rmsnorm"],
            "attention": {"heads": 2, "qk_norm": {"type": "rmsnorm", "weight": False}, "positional": "rope"},
            "ffn": {"type": "glu", "width": 24},
        },
    },
}
RETNET = {
    **LLAMA,
    "block": {
        "attention": {
            "pre": ["layernorm"],
            "heads": 2,
            "query": ["xpos"],
            "key": ["xpos"],
            "sdpa": ["groupnorm", {"type": "gate", "activation": "silu"}],
        },
        "ffn": {"type": "mlp", "width": 24, "pre": ["token_shift", "layernorm"]},
    },
}
MODELS: dict[str, dict[str, Any]] = {"llama": LLAMA, "post": POST, "sandwich": SANDWICH, "retnet": RETNET}


def built(data: dict[str, Any], backend: str) -> LanguageModel:
    return arch_dsl.compile(arch_dsl.resolve(arch_dsl.load(data)), backend=backend)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def curve(model: LanguageModel) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        loss = model.loss(*batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_with_triton_follow_those_with_torch(name: str) -> None:
    torch.testing.assert_close(*(torch.tensor(curve(built(MODELS[name], kind))) for kind in ("triton", "torch")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "post"])
def test_environment_forces_triton_with_the_same_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = built(MODELS[name], "torch").loss(*batch(0))
    monkeypatch.setenv("ARCHLAB_KERNELS", "triton")
    model = built(MODELS[name], "auto")
    assert {"add_norm"} <= {choice.op for choice in model.choices if choice.implementation == "triton"}
    torch.testing.assert_close(model.loss(*batch(0)), want)


def test_what_is_fused_keeps_parameters_and_gradients() -> None:
    data = {**LLAMA, "n_layers": 1}
    plain, joined = built(data, "torch"), built(data, "triton")
    assert dict(joined.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    copied = copy.deepcopy(joined)
    for model in (plain, joined, copied):
        model.loss(*batch(0)).backward()
    for (name, a), b, c in zip(plain.named_parameters(), joined.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=lambda said, name=name: f"{name}: {said}")
        torch.testing.assert_close(c.grad, b.grad, atol=0, rtol=0)


def test_layers_that_are_computed_again_hand_the_norm_on() -> None:
    data = {**LLAMA, "block": {"norm": "rmsnorm", "ffn": {"type": "glu", "width": 24}}}
    once, again = built(data, "triton"), built(data, "triton")
    again.recompute = True  # type: ignore[assignment]
    for model in (once, again):
        model.train().loss(*batch(0)).backward()
    for a, b in zip(once.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_site_whose_sum_stood_elsewhere_norms_itself() -> None:
    data = {**LLAMA, "n_layers": 1, "block": {"norm": "rmsnorm", "ffn": {"type": "glu", "width": 24}}}
    model, stream = built(data, "triton"), torch.randn(1, 3, 16)
    final = model.final.rmsnorm  # type: ignore[union-attr]
    assert torch.equal(model.final(stream, Call(), iter(())), final(stream, Call()))  # type: ignore[operator]


@pytest.mark.parametrize("stage", [0, 1])
def test_the_last_sum_of_a_pipeline_stage_computes_no_norm_that_nobody_reads(stage: int) -> None:
    model = built(LLAMA, "triton")
    meeting = SimpleNamespace(place={"pipeline": stage}, sizes={"pipeline": 2})
    pipeline.cut(model, meeting)  # type: ignore[arg-type]
    call, stream = Call(), torch.randn(1, 3, 16)
    (layer,) = model.block.children()
    attention, ffn = layer.children()
    attention(stream, call)  # type: ignore[operator]
    assert call.across.pop(fused.HANDED).shape == stream.shape, "within the stage the feed-forward branch reads it"
    total = ffn(stream, call)  # type: ignore[operator]
    assert torch.equal(total, stream + ffn.update(stream, Call()))  # type: ignore[operator]
    assert (fused.HANDED in call.across) == (stage == 1), "the last stage has `final`"


def test_branches_that_layers_share_keep_their_sums() -> None:
    shared = {"type": "glu", "width": 24, "pre": ["rmsnorm"], "share": "stack"}
    model = built({**LLAMA, "block": {"ffn": shared}, "final": ["rmsnorm"]}, "triton")
    assert "add_norm" not in {choice.op for choice in model.choices}


def test_on_the_cpu_nothing_is_fused() -> None:
    for data in MODELS.values():
        model = built(data, "auto")
        assert "add_norm" not in {choice.op for choice in model.choices}
        assert not [part for part in model.modules() if type(part).__module__ == "archlab.arch_dsl.parts.fused"]
