"""`recipes:`: all variants under all recipes, each row at its best one, and verdicts that say how far they go."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from archlab.search.comparison.compare import compare, load_comparison, with_reference
from archlab.search.planning.edits import _changed
from archlab.search.planning.plan import plan
from archlab.search.reporting.findings import findings
from archlab.search.reporting.report import report, to_plain
from archlab.search.running.run import run
from archlab.search.sections.recipes.told import holds
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from tests.search.compare_kit import end_as, make_study, pick
from tests.search.study_files import write_study

RECIPES = "recipes:\n  as is: {}\n  long: {schedule.warmup: 0.2, model.init.std: 0.02}\n  small: {batch: 2}\n"

Verdicts = dict[str, str]


def asked(effects: dict[str, dict[str, float]], **kwargs: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A finished study under recipes: the effect of each row by recipe, the first row the baseline."""
    cells = {f"{row} [recipe={recipe}]": (row, recipe) for row, by in effects.items() for recipe in by}
    flat = {name: effects[row][recipe] for name, (row, recipe) in cells.items()}
    record, trials = make_study(flat, rates=(), **kwargs)
    base = next(iter(effects))
    for variant in record["variants"]:
        row, recipe = cells[variant["name"]]
        variant |= {"baseline": f"{base} [recipe={recipe}]", "axes": {"recipe": recipe}, "row": row, "components": {}}
        variant["batches"] = "other" if recipe == "small" else "equal"
    record["recipes"] = {"named": {}, "rows": {name: list(cell) for name, cell in cells.items()}}
    return record, trials


def test_every_variant_stands_under_every_recipe_with_a_baseline_of_its_own(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, recipes=RECIPES))
    found = {each.name: each for each in plan(study, tmp_path / "data").variants}
    assert [*found] == [f"{row} [recipe={of}]" for of in ("as is", "long", "small") for row in ("baseline", "gated")]
    assert all(name.partition(" ")[2] == each.baseline.partition(" ")[2] for name, each in found.items())
    long, small = found["gated [recipe=long]"], found["gated [recipe=small]"]
    assert long.recipe.schedule.warmup == 0.2 and long.model.init.std == 0.02
    assert small.recipe.batch == 2 and small.recipe.schedule == study.train.schedule


def test_a_recipe_that_changes_nothing_shares_the_trials_of_the_study_without_recipes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    alone = plan(load_study(write_study(tmp_path)), data).variants
    crossed = plan(load_study(write_study(tmp_path, recipes=RECIPES)), data).variants
    assert [each.trial(0).key for each in alone] == [each.trial(0).key for each in crossed[:2]]


def test_recipes_cross_the_grid(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, recipes=RECIPES, grid="grid: {block.attention.heads: [2, 4]}"))
    planned = plan(study, tmp_path / "data")
    assert len(planned.variants) == 3 * 2 * 2
    assert planned.record()["recipes"]["rows"]["gated [recipe=long, heads=4]"] == ["gated [heads=4]", "long"]


def test_rungs_of_a_ladder_are_rows_of_their_own(tmp_path: Path) -> None:
    ladder = "ladder: {sizes: {d_model: [32, 64]}}"
    record = plan(load_study(write_study(tmp_path, recipes=RECIPES, ladder=ladder)), tmp_path / "data").record()
    rows = {row for row, _ in record["recipes"]["rows"].values()}
    assert len(rows) == 4 and len(record["variants"]) == 12
    assert {row.partition(" [size=")[0] for row in rows} == {"baseline", "gated"}


def test_a_changed_recipe_is_told_as_an_edit(tmp_path: Path) -> None:
    data = tmp_path / "data"
    records = [
        plan(load_study(write_study(tmp_path, recipes=text)), data).record()
        for text in (RECIPES, RECIPES.replace("batch: 2", "batch: 1").replace("long", "longer"))
    ]
    told = "\n".join(_changed(*records))
    for line in ("'small' has changed", "'long' is gone", "'longer' is new"):
        assert line in told


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        ({"a": "better", "b": "better", "c": "better"}, "better under 3 of 3 recipes"),
        ({"a": "worse", "b": "within noise", "c": "worse"}, "worse under 2 of 3 recipes"),
        ({"a": "better", "b": "within noise"}, "better under one recipe only (a)"),
        ({"a": "better", "b": "worse", "c": "better"}, "reversed: better under a and c, worse under b"),
        ({"a": "within noise", "b": "within noise"}, "within noise under 2 of 2 recipes"),
        ({"a": "equivalent", "b": "undecided"}, "decided under no recipe"),
        ({"a": "better", "b": "incomplete"}, "better under 1 of 2 recipes; incomplete under b"),
        ({"a": "better", "b": "better", "c": "diverged"}, "better under 2 of 3 recipes; diverged under c"),
        ({"a": "baseline", "b": "baseline"}, ""),
    ],
)
def test_a_verdict_says_how_far_it_goes(verdicts: Verdicts, told: str) -> None:
    assert holds(verdicts) == told


