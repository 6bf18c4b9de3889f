"""`archlab calibrate`: a better recipe is found where there is one, kept, and taken; nothing is trained twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from archlab.arch_dsl.language.errors import SpecError
from archlab.cli.main import main
from archlab.search.calibration.calibrate import Calibration, calibrate
from archlab.search.calibration.choices import Tries, choices_of
from archlab.search.calibration.stages import far_from, sizes
from archlab.search.comparison.compare import load_comparison
from archlab.search.planning.plan import plan
from archlab.search.recipe.optimizers import AdamW, Optimizer, ScheduleFree
from archlab.search.reporting.report import report, section_report
from archlab.search.sections.calibration.told import _recipes, resolvable, sd_interval
from archlab.search.statistics.moderated import expected_df
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from tests.search.study_files import SECTIONS, write_study

TRIALS = 18
SLOW_RATE = SECTIONS["train"].replace("lr: 1e-3", "lr: 1e-4").replace("tokens: 1k", "tokens: 4k")


def found_by(folder: Path, **options: Any) -> Calibration:
    study = write_study(folder, train=SLOW_RATE)
    command = "archlab calibrate gates.yaml"
    return calibrate(study, folder / "store", executor="inline", trials=TRIALS, command=command, **options)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Calibration]:
    """A small study whose rate is far too low, calibrated."""
    folder = tmp_path_factory.mktemp("calibrated")
    return folder, found_by(folder)


def trials_in(folder: Path) -> dict[str, tuple[str, int]]:
    """key -> (state, attempt) of all trials of the store."""
    with Store.open(folder / "store", create=False) as store:
        rows = [row for study in store.studies() for row in store.study_trials(study["name"])]
    return {row["key"]: (row["state"], row["attempt"]) for row in rows}


@pytest.mark.slow
def test_a_rate_that_is_far_too_low_is_found_out(calibrated: tuple[Path, Calibration]) -> None:
    folder, found = calibrated
    assert found.summary.exit_code == 0 and found.study == "gates.calibrate"
    assert found.recipe is not None and found.recipe["train"]["lr"] > 1e-4
    with Store.open(folder / "store", create=False) as store:
        comparison = load_comparison(store, found.study)
        names = {study["name"] for study in store.studies()}
        assert {store.study(name)["command"] for name in names} == {"archlab calibrate gates.yaml"}  # goes on with each
    assert names == {"gates.calibrate-1", "gates.calibrate-2", "gates.calibrate"}
    rows = {row["recipe"]: row for row in comparison.calibrated_recipes.to_dict("records")}
    assert comparison.calibrated["chosen"] != "as is"
    assert rows[comparison.calibrated["chosen"]]["loss"] < rows["as is"]["loss"]
    worth = {row["choice"]: row for row in comparison.calibrated_choices.to_dict("records")}
    assert {"rate", "batch", "schedule", "warm-up", "beta2", "weight decay", "start"} == set(worth)
    assert worth["rate"]["own"] == "0.0001" and worth["rate"]["worth"] < 0
    text = section_report(comparison, "calibration")
    assert "sd of a trial" in report(comparison) and "What each choice is worth" in text and "as is" in text


@pytest.mark.slow
def test_it_takes_no_more_work_than_it_was_allowed(calibrated: tuple[Path, Calibration]) -> None:
    folder, _ = calibrated
    with Store.open(folder / "store", create=False) as store:
        ran = {study["name"]: len(store.study_trials(study["name"])) for study in store.studies()}
        told = store.study("gates.calibrate")["calibration"]
    assert (
        sum(share * ran[name] for share, name in zip(told["shares"], sorted(ran, key=_ending), strict=True)) <= TRIALS
    )
    assert all(ran.values()) and told["rows"] == ["baseline", "gated"]


def _ending(name: str) -> str:
    """Sorts the stages: .calibrate-1, .calibrate-2, .calibrate."""
    return name if name[-1].isdigit() else name + "~"


@pytest.mark.slow
def test_the_same_call_again_trains_nothing(calibrated: tuple[Path, Calibration]) -> None:
    folder, found = calibrated
    before = trials_in(folder)
    assert found_by(folder).recipe == found.recipe
    assert trials_in(folder) == before


@pytest.mark.slow
def test_an_interrupted_calibration_goes_on_to_the_same_recipe(
    calibrated: tuple[Path, Calibration], tmp_path: Path
) -> None:
    folder, found = calibrated
    ended = 0

    def stop_at(event: dict[str, Any]) -> None:
        nonlocal ended
        ended += event["event"] == "finished"
        if ended == 9:
            raise KeyboardInterrupt

    stopped = found_by(tmp_path, on_event=stop_at)
    assert stopped.summary.exit_code == 130 and stopped.recipe is None
    assert len([state for state, _ in trials_in(tmp_path).values() if state == "complete"]) < 20
    (tmp_path / "store" / "timings").rename(tmp_path / "store" / "measured")  # tokens of equal time, as the first had
    (tmp_path / "store" / "timings").symlink_to(folder / "store" / "timings")
    again = found_by(tmp_path)
    assert again.summary.exit_code == 0 and again.recipe == found.recipe


@pytest.mark.slow
def test_a_study_takes_the_calibrated_recipe_and_what_stands_beside_it_wins(
    calibrated: tuple[Path, Calibration], tmp_path: Path
) -> None:
    folder, found = calibrated
    assert found.recipe is not None
    text = "train:\n  recipe: calibrated\n  data: {text: corpus.txt}\n  context: 32\n  clip: 0.5"
    study = load_study(write_study(folder, "taken.yaml", train=text), store=folder / "store")
    plain = load_study(folder / "study.yaml")
    assert study.train.lr == found.recipe["train"]["lr"] and study.train.tokens == found.recipe["train"]["tokens"]
    assert study.train.batch == found.recipe["train"]["batch"] and study.train.clip == 0.5
    assert study.train.data == plain.train.data
    assert study.model.init.std == found.recipe["model.init.std"]
    started = load_study(
        write_study(folder, "other.yaml", train=text, model=SECTIONS["model"] + "\n  init: {std: 0.3}"),
        store=folder / "store",
    )
    assert started.model.init.std == 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"model": SECTIONS["model"].replace("d_model: 64", "d_model: 32")}, "for another model"),
        ({"train": "train: {recipe: calibrated, data: {text: corpus.txt}, context: 16}"}, "for another context"),
        ({"train": "train: {recipe: calibrated, data: {text: other.txt}, context: 32}"}, "for another text"),
    ],
)
def test_a_recipe_for_another_study_is_refused(
    calibrated: tuple[Path, Calibration], sections: dict[str, str], told: str
) -> None:
    folder, _ = calibrated
    text = "train: {recipe: calibrated, data: {text: corpus.txt}, context: 32}"
    path = write_study(folder, "asks.yaml", **{"train": text, **sections})
    with pytest.raises(SpecError, match=rf"asks.yaml:\d+:\d+: train.recipe: .*that of 'gates' is {told}"):
        load_study(path, store=folder / "store")


@pytest.mark.slow
def test_where_every_recipe_diverges_none_is_kept(tmp_path: Path) -> None:
    study = write_study(tmp_path, train=SECTIONS["train"].replace("lr: 1e-3", "lr: 1e19"))
    found = calibrate(study, tmp_path / "store", executor="inline", trials=16)
    assert found.recipe is None and found.summary.exit_code == 1 and "lower rate" in found.summary.message
    with pytest.raises(SpecError, match="the store has no calibrated recipe"):
        load_study(
            write_study(tmp_path, train="train: {recipe: calibrated, data: {text: corpus.txt}}"),
            store=tmp_path / "store",
        )


def test_a_recipe_that_has_no_loss_stands_as_a_row_without_numbers() -> None:
    rows = {"a [recipe=as is]": ["a", "as is"], "a [recipe=try 1]": ["a", "try 1"]}
    trials = [
        {"variant": "a [recipe=try 1]", "seed": seed, "state": "complete"}
        | {"result": {"test": {"loss": 1.0 + seed}, "tokens": 100, "train_s": 2.0}}
        for seed in (0, 1)
    ] + [{"variant": "a [recipe=as is]", "seed": 0, "state": "diverged", "result": {"test": None}}]
    own, other = _recipes({"rows": ["a"]}, {"named": {"as is": {}, "try 1": {"lr": 1.0}}, "rows": rows}, trials)
    assert np.isnan([own["loss"], own["sd"], own["seconds"]]).all()
    assert (other["loss"], other["sd"], other["df"]) == (1.5, pytest.approx(np.sqrt(0.5)), 1)
    trials.append(trials[-1] | {"variant": "a [recipe=try 1]", "seed": 2})
    _, survivors = _recipes({"rows": ["a"]}, {"named": {"as is": {}, "try 1": {"lr": 1.0}}, "rows": rows}, trials)
    assert np.isnan([survivors["loss"], survivors["sd"]]).all(), "the seeds that did not diverge are no result"


def test_a_store_without_one_says_how_to_make_one(tmp_path: Path) -> None:
    path = write_study(tmp_path, train="train: {recipe: calibrated, data: {text: corpus.txt}}")
    with pytest.raises(SpecError, match="the store has no calibrated recipe; `archlab calibrate`"):
        load_study(path, store=tmp_path / "store")


def test_other_mistakes_are_told_before_a_calibrated_recipe_is_looked_for(tmp_path: Path) -> None:
    path = write_study(tmp_path, train="train: {recipe: calibrated, contxt: 32}")
    with pytest.raises(SpecError, match="did you mean 'context'"):
        load_study(path, store=tmp_path / "store")


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"ladder": "ladder: {sizes: {d_model: [64, 96]}}"}, "ladder: is more than one recipe"),
        (
            {"train": SECTIONS["train"] + "\n  stages: [{tokens: 1k, lr: 1e-3}]"},
            "train.stages: is more than one recipe",
        ),
        ({"train": SECTIONS["train"] + "\n  ramp: {start: 1, step: 1, tokens: 900}"}, "train.ramp: is more than one"),
        (
            {"variants": "variants:\n  baseline: {train.lr: 5e-4}\n  gated: [gate]"},
            "study.yaml:13:14: variants.baseline.train.lr: is a part of the recipe",
        ),
    ],
)
def test_a_study_of_several_recipes_is_refused(tmp_path: Path, sections: dict[str, str], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        calibrate(write_study(tmp_path, **sections), tmp_path / "store", executor="inline")


def test_too_little_work_and_a_strange_variant_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    with pytest.raises(SpecError, match=r"at least 1\d trials of the study, found 4; `--trials 1\d` allows that"):
        calibrate(study, tmp_path / "store", executor="inline")
    with pytest.raises(SpecError, match="'gatd' is no variant with the baseline's recipe and batches; there are gated"):
        calibrate(study, tmp_path / "store", executor="inline", trials=30, against="gatd")
    assert trials_in(tmp_path) == {}


def test_a_file_that_holds_something_else_is_not_overwritten(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    before = study.read_text()
    told = CliRunner().invoke(
        main, ["calibrate", str(study), "--store", str(tmp_path / "store"), "--write", str(study)]
    )
    assert told.exit_code == 2 and "it is not overwritten" in told.output and study.read_text() == before
    assert not (tmp_path / "store").exists()


def test_the_stages_never_take_more_than_the_work_that_there_is() -> None:
    for rows in (1, 2):
        for trials in range(20, 200):
            found = sizes(trials, rows, 7)
            short, middle, whole = found.stages
            work = found.tries * short.share + (2 + 7) * middle.share + found.finalists * whole.seeds
            assert work * rows <= trials and found.tries >= 8


def test_the_far_variant_is_the_one_that_differs_in_most_and_is_trained_alike(tmp_path: Path) -> None:
    variants = """\
