"""Plans: which variants and trials a study means, under which keys, and what is asked for next."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import read_text
from archlab.arch_dsl.language.spec import fields_of
from archlab.cli.main import main
from archlab.search.models.graphs import model_of
from archlab.search.planning.estimate import refuse_too_little
from archlab.search.planning.page import print_plan
from archlab.search.planning.plan import Plan, plan
from archlab.search.recipe.optimizers import Lion
from archlab.search.recipe.recipe import Recipe
from archlab.search.running.run import run
from archlab.search.study.asked import asked_variants
from archlab.search.study.load import load_study, parse_study
from archlab.search.variants.memory import memory_bytes
from tests.search.study_files import SECTIONS, write_study

TUNE = "tune: {lr: [1e-3, 2e-3, 4e-3]}"


def planned(folder: Path, **sections: str | None) -> Plan:
    return plan(load_study(write_study(folder, **sections)), folder / "data")


def keys(made: Plan) -> list[str]:
    return [variant.trial(0).key for variant in made.variants]


def ended(made: Plan, losses: dict[tuple[str, str, float, int], float | str]) -> list[dict[str, Any]]:
    """The rows that the plan wants first, some of them ended: with a validation loss, or in another state."""
    trials = []
    for row in made.rows([]):
        end = losses.get((row.variant, row.role, row.settings["lr"], row.seed), "planned")
        complete = isinstance(end, float)
        result = {"validation": {"loss": end}, "test": {"loss": -end}} if complete else None
        state = "complete" if complete else end
        shown = {"variant": row.variant, "role": row.role, "settings": row.settings, "seed": row.seed}
        trials.append({**shown, "key": row.trial.key, "state": state, "result": result, "reused": False})
    return trials


# variants


def test_variants_stand_in_the_studys_order_with_the_baseline_of_their_cell(tmp_path: Path) -> None:
    made = planned(
        tmp_path,
        variants="variants:\n  gated: [gate]\n  baseline: {}",
        grid="grid:\n  block.norm.placement: [pre, sandwich]",
        match="match: {parameters: baseline, by: block.ffn.width}",
    )
    assert [(v.name, v.baseline) for v in made.variants] == [
        ("gated [placement=pre]", "baseline [placement=pre]"),
        ("baseline [placement=pre]", "baseline [placement=pre]"),
        ("gated [placement=sandwich]", "baseline [placement=sandwich]"),
        ("baseline [placement=sandwich]", "baseline [placement=sandwich]"),
    ]
    sizes = {v.name: v.parameters for v in made.variants}
    assert sizes["baseline [placement=pre]"] != sizes["baseline [placement=sandwich]"], "each cell has its own target"
    assert all(abs(v.mismatch) < 0.01 for v in made.variants)
    record = made.record()
    assert [v["baseline"] for v in record["variants"]] == [v.baseline for v in made.variants]
    assert record["baseline"] == "baseline [placement=pre]"


def test_kernels_forced_by_a_name_of_none_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHLAB_KERNELS", "trition")
    with pytest.raises(SpecError, match="ARCHLAB_KERNELS must be reference, torch or triton; received 'trition'"):
        planned(tmp_path)


def test_changes_are_those_to_the_base(tmp_path: Path) -> None:
    made = planned(tmp_path, variants="variants:\n  baseline: {}\n  a: [gate, {train.batch: 2, block.ffn.width: 99}]")
    assert [str(change) for change in made.variants[0].changes] == []
    assert [change.path for change in made.variants[1].changes] == [
        "block.attention.sdpa",
        "block.ffn.width",
        "train.batch",
    ]
    assert made.variants[1].components == {"gate": True}
    frame = made.frame()
    assert list(frame["variant"]) == ["baseline", "a"]
    assert frame["parameters"].tolist() == [v.parameters for v in made.variants]


@pytest.mark.parametrize(
    ("axis", "paired"),
    [
        ("train.context: [16, 32]", False),
        ("train.batch: [2, 4]", False),
        ("train.tokens: [1k, 2k]", False),
        ("train.tokenizer: [bytes, {type: bpe, vocab: 300}]", False),
        ('train.data: [{text: corpus.txt}, {text: {files: corpus.txt, separator: "\\n\\n"}}]', False),
        ("train.lr: [1e-3, 2e-3]", True),
        ("train.accumulate: [1, 2]", True),
        ("train.schedule: [cosine, {type: linear, warmup: 0.1}]", True),
        ("block.norm.placement: [pre, post]", True),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else None,
)
def test_pairing_needs_equal_batches(axis: str, paired: bool, tmp_path: Path) -> None:
    made = planned(tmp_path, grid=f"grid:\n  {axis}", components=None, variants="variants:\n  baseline: {}")
    assert len(made.variants) == 2
    assert made.record()["paired"] == paired


# identity

SAME = {
    "other names": {"variants": "variants:\n  base: {}\n  other: [gate]", "report": "report: {baseline: base}"},
    "another study": {"study": "study: another", "question": None, "seeds": "seeds: 5"},
    "mappings in another order": {
        "model": """\