@pytest.mark.parametrize(
    ("verdicts", "mean", "told"),
    [
        ({"a": "better", "b": "within noise"}, "better", "better under 1 of 2 recipes, and on average"),
        ({"a": "within noise", "b": "within noise"}, "worse", "worse on average, under none of 2 recipes alone"),
        ({"a": "better", "b": "within noise"}, "depends on the recipe", "better under one recipe only (a)"),
        ({"a": "better", "b": "within noise"}, "within noise", "better under one recipe only (a)"),
        ({"a": "better", "b": "better"}, "better", "better under 2 of 2 recipes"),
        ({"a": "better", "b": "worse"}, "better", "reversed: better under a, worse under b"),
    ],
)
def test_a_mean_over_recipes_says_more_where_single_ones_do_not_suffice(
    verdicts: Verdicts, mean: str, told: str
) -> None:
    assert holds(verdicts, mean) == told


def test_the_mean_over_recipes_is_that_of_paired_differences_with_narrower_intervals() -> None:
    record, trials = asked(
        {
            "baseline": {"a": 0.1, "small": 0.0},
            "good": {"a": 0.072, "small": -0.028},
            "level": {"a": 0.102, "small": 0.001},
            "rough": {"a": -0.1, "small": 0.0},
        },
        seeds=4,
        seed_sd=0.012,
    )
    found = compare(record, trials)
    mean, table = found.mean_of_recipes.set_index("row"), found.table.set_index("variant")
    for row in ("good", "level", "rough"):
        single = [table.loc[f"{row} [recipe={recipe}]"] for recipe in ("a", "small")]
        assert mean.loc[row, "delta"] == pytest.approx(sum(each["delta"] for each in single) / 2)
        assert mean.loc[row, "high"] - mean.loc[row, "low"] < min(e["delta_high"] - e["delta_low"] for e in single)
    assert mean["verdict"].to_dict() == {
        "baseline": "baseline",
        "good": "better",
        "level": "within noise",
        "rough": "depends on the recipe",
    }
    assert {*mean["n"]} == {4}
    text = report(found)
    assert "Mean over 2 recipes" in text and "Δ small" in text
    assert ("better", "good is better than baseline on average over recipes: −0.024 nats [−0.044, −0.003]") in findings(
        found
    )


def test_a_row_that_is_lost_under_one_recipe_has_no_mean() -> None:
    effects = {"baseline": {"a": 0.2, "b": 0.0}, "lost": {"a": 0.1, "b": 0.1}, "late": {"a": 0.1, "b": 0.1}}
    record, trials = asked(effects)
    end_as([*pick(trials, "lost [recipe=b]")][:1], "diverged", "loss is not finite")
    found = compare(record, [trial for trial in trials if trial["variant"] != "late [recipe=b]"])
    mean = found.mean_of_recipes.set_index("row")
    assert mean.loc[["lost", "late"], "verdict"].tolist() == ["diverged", "incomplete"]
    assert mean["delta"].isna().all() and "Mean over" not in report(found)


def test_a_mean_is_never_that_of_the_seeds_that_survived() -> None:
    effects = {"base": {"x": 0.2, "y": 0.0}, "a": {"x": 0.1, "y": -0.1}}
    record, trials = asked(effects, seeds=6)
    for recipe, seed in (("x", 0), ("y", 1)):
        lost = [trial for trial in pick(trials, f"a [recipe={recipe}]") if trial["seed"] == seed]
        end_as(lost, "diverged", "loss is not finite")
    found = compare(record, trials)
    row = found.mean_of_recipes.set_index("row").loc["a"]
    assert (row["verdict"], row["n"]) == ("diverged", 0) and not [
        told for told in findings(found) if "average" in told[1]
    ]


def test_a_mean_without_the_losses_of_documents_says_so() -> None:
    record, trials = asked({"base": {"x": 0.2, "y": 0.0}, "a": {"x": 0.1, "y": -0.1}})
    pick(trials, "a [recipe=x]")[1]["documents"] = None
    told = [note for note in compare(record, trials).notes if "of the mean unknown" in note]
    assert told == ["a: document variance of the mean unknown, its interval holds seed noise only"]


def test_means_of_rows_without_bits_per_byte_are_told_in_bits_per_byte_of_the_others() -> None:
    record, trials = asked({each: {"x": 0.1 * (each == "base"), "y": 0.0} for each in ("base", "a", "bpe", "masked")})
    for trial in trials:
        trial["result"] = deepcopy(trial["result"])
        test = trial["result"]["test"]
        test["bits_per_byte"] = (
            None if "masked" in trial["variant"] else test["bits_per_byte"] / (1 + ("bpe" in trial["variant"]))
        )
    mean = compare(record, trials).mean_of_recipes.set_index("row")
    assert (
        mean.loc["masked", "verdict"]
        == compare(record, trials).table.set_index("variant").loc["masked [recipe=x]", "verdict"]
    )


