"""Rules: every combination that makes no sense across parts is refused with its reason, and repaired where one is."""

from __future__ import annotations

from typing import Any

import pytest

from archlab import arch_dsl
from archlab.arch_dsl.model import repair, rules

LAYER = {"attention": {"heads": 4, "pre": "rmsnorm"}, "ffn": {"type": "glu", "pre": "rmsnorm"}}
SHARED = {"type": "rmsnorm", "share": "stack"}
DUAL = {"attention": {"heads": 4, "join": "residual_dual"}, "ffn": {"type": "glu", "join": "residual_dual"}}


def model(block: dict[str, Any] | None = None, **fields: Any) -> arch_dsl.Model:
    return arch_dsl.load({"d_model": 32, "n_layers": 3, "max_positions": 16, "block": block or LAYER} | fields)


def attention(**fields: Any) -> dict[str, Any]:
    return {**LAYER, "attention": {**LAYER["attention"], **fields}}


def overridden(path: str, value: Any, layers: str = "1") -> dict[str, Any]:
    return {layers: {path: value}}


# name: (block, fields of the model, message, what the repair leads to)
BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], str, arch_dsl.Model | None]] = {
    "residual_dual without its end": (
        DUAL,
        {"final": "rmsnorm"},
        "final: needs `dual`: the joins residual_dual carry a second stream, which nothing else would read",
        model(DUAL, final=["dual", "rmsnorm"]),
    ),
    "dual without its joins": (
        LAYER,
        {"final": ["dual", "rmsnorm"]},
        "block.attention.join: must be residual_dual, as `dual` at final ends a second stream that every branch adds "
        "to; found add\nblock.ffn.join: must be residual_dual, as `dual` at final ends a second stream that every "
        "branch adds to; found add",
        model(LAYER, final="rmsnorm"),
    ),
    "one branch without the second stream": (
        {**DUAL, "ffn": {"type": "glu"}},
        {"final": "dual"},
        "block.ffn.join: must be residual_dual, as `dual` at final ends a second stream that every branch adds to; "
        "found add",
        None,
    ),
    "two ends": (
        DUAL,
        {"final": ["dual", "dual"]},
        "final: holds `dual` twice: there is one second stream to add",
        model(DUAL, final="dual"),
    ),
    "a cap after a bias": (
        attention(scores=["alibi", {"type": "softcap", "cap": 30.0}]),
        {},
        "block.attention.scores.1: softcap must stand before alibi: a cap, then biases, then sinks",
        model(attention(scores=[{"type": "softcap", "cap": 30.0}, "alibi"])),
    ),
    "a bias twice": (
        attention(scores=["alibi", "alibi"]),
        {},
        "block.attention.scores.1: alibi stands twice; one of each is enough",
        None,
    ),
    "a bias after sinks": (
        attention(scores=["sinks", "alibi"]),
        {},
        "block.attention.scores.1: alibi must stand before sinks: a cap, then biases, then sinks",
        model(attention(scores=["alibi", "sinks"])),
    ),
    "values of one layer alone": (
        LAYER,
        {"overrides": overridden("block.attention.value", ["value_residual"])},
        "block (layer 1).attention.value: value_residual needs a second layer that has it: the first one's values go "
        "to the later ones",
        None,
    ),
    "values of other heads": (
        attention(value="value_residual"),
        {"overrides": overridden("block.attention.kv_heads", 2, "-1")},
        "block (layer 2).attention.kv_heads: value_residual needs the same heads in all layers: 2 value heads of 8 "
        "here, 4 value heads of 8 in block.attention",
        None,
    ),
    "rotated queries alone": (
        attention(query="rope"),
        {},
        "block.attention.query: rope must stand on query and key alike: only the difference of two rotations counts",
        None,
    ),
    "rotations of different speed": (
        attention(query="rope", key=[{"type": "rope", "theta": 5e5}]),
        {},
        "block.attention.key: rope must stand on query and key alike: only the difference of two rotations counts",
        None,
    ),
    "two tables of positions": (
        LAYER,
        {"embed": ["learned", "rmsnorm", "learned"]},
        "embed: holds two tables of learned positions, whose sum is one table",
        model(LAYER, embed=["learned", "rmsnorm"]),
    ),
    "a shared norm with two faces": (
        {"attention": {"heads": 4, "pre": [{"type": "rmsnorm", "share": "stack"}]}},
        {"overrides": overridden("block.attention.pre", [{"type": "rmsnorm", "share": "stack", "eps": 1e-3}])},
        "block (layer 1).attention.pre.rmsnorm: is shared with block.attention, which has other fields; what is shared "
        "is the same everywhere",
        None,
    ),
    "a shared branch with two faces": (
        {"attention": {"heads": 4}, "ffn": {"type": "glu", "share": "stack"}},
        {"overrides": overridden("block.ffn.width", 24, "-1")},
        "block (layer 2).ffn: is shared with block.ffn, which has other fields; what is shared is the same everywhere",
        None,
    ),
    "two shared norms in one site": (
        {"attention": {"heads": 4, "pre": [{"type": "rmsnorm", "share": "stack"}] * 2}},
        {},
        "block.attention.pre: two shared rmsnorm in one site would be one; share one of them",
        None,
    ),
    "a shared norm of a join with two faces": (
        {"attention": {"heads": 4, "join": {"type": "add_norm", "norm": SHARED}}},
        {"overrides": overridden("block.attention.join", {"type": "deepnorm", "norm": {**SHARED, "eps": 1e-3}})},
        "block (layer 1).attention.join.rmsnorm: is shared with block.attention, which has other fields; what is "
        "shared is the same everywhere",
        None,
    ),
    "a shared norm of other heads": (
        {"attention": {"heads": 4, "query": SHARED}},
        {"overrides": overridden("block.attention.heads", 2)},
        "block (layer 1).attention.query.rmsnorm: is shared with block.attention, whose heads is 4, and here it is 2",
        None,
    ),
    "a shared norm of another width": (
        {"group": {"type": "parallel", "attention": {"heads": 4}, "mlp": {"inner": SHARED}}},
        {"overrides": overridden("block.group.mlp.width", 24)},
        "block (layer 1).group.mlp.inner.rmsnorm: is shared with block.group.mlp, whose width is 128, and here it is "
        "24",
        None,
    ),
    "a shared shift of other documents": (
        {"attention": {"heads": 4, "key": [{"type": "shift", "share": "stack"}]}},
        {"overrides": overridden("block.attention.mask", {"type": "causal", "documents": True})},
        "block (layer 1).attention.key.shift: is shared with block.attention, whose mask.documents is False, and here "
        "it is True",
        None,
    ),
    "a branch shared with no layer": (
        {"attention": {"heads": 4}, "ffn": {"type": "glu", "share": "stack"}},
        {"overrides": overridden("block.ffn.share", "none", "1:")},
        "block.ffn.share: needs a second layer to share it with",
        None,
    ),
    "the only layer shared": (
        {"attention": {"heads": 4, "sdpa": SHARED}},
        {"n_layers": 1},
        "block.attention.sdpa.rmsnorm.share: needs a second layer to share it with",
        None,
    ),
    "what differs by layer in a shared branch": (
        {"attention": {"heads": 4, "share": "stack", "pre": ["depth_scale"], "value": ["value_residual"]}},
        {},
        "block.attention.pre.0: depth_scale differs from layer to layer, and block.attention is shared by them\n"
        "block.attention.value.0: value_residual differs from layer to layer, and block.attention is shared by them",
        None,
    ),
    "what differs by layer in a shared group": (
        {"group": {"type": "parallel", "share": "stack", "attention": {"heads": 4}, "mlp": {"pre": ["depth_scale"]}}},
        {},
        "block.group.mlp.pre.0: depth_scale differs from layer to layer, and block.group is shared by them",
        None,
    ),
    "a shared norm in a shared branch": (
        {"attention": {"heads": 4, "share": "stack", "pre": SHARED}},
        {},
        "block.attention.pre.0.share: block.attention is shared, and all its parts with it",
        None,
    ),
}


