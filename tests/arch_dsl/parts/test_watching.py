"""Sites tell who watches what passes through them, by place and layer, and nobody else."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import Call
from archlab.arch_dsl.conformance.hosts import LENGTH, SOURCE, TOKENS, VOCAB
from archlab.arch_dsl.parts.watching import KINDS, Sight, Watch, watching
from archlab.kernels import launch

ATTENTION: dict[str, Any] = {
    "heads": 4, "kv_heads": 2, "pre": ["rmsnorm"], "sdpa": ["gate"], "scores": ["forget_gate"],
}  # fmt: skip
GATE = "attention.sdpa.gate"


def built(block: dict[str, Any], **fields: Any) -> Any:
    spec = {"d_model": 16, "n_layers": 2, "vocab": VOCAB, "max_positions": LENGTH, "block": block, **fields}
    return arch_dsl.compile(arch_dsl.load(spec), seed=0)


def watched(model: Any, *kinds: str, call: Call | None = None) -> list[Sight]:
    seen: list[Sight] = []
    watch = Watch(frozenset(kinds or KINDS), seen.append)
    with watching(), torch.no_grad():
        model(TOKENS, dataclasses.replace(call or Call(), watch=watch))
    return seen


def test_every_kind_is_told_of_every_layer() -> None:
    seen = watched(built({"attention": ATTENTION, "ffn": {"type": "mlp", "width": 24, "pre": ["rmsnorm"]}}))
    places = Counter((sight.kind, sight.path) for sight in seen)
    assert places == dict.fromkeys(
        [
            *(("stream", ""), ("update", "attention"), ("update", "ffn"), ("site", "attention.pre")),
            *(("site", "attention.sdpa"), ("site", "ffn.pre"), ("attention", "attention"), ("heads", "attention")),
            *(("gate", GATE), ("decay", "attention.scores.forget_gate")),
        ],
        2,
    )
    assert {(sight.stack, sight.layer) for sight in seen} == {("", 0), ("", 1)}
    stream = [sight.tensors["output"] for sight in seen if sight.kind == "stream"]
    assert [each.shape for each in stream] == [(2, LENGTH, 16)] * 2
    assert not torch.equal(*stream)


def test_only_what_is_wanted_is_told() -> None:
    model = built({"attention": ATTENTION})
    assert {sight.kind for sight in watched(model, "gate", "heads")} == {"gate", "heads"}


def test_watching_changes_no_number() -> None:
    seen: list[Sight] = []
    model = built({"attention": ATTENTION, "ffn": {"type": "mlp", "width": 24}})
    plain = model(TOKENS)
    assert torch.equal(model(TOKENS, Call(watch=Watch(frozenset(KINDS), seen.append))), plain)
    assert seen


def test_layers_that_share_a_branch_are_told_apart() -> None:
    model = built({"attention": {**ATTENTION, "share": "stack"}, "ffn": {"type": "mlp", "width": 24}})
    assert model.block[0].attention is model.block[1].attention
    gates = watched(model, "gate", "update")
    assert [(sight.layer, sight.path) for sight in gates if sight.kind == "gate"] == [(0, GATE), (1, GATE)]
    assert Counter(sight.path for sight in gates) == {GATE: 2, "attention": 2, "ffn": 2}


def test_members_of_a_group_are_told_by_their_names() -> None:
    block = {"parallel": {"pre": ["rmsnorm"], "attention": {"heads": 4}, "ffn": {"type": "mlp", "width": 24}}}
    seen = watched(built(block), "update")
    assert [sight.path for sight in seen] == ["parallel.attention", "parallel.ffn", "parallel"] * 2
    parts = [sight.tensors["output"] for sight in seen[:3]]
    assert torch.equal(parts[0] + parts[1], parts[2])


def test_an_encoder_and_a_decoder_are_told_apart() -> None:
    encoder = {"n_layers": 1, "block": {"attention": {"heads": 4, "mask": "full"}}}
    decoder = {"n_layers": 2, "block": {"attention": {"heads": 4}, "cross_attention": {"heads": 4}}}
    spec = {"d_model": 16, "vocab": VOCAB, "max_positions": LENGTH, "encoder": encoder, "decoder": decoder}
    seen = watched(arch_dsl.compile(arch_dsl.load(spec)), "attention", call=Call(source_tokens=SOURCE))
    told = [(sight.stack, sight.layer, sight.path) for sight in seen]
    both = [("decoder", layer, path) for layer in (0, 1) for path in ("attention", "cross_attention")]
    assert told == [("encoder", 0, "attention"), *both]


def test_what_is_computed_to_be_told_is_not_computed_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sight] = []
    model = built({"attention": ATTENTION})

    def loud(*_: Any) -> Any:
        raise AssertionError("somebody looks")

    monkeypatch.setattr("archlab.arch_dsl.primitives.gates.activation_of", loud)
    monkeypatch.setattr("archlab.arch_dsl.primitives.heads.MultiHeadModule.tell", loud)
    assert torch.isfinite(model(TOKENS)).all()
    with pytest.raises(AssertionError, match="somebody looks"):
        model(TOKENS, Call(watch=Watch(frozenset(KINDS), seen.append)))


@pytest.mark.slow
@pytest.mark.skipif(launch.missing() is not None, reason="Triton is not installed")
def test_fused_neighbours_tell_what_they_do_one_by_one() -> None:
    attention = {"pre": ["rmsnorm"], "heads": 2, "query": ["rmsnorm", "rope"], "key": ["rmsnorm", "rope"]}
    block = {
        "attention": {**attention, "sdpa": ["groupnorm", {"type": "gate", "activation": "silu"}]},
        "attention_2": {**attention, "sdpa": ["gate"]},
        "ffn": {"type": "mlp", "width": 24, "pre": ["rmsnorm"]},
    }
    spec = {"d_model": 16, "n_layers": 1, "vocab": VOCAB, "max_positions": LENGTH, "block": block}
    plain, fast = (arch_dsl.compile(arch_dsl.load(spec), backend=backend) for backend in ("torch", "triton"))
    assert {choice.op for choice in fast.choices} >= {"norm_gate", "add_norm"}
    for expected, found in zip(watched(plain), watched(fast), strict=True):
        assert (found.kind, found.layer, found.path) == (expected.kind, expected.layer, expected.path)
        for name, tensor in expected.tensors.items():
            if isinstance(tensor, torch.Tensor):
                torch.testing.assert_close(
                    found.tensors[name], tensor, rtol=1e-4, atol=1e-5, msg=f"{found.path} {name}"
                )
