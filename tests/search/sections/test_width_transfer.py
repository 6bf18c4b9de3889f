"""Width transfer: table 8 of arXiv:2203.03466 by a model's shapes, and the coordinate check that holds it to that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl.compiler.width_transfer import transferred
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.model.model import Model, resolve
from archlab.arch_dsl.patching.patch import patch
from archlab.search.planning.plan import plan
from archlab.search.recipe.optimizers import AdamW, Optimizer
from archlab.search.sections.ladder.width_transfer import Coordinates, _power, coordinates, with_rates
from archlab.search.study.load import load_study
from archlab.search.variants.variant import Variant
from tests.search.study_files import write_study

WIDTHS = (32, 64, 128)


def model(width: int, heads: int = 2, **more: Any) -> Model:
    """Two layers, with heads that grow by their size."""
    spec = {
        "d_model": width,
        "n_layers": 2,
        "block": {"norm": "rmsnorm", "attention": {"heads": heads, "positional": "rope"}, "ffn": {"type": "glu"}},
        **more,
    }
    return resolve(arch_dsl.load(spec), vocab=97, max_positions=64)


def ladder(parts: tuple[str, ...]) -> list[tuple[Model, Optimizer]]:
    """The models of three widths with these parts of the rules, the others left standard."""
    found: list[tuple[Model, Optimizer]] = []
    for width in WIDTHS:
        plain = model(width, init={"std": 0.02})
        made = transferred(plain, model(WIDTHS[0], init={"std": 0.02}))
        changed = made.model if "init" in parts else made.model.replace(init=plain.init)
        changed = changed if "logits" in parts else changed.replace(logits=())
        changed = changed if "attention" in parts else patch(changed, {"block.attention.scale": None})
        found.append((changed, with_rates(AdamW(), made) if "rates" in parts else AdamW()))
    return found


PARTS = ("init", "rates", "attention", "logits")


def test_the_check_passes_for_mup_and_fails_for_the_standard_parametrisation() -> None:
    right, wrong = coordinates(ladder(PARTS)), coordinates(ladder(()))
    assert right.widths == WIDTHS and len(right.powers) > 15
    assert not right.growing, right.powers
    assert max(wrong.powers.values()) > 1


def test_seeds_that_scatter_over_near_widths_are_no_growth() -> None:
    scattered = Coordinates({"a": 2.1, "b": 0.9}, {"a": -0.7, "b": 0.5}, (64, 72, 80))
    assert scattered.growing == {"b": 0.9}
    assert _power((64, 72, 80), [[1.0, 2.0], [1.5, 1.4], [2.2, 1.3]])[0] < 0
    assert _power((64, 128), [[1.0, 1.1], [2.0, 2.2]]) == pytest.approx((1.0, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["init", "rates", "logits"])
def test_the_check_fails_without_a_rule(left_out: str) -> None:
    """Attention's scale, which it does not see in so few steps, is held by the shapes in `test_table_8`."""
    assert coordinates(ladder(tuple(part for part in PARTS if part != left_out))).growing


def test_table_8() -> None:
    """A base of 32 and a model four times as wide; the gate of each head is a map to what does not grow."""
    gate = {"position": "sdpa", "granularity": "headwise"}
    block = {"norm": "rmsnorm", "attention": {"heads": 2, "gate": gate}, "ffn": "swiglu"}
    base, wide = (model(width, block=block, init={"std": 0.02}) for width in (32, 128))
    made = transferred(wide, base)
    rates = dict(made.rates)
    assert rates["block.*.attention.query_projection.weight"] == 1 / 4
    assert rates["block.*.attention.sdpa.gate.projection.weight"] == 1 / 4
    assert not any("norm" in path or path == "embedding" for path in rates)
    before, after = (dict(arch_dsl.compile(each, seed=3).named_parameters()) for each in (wide, made.model))
    for path, value in before.items():
        factor = {"query": 1 / 2, "gate.projection": 1 / 4 if "sdpa" in path else 1 / 2}
        expected = next((f for part, f in factor.items() if part in path), None)
        if expected is not None:
            assert torch.allclose(after[path], value * expected), path
    assert torch.equal(after["embedding"], before["embedding"])
    assert made.model.logits[0].by == 1 / 4  # type: ignore[attr-defined]
    assert made.model.block["attention"].scale == 16**-0.5 * 16 / 64  # type: ignore[attr-defined]