model:
  block:
    attention: {positional: rope, heads: 4}
    ffn: {activation: silu, type: glu}
    norm: rmsnorm
  n_layers: 1
  d_model: 64""",
        "train": "train: {lr: 1e-3, batch: 4, context: 32, tokens: 1k, data: {text: corpus.txt}}",
    },
    "sites for knobs": {
        "model": """\
model:
  d_model: 64
  n_layers: 1
  block:
    attention: {pre: [rmsnorm], heads: 4, query: [rope], key: [rope]}
    ffn: {type: glu, pre: rmsnorm, activation: silu}
  final: rmsnorm""",
        "components": "components:\n  gate: {block.attention.sdpa: {append: gate}}",
    },
    "defaults written out": {
        "train": """\
train:
  data: {type: text, files: [corpus.txt]}
  tokenizer: {type: bytes}
  tokens: 1000
  context: 32
  batch: 4
  optimizer: {type: adamw, weight_decay: 0.1}
  lr: 0.001
  schedule: cosine""",
    },
    "other resources and another time between checkpoints": {"resources": "resources: {cpus: 2, checkpoint: 5m}"},
    "a copy of the text elsewhere": {
        "train": "train: {data: {text: ./corpus.*}, tokens: 1k, context: 32, batch: 4, lr: 1e-3}",
    },
}


@pytest.mark.parametrize("sections", SAME.values(), ids=SAME.keys())
def test_another_spelling_keeps_the_keys(sections: dict[str, str | None], tmp_path: Path) -> None:
    assert keys(planned(tmp_path, **sections)) == keys(planned(tmp_path))


def test_reordering_variants_only_reorders_the_keys(tmp_path: Path) -> None:
    turned = planned(tmp_path, variants="variants:\n  gated: [gate]\n  baseline: {}")
    assert keys(turned) == keys(planned(tmp_path))[::-1]


OTHER = {
    "tokenizer": "{type: bpe, vocab: 300}",
    "tokens": "2k",
    "context": "16",
    "batch": "2",
    "batch_tokens": "96",
    "recompute": "layers",
    "stages": "[{tokens: 1k, lr: 1e-4}]",
    "ramp": "{start: 1, step: 1, tokens: 100}",
    "accumulate": "2",
    "optimizer": "{type: adamw, eps: 1e-6}",
    "lr": "2e-3",
    "schedule": "linear",
    "clip": "null",
    "precision": "bf16",
    "compile": "blocks",
    "objective": "prefix",
    "z_loss": "1e-4",
    "init_seed": "0",
    "data_seed": "0",
    "data": '{text: {files: corpus.txt, separator: "\\n\\n"}}',
}


def test_every_field_of_a_recipe_changes_the_key(tmp_path: Path) -> None:
    fields = set(fields_of(Recipe)) - {"init"}  # which needs a file (test_start.py)
    assert set(OTHER) == fields
    lines = SECTIONS["train"].splitlines()
    found = {"": keys(planned(tmp_path))}
    for name, value in OTHER.items():
        own = (f"  {name}:", "  batch:") if name == "batch_tokens" else f"  {name}:"
        kept = [line for line in lines if not line.startswith(own)]
        found[name] = keys(planned(tmp_path, train="\n".join([*kept, f"  {name}: {value}"])))
    every = [key for each in found.values() for key in each]
    assert len(set(every)) == len(every) == 2 * (len(fields) + 1)


def test_a_variant_may_give_the_batch_in_tokens_or_in_sequences(tmp_path: Path) -> None:
    made = planned(tmp_path, variants="variants:\n  baseline: {}\n  tokens: {train.batch_tokens: 96}")
    assert [variant.recipe.sequences for variant in made.variants] == [4, 3]
    train = SECTIONS["train"].replace("batch: 4", "batch_tokens: 96")
    made = planned(tmp_path, train=train, variants="variants:\n  baseline: {}\n  rows: {train.batch: 2}")
    assert [variant.recipe.sequences for variant in made.variants] == [3, 2]


def test_seeds_and_rates_change_the_key(tmp_path: Path) -> None:
    variant = planned(tmp_path).variants[0]
    found = {variant.trial(seed, lr).key for seed in (0, 1) for lr in (None, 2e-3)}
    assert len(found) == 4
    assert variant.trial(0, 1e-3).key == variant.trial(0).key, "the recipe's own rate is no other trial"


# rows


def test_the_cell_with_the_longest_trials_comes_first_and_in_it_the_baseline(tmp_path: Path) -> None:
    made = planned(tmp_path, seeds="seeds: 1", grid="grid: {block.ffn.width: [64, 256]}")
    assert [row.variant for row in made.rows([])] == [
        "baseline [width=256]", "gated [width=256]", "baseline [width=64]", "gated [width=64]",
    ]  # fmt: skip


def test_without_tuning_all_seeds_are_repeats(tmp_path: Path) -> None:
    rows = planned(tmp_path).rows([])
    assert [(row.variant, row.role, row.settings, row.seed) for row in rows] == [
        (variant, "repeat", {"lr": 1e-3}, seed) for variant in ("baseline", "gated") for seed in (0, 1)
    ]
    assert planned(tmp_path).trials == len({row.trial.key for row in rows}) == 4


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((3.0, 2.0, 2.5), 2e-3),
        ((2.0, 2.0, 2.5), 1e-3),
        ((3.0, 2.0, 2.0), 2e-3),
        ((3.0, 2.5, "diverged"), 2e-3),
        (("failed", "diverged", 9.0), 4e-3),
        ((3.0, "pruned", 2.0), 4e-3),
        ((3.0, float("nan"), 3.1), 1e-3),
        (("diverged", "diverged", "diverged"), None),
        ((3.0, 2.0, "planned"), None),
        ((3.0, 2.0, "running"), None),
    ],
    ids=str,
)
def test_repeats_run_at_the_rate_with_the_lowest_validation_loss(
    losses: tuple[float | str, ...], best: float | None, tmp_path: Path
) -> None:
    made = planned(tmp_path, tune=TUNE)
    ends = {("gated", "tune", lr, 0): loss for lr, loss in zip((1e-3, 2e-3, 4e-3), losses, strict=True)}
    rows = made.rows(ended(made, ends))
    tuning, repeats = rows[:6], rows[6:]
    assert [(row.variant, row.role, row.settings["lr"], row.seed) for row in tuning] == [
        (variant, "tune", lr, 0) for variant in ("baseline", "gated") for lr in (1e-3, 2e-3, 4e-3)
    ]
    expected = [] if best is None else [("gated", "repeat", best, 0), ("gated", "repeat", best, 1)]
    assert [(row.variant, row.role, row.settings["lr"], row.seed) for row in repeats] == expected
    if best is not None:
        assert (
            repeats[0].trial.key
            == next(r for r in tuning if r.settings["lr"] == best and r.variant == "gated").trial.key
        )


def test_rows_are_the_same_when_asked_again(tmp_path: Path) -> None:
    made = planned(tmp_path, tune=TUNE, grid="grid:\n  block.norm.placement: [pre, post]")
    names = [variant.name for variant in made.variants]
    ends = {(name, "tune", lr, 0): 1 / lr for name in names for lr in (1e-3, 2e-3, 4e-3)}
    trials = ended(made, ends)
    once = made.rows(trials)
    assert made.rows(trials) == once == made.rows(trials[::-1])
    assert planned(tmp_path, tune=TUNE, grid="grid:\n  block.norm.placement: [pre, post]").rows(trials) == once
    assert len({row.trial.key for row in once}) == made.trials == 4 * (3 + 1)


def test_record_says_what_was_planned(tmp_path: Path) -> None:
    record = planned(tmp_path, tune=TUNE).record()
    assert (record["study"], record["question"], record["baseline"]) == ("gates", "Does a gate help?", "baseline")
    assert (record["seeds"], record["tune"]) == ([0, 1], {"lr": [1e-3, 2e-3, 4e-3]})
    assert (record["context"], record["tokens"], record["steps"]) == (32, 1000, 8)
    assert record["variants"][1]["changes"] == [["block.attention.sdpa", "[]", "[gate]"]]
    assert record["data"]["tokenizer"] == "bytes" and record["data"]["train_tokens"] > 1000


def test_nothing_is_planned_for_a_study_with_mistakes_in_several_variants(tmp_path: Path) -> None:
    lines = "\n".join(f"  v{i}: {{block.ffn.width: {i + 1}, block.attention.heads: 3}}" for i in range(9))
    with pytest.raises(SpecError) as caught:
        planned(tmp_path, variants=f"variants:\n  baseline: {{}}\n{lines}")
    assert len(caught.value.problems) == 9, "each was written at its own place"


def test_hundreds_of_variants_have_as_many_keys(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "plan.py"
    spec = importlib.util.spec_from_file_location("bench_plan", path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    made = benchmark.ours(benchmark.write(tmp_path, 300))
    assert len(set(keys(made))) == len(benchmark.floor(tmp_path / "study.yaml")) == 300
    assert all(abs(variant.mismatch) < 2e-3 for variant in made.variants)


def test_experts_are_matched_in_the_parameters_that_a_token_meets(tmp_path: Path, capsys: Any) -> None:
    moe = "{block.ffn: {type: moe, experts: 8, top_k: 2}}"
    variants = f"variants:\n  baseline: {{}}\n  experts: {moe}\n  wide: [gate]"
    for kind in ("active_parameters", "parameters"):
        made = planned(tmp_path, variants=variants, match=f"match: {{{kind}: baseline, by: block.ffn.width}}")
        dense, experts, wide = made.variants
        sizes = [variant.parameters if kind == "parameters" else variant.figures[kind] for variant in made.variants]
        assert all(abs(size / sizes[0] - 1) < 0.01 for size in sizes)
        assert [variant.mismatch for variant in made.variants] == [size / sizes[0] - 1 for size in sizes]
        assert experts.matched["block.ffn.width"] == (87 if kind == "active_parameters" else 22)
        assert wide.figures["active_parameters"] == wide.parameters
        assert dense.figures["active_parameters"] == dense.parameters
    print_plan(made, tmp_path / "store")
    told = capsys.readouterr().out
    assert " active " in told and f"{experts.figures['active_parameters']:,}" in told
    assert list(made.frame()["active_parameters"]) == [v.figures["active_parameters"] for v in made.variants]


def test_size_that_matching_would_overwrite_is_refused(tmp_path: Path) -> None:
    study = parse_study(
        read_text(
            """\
