"""Ladders: variants over sizes are those that one would write by hand, and what makes no sense is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.cli.data import data_of
from archlab.search.planning.plan import Plan, plan
from archlab.search.sections.ladder.spec import Ends
from archlab.search.study.load import load_study
from tests.search.study_files import write_study

LADDER = """\
ladder:
  sizes: {d_model: [32, 48, 64], n_layers: [1, 2, 2], block.attention.heads: [2, 3, 4]}"""
TRAIN = "train: {data: {text: corpus.txt}, context: 32, batch: 4, lr: 1e-3}"
ZOO = "model: {zoo: llama, size: {parameters: 100k}}"


def made(folder: Path, more: str = "", **sections: str) -> Plan:
    """The plan of a study with a ladder and these lines of it."""
    ladder = f"{LADDER}\n  {more}" if more else LADDER
    return plan(load_study(write_study(folder, **{"train": TRAIN, "ladder": ladder} | sections)), folder / "data")


def keys(planned: Plan) -> list[str]:
    return [variant.trial(0).key for variant in planned.variants]


def test_rungs_are_the_variants_that_one_would_write(tmp_path: Path) -> None:
    planned = made(tmp_path, "tokens: 1 per parameter\n  train: {lr: 4e-3 to 1e-3, batch: 2 to 8}", train=TRAIN.replace(
        "batch: 4, lr: 1e-3", "accumulate: 1"))  # fmt: skip
    assert [v.rung for v in planned.variants[::2]] == ["size=12.6k", "size=55.5k", "size=101k"]
    assert [v.name for v in planned.variants[:2]] == ["baseline [size=12.6k]", "gated [size=12.6k]"]
    assert [v.baseline for v in planned.variants] == [v.name for v in planned.variants[::2] for _ in range(2)]
    by_hand = []
    for rung, sizes in zip(planned.variants[::2], [(32, 1, 2), (48, 2, 3), (64, 2, 4)], strict=True):
        d_model, n_layers, heads = sizes
        tokens, lr, batch = rung.figures["non_embedding"], rung.recipe.lr, rung.recipe.batch
        path = write_study(
            tmp_path,
            "by_hand.yaml",
            model=f"model: {{d_model: {d_model}, n_layers: {n_layers}, block: {{norm: rmsnorm, attention: "
            f"{{heads: {heads}, positional: rope}}, ffn: {{type: glu, activation: silu}}}}}}",
            train=TRAIN.replace("batch: 4, lr: 1e-3", f"tokens: {tokens}, batch: {batch}, lr: {lr}"),
        )
        by_hand += keys(plan(load_study(path), tmp_path / "data"))
    assert keys(planned) == by_hand


def test_rates_and_batches_are_interpolated_along_the_parameters(tmp_path: Path) -> None:
    bare = TRAIN.replace("batch: 4, lr: 1e-3", "tokens: 1k")
    rungs = made(tmp_path, "train: {lr: 4e-3 to 1e-3, batch: 2 to 8}", train=bare).variants[::2]
    sizes = [rung.figures["non_embedding"] for rung in rungs]
    share = math.log(sizes[1] / sizes[0]) / math.log(sizes[2] / sizes[0])
    assert [rung.recipe.lr for rung in rungs] == [4e-3, pytest.approx(4e-3 * 0.25**share, rel=5e-3), 1e-3]
    assert [rung.recipe.batch for rung in rungs] == [2, round(2 * 4**share), 8]
    assert Ends(8, 2).at(0.5) == 4
    assert Ends(1e-3, 1e-3).at(0.3) == 1e-3


def test_sizes_may_say_the_tokens_and_the_rate_of_every_rung(tmp_path: Path) -> None:
    sizes = "ladder: {sizes: {d_model: [32, 64], train.tokens: [1k, 4k], train.lr: [4e-3, 1e-3]}}"
    planned = made(tmp_path, ladder=sizes, train=TRAIN.replace(", lr: 1e-3", ""))
    assert [(v.recipe.tokens, v.recipe.lr) for v in planned.variants[::2]] == [(1000, 4e-3), (4000, 1e-3)]
    with pytest.raises(SpecError, match=r"train\.lr: is missing"):
        made(tmp_path, ladder=sizes.replace(", train.lr: [4e-3, 1e-3]", ""), train=TRAIN.replace(", lr: 1e-3", ""))


@pytest.mark.parametrize("count", ["non_embedding", "all"])
def test_tokens_follow_the_parameters_that_count(tmp_path: Path, count: str) -> None:
    for variant in made(tmp_path, f"count: {count}\n  tokens: 2.5 per parameter").variants:
        base = next(
            v for v in made(tmp_path, "tokens: 1k").variants if v.recipe.tokens == 1000 and v.model == variant.model
        )
        size = base.parameters if count == "all" else base.figures["non_embedding"]
        if variant.base == "baseline":
            assert variant.recipe.tokens == round(2.5 * size)


def test_lengths_are_crossed_with_sizes_and_equal_flops_are_equal(tmp_path: Path) -> None:
    planned = made(tmp_path, "tokens: [1e8 FLOPs, 3e8 FLOPs]")
    assert len(planned.variants) == 12
    assert planned.variants[2].name == "baseline [size=12.6k, C=3e+08]"
    for variant in planned.variants:
        base = next(v for v in planned.variants if v.rung == variant.rung and v.base == "baseline")
        flops = base.figures["training_flops_per_token"]
        assert variant.recipe.tokens * flops == pytest.approx(3e8 if "3e" in variant.rung else 1e8, abs=flops)
        assert variant.batches == base.batches, "all variants of a rung see the same tokens"


def test_a_variant_changes_the_base_of_its_rung(tmp_path: Path) -> None:
    planned = made(
        tmp_path,
        train=TRAIN.replace("lr:", "tokens: 1k, lr:"),
        components="components: {gate: {block.attention: {type: gla, heads: 2}}}",
        match="match: {parameters: baseline, by: block.ffn.width}",
    )
    assert [v.model.d_model for v in planned.variants] == [32, 32, 48, 48, 64, 64]
    assert all(abs(v.mismatch) < 0.02 for v in planned.variants)
    assert {str(change).split(":")[0] for v in planned.variants[1::2] for change in v.changes} >= {
        "block.attention.type"
    }
    assert not any(v.changes for v in planned.variants[::2]), "a rung is no change of the variant"


def test_the_zoo_says_how_width_and_depth_follow(tmp_path: Path) -> None:
    sizes = "ladder: {sizes: {parameters: [100k, 250k]}}"
    train = TRAIN.replace("lr:", "tokens: 1k, lr:")
    own = "components: {gate: {block.attention.gate: {position: sdpa}}}"
    rungs = made(tmp_path, model=ZOO, ladder=sizes, train=train, components=own, match=
                 "match: {parameters: baseline, by: block.ffn.width}").variants[::2]  # fmt: skip
    for rung, size in zip(rungs, ("100k", "250k"), strict=True):
        model = ZOO.replace("100k", size)
        path = write_study(tmp_path, "one.yaml", model=model, train=train, components=own)
        assert rung.model == plan(load_study(path), tmp_path / "data").variants[0].model


def test_sizes_of_an_inline_model_keep_its_shape(tmp_path: Path) -> None:
    train = TRAIN.replace("lr:", "tokens: 1k, lr:")
    model = """\