variants:
  baseline: {}
  gated: [gate]
  far: {block.norm: layernorm, block.attention.positional: none, block.ffn: mlp}
  other batches: {train.batch: 2, block.norm: layernorm, block.attention.heads: 2, block.ffn: mlp, d_model: 32}"""
    planned = plan(load_study(write_study(tmp_path, variants=variants)), tmp_path / "data")
    far, near = far_from(planned, None), far_from(planned, "gated")
    assert far is not None and far.name == "far" and near is not None and near.name == "gated"


def test_choices_hold_the_studys_own_values_and_no_value_twice(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, model=SECTIONS["model"] + "\n  init: {std: 0.02}"))
    found = {choice.name: choice for choice in choices_of(study.model, study.train)}
    assert found["rate"].values == (2.5e-4, 3.5e-4, 5e-4, 7.1e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3)
    assert found["batch"].values == (1, 2, 4, 8, 16) and found["start"].values == (0.02, "small")
    assert all(len({json.dumps(v) for v in choice.values}) == len(choice.values) for choice in found.values())
    own = {"rate": 1e-3, "batch": 4, "schedule": "cosine", "warm-up": "auto", "beta2": [0.9, 0.95], "start": 0.02}
    for name, value in own.items():
        assert found[name].values[found[name].own] == value
    plain = study.train.replace(accumulate=4)
    assert next(c for c in choices_of(study.model, plain) if c.name == "batch").values == (4, 8, 16)


@pytest.mark.parametrize(
    ("optimizer", "left_out"),
    [(ScheduleFree(), "schedule"), (AdamW(independent_decay=True), "weight decay")],
    ids=["schedule_free", "independent_decay"],
)
def test_what_an_optimizer_leaves_no_choice_of_is_none(tmp_path: Path, optimizer: Optimizer, left_out: str) -> None:
    study = load_study(write_study(tmp_path))
    recipe = study.train.replace(optimizer=optimizer)
    names = {choice.name for choice in choices_of(study.model, recipe)}
    assert {choice.name for choice in choices_of(study.model, study.train)} - names == {left_out}


def test_what_a_point_changes_takes_equal_time_and_the_share_of_its_stage(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path))
    tries = Tries(study.train, choices_of(study.model, study.train), lambda batch: 100 * batch)
    assert tries.settings(tries.own) == {} and tries.default == tries.own
    batch = next(choice for choice in tries.choices if choice.name == "batch")
    point = {**tries.own, "batch": batch.values.index(16), "schedule": 1}
    assert tries.settings(point, 0.25) == {
        "batch": 16,
        "tokens": 400,
        "schedule": {"type": "linear", "warmup": "auto"},
    }


def test_the_interval_of_a_standard_deviation_is_that_of_chi_squared() -> None:
    low, high = sd_interval(2.0, 9)
    assert low == pytest.approx(2 * np.sqrt(9 / stats.chi2.ppf(0.975, 9)))
    assert high == pytest.approx(2 * np.sqrt(9 / stats.chi2.ppf(0.025, 9)))


def test_what_a_table_resolves_is_the_half_width_of_dunnetts_interval() -> None:
    # two variants have one comparison, whose interval is Student's; 24 trials are 12 seeds of each
    found, df = resolvable(0.01, 24.9, 2), expected_df(2, 1, 12)
    assert found == pytest.approx(stats.t.ppf(0.975, df) * 0.01 * np.sqrt(2 / 12), rel=2e-3)
    assert resolvable(0.01, 5, 2) == np.inf and resolvable(0.005, 24, 2) == pytest.approx(found / 2)
    assert resolvable(0.01, 24, 4) > found