study: sizes
model: {d_model: 16, n_layers: 1, block: {norm: rmsnorm, attention: {heads: 2}, ffn: {type: glu}}}
variants:
  baseline: {}
  wide: {block.ffn.width: 200, block.attention.gate: sdpa}
match: {parameters: baseline, by: block.ffn.width}
train: {data: {type: stdlib, bytes: 300k}, tokens: 1k, context: 8, batch: 2, lr: 1e-3}
""",
            "sizes.yaml",
        )
    )
    with pytest.raises(SpecError, match=r"sizes.yaml:5:10: block.ffn.width: `match` solves .* 200 .* would be ignored"):
        plan(study, tmp_path)


def test_axes_that_end_alike_are_told_apart_in_names(tmp_path: Path) -> None:
    study = parse_study(
        read_text(
            """\
study: alike
model: {d_model: 16, n_layers: 1, block: {norm: rmsnorm, attention: {heads: 2}, ffn: {type: glu}}}
variants: {baseline: {}}
grid: {block.attention.bias: [true], block.ffn.bias: [false], block.norm.placement: [pre]}
train: {data: {type: stdlib, bytes: 300k}, tokens: 1k, context: 8, batch: 2, lr: 1e-3}
"""
        )
    )
    (asked,) = asked_variants(study)
    assert asked.name == "baseline [attention.bias=true, ffn.bias=false, placement=pre]"


def test_the_memory_of_a_trial_counts_weights_gradients_moments_and_activations(tmp_path: Path) -> None:
    variant = planned(tmp_path).variants[0]
    recipe = variant.recipe
    activations = variant.figures["activation_bytes"] * recipe.micro_batch
    assert memory_bytes(variant) == 16 * variant.parameters + activations
    lion = replace(variant, recipe=recipe.replace(optimizer=Lion()))
    assert memory_bytes(lion) == 12 * variant.parameters + activations
    halved = replace(variant, recipe=recipe.replace(accumulate=2))
    assert memory_bytes(halved) == 16 * variant.parameters + activations // 2
    deep = replace(variant, model=variant.model.replace(n_layers=8), recipe=recipe.replace(recompute="layers"))
    kept = (variant.figures["activation_bytes"] // 8 + 4 * 8 * 32 * variant.model.d_model) * recipe.micro_batch
    assert memory_bytes(deep) == 16 * variant.parameters + kept


def test_memory_that_is_surely_too_little_is_refused_with_its_place(tmp_path):
    study = write_study(tmp_path, resources="resources: {memory: 200MB, gpus: 0}")
    refused = CliRunner().invoke(main, ["plan", str(study), "--store", str(tmp_path / "store")])
    assert refused.exit_code == 2
    assert "study.yaml:" in refused.output and "resources.memory: gated takes 0.3 GB at least" in refused.output
    with pytest.raises(SpecError, match=r"resources\.memory"):
        run(study, tmp_path / "store")
    for asked in ("{memory: 400MB, gpus: 0}", "{memory: 200MB, gpus: 1}"):
        refuse_too_little(plan(load_study(write_study(tmp_path, resources=f"resources: {asked}")), tmp_path / "data"))


def test_a_record_says_how_each_model_starts_and_one_that_does_not_began_at_0_02(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path))
    record = plan(study, tmp_path / "data").record()
    assert [variant["spec"]["init"] for variant in record["variants"]] == [{"std": "small"}] * 2
    first = record["variants"][0]
    assert model_of(first) == plan(study, tmp_path / "data").variants[0].model
    before = {**first, "spec": {key: value for key, value in first["spec"].items() if key != "init"}}
    assert model_of(before).init.std == 0.02


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, "of 512 tokens (4 steps of 4 x 32)"),
        ({"grid": "grid: {train.tokens: [512, 999.9k]}"}, "of 512 to 1M tokens"),
        ({"grid": "grid: {train.batch: [2, 4]}"}, "of 512 tokens"),
        ({"recipes": "recipes: {as is: {}, small: {batch: 2}}"}, "of 512 tokens (4 steps of 4 x 32)"),
        ({"recipes": "recipes: {as is: {}, long: {tokens: 1k}}"}, "of 512 to 1k tokens (4 steps of 4 x 32)"),
    ],
    ids=["alike", "tokens", "batches", "recipes", "longer recipe"],
)
def test_a_plan_tells_the_tokens_of_all_its_trials(tmp_path: Path, capsys: Any, sections: Any, told: str) -> None:
    train = "train: {data: {text: corpus.txt}, tokens: 512, context: 32, batch: 4, lr: 1e-3}"
    print_plan(plan(load_study(write_study(tmp_path, train=train, **sections)), tmp_path / "data"), tmp_path / "store")
    (line,) = (each for each in capsys.readouterr().out.splitlines() if " trials of " in each)
    assert line.endswith(told)
