"""Slots: whatever two models are, the slots lead from one to the other, and each varies alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from archlab import arch_dsl
from archlab.arch_dsl.inspection.slots import settings, slots
from archlab.arch_dsl.patching.patch import apply

GPT = {
    "d_model": 64,
    "n_layers": 4,
    "block": {
        "norm": "layernorm",
        "attention": {"heads": 4, "positional": "learned", "bias": True},
        "ffn": {"type": "mlp", "bias": True},
    },
}
LLAMA = {
    "d_model": 64,
    "n_layers": 4,
    "block": {"norm": "rmsnorm", "attention": {"heads": 4, "kv_heads": 2, "positional": "rope"}, "ffn": "swiglu"},
    "unembedding": {"tied": False},
}


def changed(base: dict[str, Any], **paths: Any) -> dict[str, Any]:
    """The canonical form of a base with these paths changed; `__` stands for a dot."""
    made = arch_dsl.patch(arch_dsl.load(base), {path.replace("__", "."): value for path, value in paths.items()})
    return arch_dsl.canonical(made)  # type: ignore[no-any-return]


MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "llama": LLAMA,
    "llama with derived sizes spelt": changed(LLAMA, block__ffn__width=176, block__attention__head_dim=16),
    "post": changed(GPT, block__norm__placement="post"),
    "small": changed(LLAMA, d_model=48, block__attention__heads=6, block__attention__kv_heads=3),
    "gated": changed(LLAMA, block__attention__gate="sdpa", block__attention__qk_norm="rmsnorm", block__ffn__width=100),
    "windows": changed(LLAMA, overrides={"1::2": {"block.attention.mask": {"type": "window", "size": 8}}}),
    "parallel": {
        "d_model": 64,
        "n_layers": 2,
        "block": {
            "parallel": {"pre": ["layernorm"], "attention": {"heads": 4, "positional": "rope"}, "ffn": {"type": "mlp"}}
        },
    },
    "palm": {
        "d_model": 64,
        "n_layers": 2,
        "block": {
            "parallel": {
                "pre": ["rmsnorm"],
                "attention": {"heads": 4, "kv_heads": 1, "positional": "rope"},
                "ffn": {"type": "glu"},
            }
        },
    },
    "attention only": {"d_model": 64, "n_layers": 3, "block": {"attention": {"heads": 4, "pre": "rmsnorm"}}},
    "bloom": changed(GPT, block__attention__positional="alibi", embed="layernorm", final="layernorm"),
    "three branches": {**LLAMA, "block": {**LLAMA["block"], "ffn_2": {"type": "mlp"}}},
    "turned": {**LLAMA, "block": {name: LLAMA["block"][name] for name in ("norm", "ffn", "attention")}},
}
PAIRS = list(itertools.permutations(MODELS, 2))
OFTEN = (*PAIRS[::4], ("llama", "turned"), ("post", "three branches"), ("palm", "parallel"))


def meaning(model: arch_dsl.Model) -> str:
    return arch_dsl.identity(arch_dsl.resolve(model, vocab=256, max_positions=64))


@pytest.mark.parametrize(
    ("one", "other"),
    [pytest.param(*pair, id="-".join(pair), marks=[] if pair in OFTEN else [pytest.mark.slow]) for pair in PAIRS],
)
def test_all_slots_lead_to_the_other_model_and_each_varies_alone(one: str, other: str) -> None:
    before, after = arch_dsl.load(MODELS[one]), arch_dsl.load(MODELS[other])
    found = slots(before, after)
    assert len({slot.name for slot in found}) == len(found)
    assert meaning(apply(before, settings(found))) == meaning(after)
    alone = [meaning(apply(before, settings([slot]))) for slot in found]
    rest = [meaning(apply(before, settings([s for s in found if s is not slot]))) for slot in found]
    different = {meaning(before), meaning(after), *alone, *rest}
    assert len(different) == (2 * len(found) + 2 if len(found) > 2 else 2 ** len(found))


def test_random_changes_are_found_again() -> None:
    """A model with some knobs and fields changed differs in exactly these."""
    pool: dict[str, tuple[str, Any]] = {
        "norm": ("block.norm.type", "layernorm"),
        "norm_placement": ("block.norm.placement", "sandwich"),
        "gate": ("block.attention.gate", {"position": "value"}),
        "qk_norm": ("block.attention.qk_norm", "l2"),
        "positional": ("block.attention.positional", "alibi"),
        "kv_heads": ("block.attention.kv_heads", 1),
        "mask": ("block.attention.mask", {"type": "window", "size": 4}),
        "width": ("block.ffn.width", 96),
        "activation": ("block.ffn.activation", "gelu"),
        "n_layers": ("n_layers", 2),
        "tied": ("unembedding.tied", True),
        "inner_rmsnorm": ("block.ffn.inner", ["rmsnorm"]),
    }
    draw = random.Random(0)
    before = arch_dsl.load(LLAMA)
    for _ in range(30):
        chosen = draw.sample(sorted(pool), draw.randint(1, 6))
        after = arch_dsl.patch(before, dict(pool[name] for name in chosen))
        assert {slot.name for slot in slots(before, after)} == set(chosen)


def test_slots_have_the_names_that_researchers_use() -> None:
    names = [slot.name for slot in slots(arch_dsl.load(GPT), arch_dsl.load(LLAMA))]
    assert names == ["ffn", "norm", "positional", "kv_heads", "bias", "tied"]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"d_model": 48, "block.attention.heads": 6}, None),
        ({"d_model": 60, "block.attention.heads": 3}, ("d_model", "heads")),
        ({"block.attention.heads": 3, "block.attention.head_dim": 16}, ("heads", "head_dim")),
    ],
    ids=["alone", "model and heads", "heads and their size"],
)
def test_what_cannot_vary_alone_is_one_slot_with_what_it_needs(change: dict[str, Any], parts: Any) -> None:
    before = arch_dsl.load({**GPT, "block": {**GPT["block"], "attention": {"heads": 8}}, "d_model": 64})
    found = slots(before, arch_dsl.patch(before, change))
    merged = [slot.parts for slot in found if slot.parts]
    assert merged == ([parts] if parts else [("d_model", "heads")] if len(found) == 1 else [])
    assert all(slot.name == "_and_".join(slot.parts) for slot in found if slot.parts)


def test_a_width_that_the_type_implies_is_one_slot_with_the_type() -> None:
    """By itself it would change nothing at one end: a row of the table would stand there twice."""
    gpt, llama = arch_dsl.load(GPT), arch_dsl.load(MODELS["llama with derived sizes spelt"])
    for before, after in ((gpt, llama), (llama, gpt)):
        assert [slot.parts for slot in slots(before, after) if slot.parts] == [("ffn", "width")]


def test_equal_models_have_no_slots_however_they_are_written() -> None:
    assert slots(arch_dsl.load(LLAMA), arch_dsl.load(changed(LLAMA))) == []
    spelt = arch_dsl.patch(arch_dsl.load(LLAMA), {"block.ffn.width": 176, "block.attention.head_dim": 16})
    assert slots(arch_dsl.load(LLAMA), spelt) == []


def test_the_field_that_is_solved_is_no_slot() -> None:
    before, after = arch_dsl.load(LLAMA), arch_dsl.load(MODELS["gated"])
    assert "width" in [slot.name for slot in slots(before, after)]
    assert [slot.name for slot in slots(before, after, solved="block.ffn.width")] == ["gate", "qk_norm"]