def test_recipes_that_change_the_test_have_no_mean() -> None:
    record, trials = asked({"baseline": {"a": 0.2, "b": 0.0}, "gated": {"a": 0.1, "b": 0.3}})
    for variant in record["variants"]:
        variant["test"] = f"the text of {variant['axes']['recipe']}"
    found = compare(record, trials)
    assert found.mean_of_recipes.empty and "Mean over" not in report(found)


def test_a_row_with_another_objective_than_its_baseline_has_no_difference_on_average_either() -> None:
    record, trials = asked({"baseline": {"a": 0.2, "b": 0.0}, "gated": {"a": 0.1, "b": -0.1}})
    for variant in record["variants"]:
        variant["objective"] = {"type": "fill"} if variant["row"] == "gated" else None
    found = compare(record, trials)
    row = found.mean_of_recipes.set_index("row").loc["gated"]
    assert (row["verdict"], row["n"]) == ("other objective", 0) and row["delta"] != row["delta"]
    assert "on average" not in found.best_recipes.set_index("row").loc["gated", "holds"]


def test_means_are_in_the_unit_of_the_table() -> None:
    """A row with another tokenizer has no mean, for it diverged under a recipe; the others stay in bits per byte."""
    record, trials = asked({each: {"a": 0.1 * (each == "base"), "b": 0.0} for each in ("base", "gated", "bpe")})
    for trial in pick(trials, "bpe [recipe=a]") + pick(trials, "bpe [recipe=b]"):
        trial["result"] = deepcopy(trial["result"])
        trial["result"]["test"]["bits_per_byte"] /= 2
    end_as(pick(trials, "bpe [recipe=a]"), "diverged", "loss is not finite")
    found = compare(record, trials)
    under, mean = found.under_recipes, found.mean_of_recipes.set_index("row")
    assert found.noise["unit"] == "bits/byte"
    assert mean.loc["gated", "delta"] == pytest.approx(under[under["row"] == "gated"]["delta"].mean())


def test_against_a_row_of_one_recipe_there_is_no_mean() -> None:
    record, trials = asked({"baseline": {"a": 0.2, "b": 0.0}, "gated": {"a": 0.1, "b": 0.1}})
    assert compare(with_reference(record, "gated"), trials).mean_of_recipes["verdict"].tolist() != []
    assert compare(with_reference(record, "gated [recipe=b]"), trials).mean_of_recipes.empty


def test_a_lead_under_a_rough_recipe_alone_is_not_the_architectures() -> None:
    """Planted: `careful` is ahead where the start is rough, and level with the baseline where it is not."""
    record, trials = asked(
        {
            "baseline": {"rough": 0.3, "calm": 0.0},
            "careful": {"rough": 0.1, "calm": 0.0},
            "good": {"rough": 0.2, "calm": -0.1},
        }
    )
    found = compare(record, trials)
    table = found.table.set_index("variant")["verdict"]
    assert table["careful [recipe=rough]"] == "better", "one recipe alone calls a winner"
    best = found.best_recipes.set_index("row")
    assert best["verdict"].to_dict() == {"baseline": "baseline", "careful": "within noise", "good": "better"}
    assert best.loc["careful", "holds"] == "better under one recipe only (rough)"
    assert best.loc["good", "holds"] == "better under 2 of 2 recipes"
    assert {*best["recipe"]} == {"calm"}


def test_each_side_is_compared_at_its_own_best_recipe() -> None:
    record, trials = asked({"baseline": {"as is": 0.2, "small": 0.0}, "slow": {"as is": 0.05, "small": 0.3}})
    best = compare(record, trials).best_recipes.set_index("row")
    assert (best.loc["slow", "recipe"], best.loc["slow", "against"]) == ("as is", "small")
    assert best.loc["slow", "delta"] == pytest.approx(0.05, abs=0.02), "against 0.0, not 0.2"
    assert best.loc["slow", "verdict"] == "worse"
    assert best.loc["slow", "holds"] == "reversed: better under as is, worse under small"


def test_the_report_begins_with_every_variant_at_its_best_recipe() -> None:
    record, trials = asked({"baseline": {"a": 0.2, "b": 0.0}, "gated": {"a": 0.1, "b": 0.1}})
    found = compare(record, trials)
    text = report(found)
    first, _, rest = text.partition("All variants")
    assert "best recipe" in first and "gated [recipe=a]" not in first and "gated [recipe=a]" in rest
    assert "gated: reversed: better under a, worse under b" in text.replace("\n  ", " ")
    assert to_plain(found)["best_recipes"][1]["holds"] == "reversed: better under a, worse under b"