model:
  d_model: 64
  n_layers: 2
  block: {norm: rmsnorm, attention: {heads: 4, positional: rope}, ffn: {type: glu}}"""
    small, large = made(
        tmp_path, model=model, ladder="ladder: {sizes: {parameters: [100k, 350k]}}", train=train
    ).variants[::2]
    assert (small.model.d_model, small.model.n_layers) == (64, 2)
    assert large.model.d_model / large.model.n_layers == pytest.approx(32, rel=0.35)
    assert large.figures["non_embedding"] == pytest.approx(350e3, rel=0.25)


def test_sizes_that_share_a_number_are_named_by_what_they_set(tmp_path: Path) -> None:
    sizes = "ladder: {sizes: {block.attention.heads: [2, 4]}}"
    names = [v.name for v in made(tmp_path, ladder=sizes, train=TRAIN.replace("lr:", "tokens: 1k, lr:")).variants]
    assert names == ["baseline [heads=2]", "gated [heads=2]", "baseline [heads=4]", "gated [heads=4]"]


TWO = "{d_model: [32, 64]}"
WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("{d_model: [32, 64], n_layers: [1]}", "lists must be of one length, .*d_model 2, n_layers 1", {}),
    ("{}", r"ladder\.sizes: is empty", {}),
    ("{d_model: 64}", r"sizes\.d_model: must be a list with a value for every rung, found an integer", {}),
    (f"{TWO}, tokens: 20 per layer", "must be tokens .2M., '20 per parameter'.*found '20 per layer'", {}),
    (f"{TWO}, tokens: [1M, 1M]", "holds 1M twice", {}),
    (f"{TWO}, train: {{lr: [1, 2]}}", r"ladder\.train\.lr: must be '4e-3 to 1e-3'", {}),
    (f"{TWO}, train: {{rate: 1 to 2}}", r"train\.rate: matches nothing", {}),
    (f"{TWO}, tokens: 1M", r"train\.tokens: `ladder` says the tokens of every rung", {}),
    (TWO, r"grid\.d_model: is what `ladder` sets", {"grid": "grid: {d_model: [32, 64]}"}),
    (TWO, r"variants\.a\.d_model: is what `ladder` sets", {"variants": "variants: {baseline: {}, a: {d_model: 32}}"}),
    ("{d_model: [32, 60], block.attention.heads: [2, 8]}", "8 heads do not divide d_model 60", {}),
    ("{d_modle: [32, 60]}", "did you mean 'd_model'", {}),
    ("{block.norm: [rmsnorm, rmsnorm]}, train: {optimizer.eps: 1e-8 to 1e-9}", "has nothing to interpolate along", {}),
    (
        TWO,
        "a search proposes its own sizes",
        {"search": "search: {trials: 4}", "space": "space: {n_layers: {int: [1, 2]}}"},
    ),
    ("{parameters: [100, 200k]}", "no size of this shape has about 100", {}),
]


@pytest.mark.parametrize(("ladder", "said", "others"), WRONG, ids=[ladder for ladder, *_ in WRONG])
def test_what_makes_no_sense_is_refused(tmp_path: Path, ladder: str, said: str, others: Any) -> None:
    sections = {"train": TRAIN.replace("lr:", "tokens: 1k, lr:"), "ladder": f"ladder: {{sizes: {ladder}}}", **others}
    with pytest.raises(SpecError, match=said):
        plan(load_study(write_study(tmp_path, **sections)), tmp_path / "data")


def test_data_are_read_as_often_as_the_first_rung_does(tmp_path: Path) -> None:
    """The recipe of a ladder has no tokens before its sizes are counted."""
    train = "train: {data: {text: corpus.txt}, context: 32, batch: 4, lr: 1e-3}"
    ladder = "ladder: {sizes: {d_model: [32, 64], block.attention.heads: [2, 4]}, tokens: 1 per parameter}"
    study = load_study(write_study(tmp_path, train=train, ladder=ladder))
    ((_, recipe),) = data_of(study, tmp_path / "data").values()
    assert recipe.tokens == plan(study, tmp_path / "data").variants[0].recipe.tokens < 1e6