def latent(width: int) -> Model:
    """Two layers of latent attention, all of whose sizes grow, and experts."""
    attention = {"type": "mla", "heads": 2, "kv_latent": width // 4, "query_latent": width // 2, "scale": 0.3}
    attention |= {"rotary_dim": width // 8, "query_inner": ["rmsnorm"]}
    ffn = {"type": "moe", "experts": 4, "width": width, "routing": "sigmoid", "balance": "bias"}
    block = {"norm": "rmsnorm", "attention": attention, "ffn": ffn}
    return model(width, block=block, init={"std": 0.02})


@pytest.mark.slow
def test_the_check_passes_for_latents_and_experts() -> None:
    made = [transferred(latent(width), latent(WIDTHS[0])) for width in WIDTHS]
    assert not coordinates([(each.model, with_rates(AdamW(), each)) for each in made]).growing


def test_latents_and_experts_transfer() -> None:
    made = transferred(latent(WIDTHS[-1]), latent(WIDTHS[0]))
    rates = dict(made.rates)
    for name in ("attention.kv_latent_projection", "attention.value_projection", "ffn.experts.output_projection"):
        assert rates[f"block.*.{name}.weight"] == 1 / 4
    assert made.model.block["attention"].scale == pytest.approx(0.3 / 4)  # type: ignore[attr-defined]


def test_the_base_is_as_it_was_and_heads_of_one_size_keep_their_scale() -> None:
    assert transferred(model(64), model(64)).model == model(64)
    assert not transferred(model(64), model(64)).rates
    wide = transferred(model(128, heads=8), model(32)).model
    assert wide.block["attention"].scale is None  # type: ignore[attr-defined]


def test_decay_is_as_strong_as_at_the_base() -> None:
    made = transferred(model(128), model(32))
    optimizer = with_rates(AdamW(weight_decay=0.1), made)
    assert {group.lr_factor * (group.weight_decay or 0) for group in optimizer.groups} == {0.1}  # type: ignore[attr-defined]


def test_a_decay_that_is_independent_of_the_rate_stays() -> None:
    optimizer = with_rates(AdamW(independent_decay=True), transferred(model(128), model(32)))
    assert {group.weight_decay for group in optimizer.groups} == {None}  # type: ignore[attr-defined]


def test_initial_values_that_follow_the_width_are_those_of_the_base() -> None:
    small, wide = (model(width, init={"std": "small"}) for width in (32, 128))
    assert transferred(wide, small).model.init.std == (2 / (5 * 32)) ** 0.5
    with pytest.raises(SpecError, match="wang follows the width by a rule of its own"):
        transferred(*(model(width, init={"residual": "wang"}) for width in (128, 32)))


def test_a_group_of_initial_values_that_names_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match=r"init\.groups\.0\.parameters: '\*\.querry\.\*' matches no parameter"):
        arch_dsl.compile(model(32, init={"groups": [{"parameters": ["*.querry.*"], "factor": 0.5}]}))


STUDY = """\
ladder:
  sizes: {d_model: [32, 48, 64], block.attention.heads: [2, 3, 4]}
  transfer: mup"""
TRAIN = "train: {data: {text: corpus.txt}, context: 32, batch: 4, tokens: 1k, lr: 1e-2}"


def test_a_ladder_transfers_and_its_first_rung_is_as_without(tmp_path: Path) -> None:
    found = plan(load_study(write_study(tmp_path, train=TRAIN, ladder=STUDY)), tmp_path / "data")
    plain = STUDY.replace("transfer: mup", "transfer: none")
    without = plan(load_study(write_study(tmp_path, train=TRAIN, ladder=plain)), tmp_path / "data")
    same = [a.trial(0).key == b.trial(0).key for a, b in zip(found.variants, without.variants, strict=True)]
    assert same == [True, True, False, False, False, False]
    rates = [dict(_rates(variant)) for variant in found.variants[::2]]
    assert [each.get("block.*.attention.query_projection.weight") for each in rates] == [None, 32 / 48, 32 / 64]
    assert {*found.coordinates} == {"baseline", "gated"} and len([*(tmp_path / "coordinates").iterdir()]) == 2


def _rates(variant: Variant) -> Iterator[tuple[str, float]]:
    for group in variant.recipe.optimizer.groups:  # type: ignore[attr-defined]
        yield from ((pattern, group.lr_factor) for pattern in group.parameters)


HOT = "variants: {baseline: {}, hot: {block.ffn.post: [{type: scale, width_power: 1.0}]}}"
SHORT = STUDY.replace(", 64]", "]").replace(", 4]", "]")
TUNED = "tune: {block.norm.placement: [pre, sandwich]}"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "what grows": (
        {"variants": HOT, "components": None},
        "'hot' fails the coordinate check: .* 32, 48, 64 grow .*update ffn",
    ),
    "two widths": ({"ladder": SHORT}, "is checked at three widths up to 1,024, found 2"),
    "an optimizer": (
        {"train": TRAIN.replace("lr:", "optimizer: muon, lr:")},
        "rates of adamw and adam follow .* muon's",
    ),
    "tuned fields": ({"tune": TUNED}, "with it `tune` chooses learning rates alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_transfer_is_refused_before_anything_is_trained(tmp_path: Path, name: str) -> None:
    sections, said = REFUSED[name]
    with pytest.raises(SpecError, match=said):
        plan(load_study(write_study(tmp_path, **{"train": TRAIN, "ladder": STUDY} | sections)), tmp_path / "data")