def test_a_row_without_a_mean_under_one_recipe_stands_at_another(tmp_path: Path) -> None:
    record, trials = asked({"baseline": {"a": 0.2, "b": 0.0}, "gated": {"a": 0.1, "b": -0.1}})
    end_as(pick(trials, "gated [recipe=b]"), "diverged", "loss is not finite")
    best = compare(record, trials).best_recipes.set_index("row")
    assert best.loc["gated", "recipe"] == "a"
    end_as(pick(trials, "gated [recipe=a]"), "diverged", "loss is not finite")
    found = compare(record, trials)
    lost, base = found.best_recipes.set_index("row").loc["gated"], found.best_recipes.set_index("row").loc["baseline"]
    assert (lost["verdict"], lost["recipe"], lost["n"], base["verdict"]) == ("diverged", "", 0, "baseline")
    assert ("diverged", "gated diverged: no comparison with baseline") in findings(found)


def test_the_best_recipe_is_not_that_of_the_luckier_seeds() -> None:
    """Each seed has luck of its own, and the better recipe of `gated` has a seed more, which is an unlucky one."""
    record, trials = asked({"baseline": {"x": 0.3, "y": 0.3}, "gated": {"x": 0.02, "y": 0.0}}, seeds=5, seed_sd=1e-4)
    for trial in trials:
        trial["result"] = deepcopy(trial["result"])
        for split in ("validation", "test"):
            trial["result"][split]["loss"] += 0.5 * (trial["seed"] == 4)
    fewer = [trial for trial in trials if trial["variant"] != "gated [recipe=x]" or trial["seed"] < 4]
    assert compare(record, fewer).best_recipes.set_index("row").loc["gated", "recipe"] == "y"


def test_a_row_whose_baseline_has_no_loss_yet_waits_with_those_that_compare_with_it() -> None:
    record, trials = asked({"baseline": {"x": 0.0, "y": 0.0}, "all": {"x": 0.1, "y": 0.2}, "one": {"x": 0.2, "y": 0.1}})
    for variant in record["variants"]:
        if variant["row"] == "one":
            variant["baseline"] = variant["name"].replace("one", "all")
    found = compare(record, [trial for trial in trials if not trial["variant"].startswith("baseline")])
    best = found.best_recipes
    assert not best["recipe"].any() and [*best["row"]] == ["baseline", "all", "one"]
    assert [*best["verdict"]] == ["baseline", "incomplete", "incomplete"]
    assert [*best["baseline"]] == [
        "baseline",
        "baseline",
        "all",
    ]


def test_a_row_whose_best_recipe_was_tested_on_other_text_is_not_compared() -> None:
    record, trials = asked({"baseline": {"a": 0.2, "b": 0.0}, "gated": {"a": 0.1, "b": 0.3}})
    for variant in record["variants"]:
        variant["test"] = f"the text of {variant['axes']['recipe']}"
    best = compare(record, trials).best_recipes.set_index("row")
    assert (best.loc["gated", "recipe"], best.loc["gated", "against"]) == ("a", "b")
    assert best.loc["gated", "verdict"] == "other test text" and best["delta"].isna().all()


def test_a_study_without_recipes_has_no_table_of_them() -> None:
    found = compare(*make_study({"baseline": 0.0, "gated": 0.1}))
    assert found.best_recipes.empty and "best recipe" not in report(found)


@pytest.mark.slow
def test_a_gate_that_helps_a_rough_start_is_found_out_by_a_second_recipe(tmp_path: Path) -> None:
    """Really trained: without a warm-up, from values too small for the width, a gate leads; from a good start not."""
    study = write_study(
        tmp_path,
        model="model: {d_model: 64, n_layers: 2, block: {norm: rmsnorm, attention: {heads: 4, kv_heads: 2, "
        "positional: rope}, ffn: {type: glu, activation: silu}}}",
        recipes="recipes: {as is: {}, rough: {schedule.warmup: 0, model.init.std: 0.02}}",
        train="train: {data: {type: stdlib, validation_bytes: 64k, test_bytes: 128k}, tokens: 60k, context: 128, "
        "batch: 4, lr: 4e-3}",
        seeds="seeds: 3",
    )
    assert run(study, tmp_path / "store", executor="inline", track=False).exit_code == 0
    with Store.open(tmp_path / "store") as store:
        found = load_comparison(store, "gates")
    best = found.best_recipes.set_index("row")
    assert best.loc["gated", "holds"] == "better under one recipe only (rough)"
    assert best.loc["gated", ["recipe", "verdict"]].tolist() == ["as is", "within noise"]