def refusals(spec: arch_dsl.Model) -> str:
    return "\n".join(str(problem) for problem in rules.problems(spec, spec.place(spec.context(), "")))


@pytest.mark.parametrize(("block", "fields", "message", "after"), BROKEN.values(), ids=BROKEN)
def test_rule_says_what_must_hold_and_repairs_what_leaves_no_doubt(
    block: dict[str, Any], fields: dict[str, Any], message: str, after: arch_dsl.Model | None
) -> None:
    broken = model(block, **fields)
    assert refusals(broken) == message
    with pytest.raises(arch_dsl.SpecError) as refused:
        arch_dsl.resolve(broken, vocab=64)
    assert str(refused.value) == message
    mended, names = repair.repaired(broken)
    if after is None:
        assert refusals(mended)
    else:
        assert (mended, len(names)) == (after, 1)
        assert arch_dsl.identity(arch_dsl.resolve(mended, vocab=64)) == arch_dsl.identity(
            arch_dsl.resolve(after, vocab=64)
        )


WHOLE = {
    "dual": model(DUAL, final=["dual", "rmsnorm"]),
    "cap, bias, sinks": model(attention(scores=[{"type": "softcap", "cap": 30.0}, "alibi", "sinks"])),
    "values in some layers": model(overrides=overridden("block.attention.value", ["value_residual"], "1:")),
    "xpos": model(attention(query="xpos", key="xpos")),
    "rotations in some layers": model(
        attention(query="rope", key="rope"), overrides={"1": {"block.attention.positional": "none"}}
    ),
    "a shared norm": model({"attention": {"heads": 4, "pre": [{"type": "rmsnorm", "share": "stack"}]}}),
}


@pytest.mark.parametrize("spec", WHOLE.values(), ids=WHOLE)
def test_rules_leave_alone_what_makes_sense(spec: arch_dsl.Model) -> None:
    assert refusals(spec) == ""
    assert repair.repaired(spec) == (spec, [])


def test_repair_reaches_the_layers_that_differ() -> None:
    wrong = [{"type": "alibi"}, {"type": "softcap", "cap": 30.0}]
    broken = model(overrides=overridden("block.attention.scores", wrong, "1:"))
    mended, names = repair.repaired(broken)
    assert names == ["order of scores"] and not refusals(mended)
    kinds = [[item.type for item in block["attention"].scores] for block in mended.layers()]  # type: ignore[attr-defined]
    assert kinds == [[], ["softcap", "alibi"], ["softcap", "alibi"]]


def test_every_rule_has_a_name_and_says_what_holds() -> None:
    assert len({rule.name for rule in rules.RULES}) == len(rules.RULES)
    assert all(rule.holds for rule in rules.RULES)
