"""Tuning: values are tried to the rungs they earn, the neighbours of the best to their end, and past the edge."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import read_text
from archlab.search.comparison.compare import compare
from archlab.search.comparison.notes import tuning_notes
from archlab.search.reporting.report import FORMATS, report
from archlab.search.sections.rooms import select
from archlab.search.sections.tune.frames import Curve, fit, sensitivity, stable, verdict
from archlab.search.sections.tune.halving import tuned
from archlab.search.sections.tune.spec import Brackets, Tune, Values
from archlab.search.study.load import parse_study
from tests.search.plan_kit import cost, made_plan, simulate
from tests.search.study_files import study_text

GRID = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2)


def tune_of(text: str) -> Tune:
    found = parse_study(read_text(study_text(tune=f"tune: {text}"))).tune
    assert found is not None
    return found


def valley(best: float, width: float = 1.0, over: float = math.inf) -> Any:
    """A loss with its lowest end at one rate, that falls by 1 on the way and diverges above `over`."""

    def loss(variant: str, settings: dict[str, Any], seed: int, share: float) -> float:
        if settings["lr"] > over:
            return math.inf if share > 0.3 else 3.0
        away = math.log(float(settings["lr"]) / best) / width
        return 2 + away**2 / 10 + (1 - share) + 0.001 * seed

    return loss


# values


@pytest.mark.parametrize(
    ("axis", "up", "expected"),
    [
        (Values(GRID, "1-2-5"), True, [5e-2, 1e-1]),
        (Values(GRID, "1-2-5"), False, [5e-4, 2e-4]),
        (Values((1e-3, 3e-3), "1-3"), True, [1e-2, 3e-2]),
        (Values((1e-3, 4e-3)), True, [0.016, 0.064]),
        (Values((1e-3, 4e-3)), False, [0.00025, 6.25e-05]),
        (Values((32, 64)), True, [128, 256]),
        (Values((32, 64)), False, [16, 8]),
        (Values((1, 2)), False, []),
        (Values((0.0, 0.1)), True, []),
        (Values((1e-3,)), True, []),
        (Values(("pre", "post")), True, []),
        (Values((True, False)), True, []),
    ],
    ids=str,
)
def test_next_values_are_the_grids_or_at_the_last_ratio(axis: Values, up: bool, expected: list[float]) -> None:
    found = axis.beyond(up, 2)
    assert found == expected and all(type(value) is type(axis.values[0]) for value in found)


def test_grids_extend_and_have_brackets_and_lists_do_not() -> None:
    grid, listed = tune_of("{lr: {grid: 1-2-5, from: 1e-3, to: 5e-3}}"), tune_of("{lr: [1e-3, 2e-3]}")
    assert (grid.steps("train.lr"), grid.brackets) == (2, Brackets())
    assert (listed.steps("train.lr"), listed.brackets) == (0, None)
    assert listed.plain() == {"lr": [1e-3, 2e-3]}, "as older versions wrote it"
    said = tune_of("{lr: {grid: 1-2-5, from: 1e-3, to: 5e-3}, extend: 0, brackets: false}")
    assert (said.steps("train.lr"), said.brackets) == (0, None)
    asked = tune_of("{lr: [1e-3, 2e-3], extend: 1, brackets: {rungs: [0.3], keep: 0.4}}")
    assert (asked.steps("train.lr"), asked.brackets) == (1, Brackets(rungs=(0.3,), keep=0.4))
    assert tune_of("{train.lr: 1e-3}").points == [{"lr": 1e-3}]


def test_several_paths_are_crossed_in_their_order() -> None:
    found = tune_of("{lr: [2e-3, 1e-3], block.attention.head_dim: [16, 32]}")
    assert [tuple(point.values()) for point in found.points] == [(1e-3, 16), (1e-3, 32), (2e-3, 16), (2e-3, 32)]


# the procedure


def reached(tune: Tune, ends: dict[float, float], rung: dict[float, float] | None = None) -> dict[float, int]:
    """How far each rate is trained, with these final losses and these at the one rung."""
    ran: dict[float, int] = {}
    rungs = len(tune.brackets.rungs) if tune.brackets else 0

    def losses(point: dict[str, Any]) -> list[float | None]:
        rate = point["lr"]
        seen = [*[(rung or ends)[rate]] * rungs, ends[rate]]
        return [value if index <= ran.get(rate, -1) else None for index, value in enumerate(seen)]

    while True:
        found = tuned(tune, rungs, losses, lambda point: point["lr"] in ends)
        now = {point["lr"]: found.reach[name] for name, point in found.points.items()}
        if now == ran:
            assert found.settled
            return now
        ran = now


def axes(*rates: float, grid: str = "", extend: int = 0, keep: float | None = None) -> Tune:
    brackets = Brackets(rungs=(0.2,), keep=keep) if keep else None
    return Tune(axes={"train.lr": Values(rates, grid)}, extend=extend, brackets=brackets)


@pytest.mark.parametrize(
    ("rung", "ends", "expected"),
    [
        pytest.param([5, 4, 3, 2, 1], [5, 4, 3, 2, 1], [0, 0, 1, 1, 1], id="the best three of five go on"),
        pytest.param([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 1, 1, 0, 0], id="at the other end"),
        pytest.param([1, 5, 1, 5, 1], [3, 1, 1, 9, 2], [1, 1, 1, 1, 1], id="both neighbours of the best"),
        pytest.param([1, 2, 3, 4, 5], [3, 2, 1, 0, 9], [1, 1, 1, 1, 1], id="climbs while a neighbour is better"),
        pytest.param([1, 2, 3, math.inf, math.inf], [3, 2, 1, 9, 9], [1, 1, 1, 0, 0], id="not what diverged"),
        pytest.param([4, 5, 1, 2, 3], [1, 2, math.inf, math.inf, math.inf], [1, 1, 1, 1, 1], id="finalists diverge"),
        pytest.param([math.inf] * 5, [math.inf] * 5, [0] * 5, id="all diverge"),
    ],
)
def test_values_go_as_far_as_they_earn(rung: list[float], ends: list[float], expected: list[int]) -> None:
    tune = axes(*GRID, keep=0.5)
    found = reached(tune, dict(zip(GRID, ends, strict=True)), dict(zip(GRID, rung, strict=True)))
    assert [found[rate] for rate in GRID] == expected


@pytest.mark.parametrize(
    ("best", "extend", "expected"),
    [
        (2e-3, 2, {1e-3, 2e-3, 5e-3}),
        (1e-2, 2, {1e-3, 2e-3, 5e-3, 1e-2, 2e-2}),
        (1e-2, 1, {1e-3, 2e-3, 5e-3, 1e-2}),
        (1e-1, 2, {1e-3, 2e-3, 5e-3, 1e-2, 2e-2}),
        (1e-1, 0, {1e-3, 2e-3, 5e-3}),
        (1e-4, 2, {1e-3, 2e-3, 5e-3, 5e-4, 2e-4}),
    ],
)
@pytest.mark.parametrize("keep", [None, 0.5])
def test_grids_grow_while_the_best_is_at_the_edge(
    best: float, extend: int, expected: set[float], keep: float | None
) -> None:
    members = [float(f"{step}e{power}") for power in range(-6, 1) for step in (1, 2, 5)]
    ends = {rate: math.log(rate / best) ** 2 for rate in members}
    tune = axes(1e-3, 2e-3, 5e-3, grid="1-2-5", extend=extend, keep=keep)
    assert set(reached(tune, ends)) == expected


def test_a_rate_that_diverged_encloses_the_best() -> None:
    ends = {1e-3: 3.0, 2e-3: 2.0, 5e-3: 1.0, 1e-2: math.inf, 2e-2: 0.5}
    assert set(reached(axes(1e-3, 2e-3, 5e-3, grid="1-2-5", extend=2), ends)) == {1e-3, 2e-3, 5e-3, 1e-2}


def test_values_that_make_no_sense_end_the_growth() -> None:
    ends = {1e-3: 3.0, 2e-3: 2.0, 5e-3: 1.0}
    assert set(reached(axes(1e-3, 2e-3, 5e-3, grid="1-2-5", extend=2), ends)) == set(ends)


# plans


@pytest.mark.parametrize("order", range(4))
def test_what_is_chosen_does_not_depend_on_who_ends_first(order: int, tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: {grid: 1-2-5, from: 1e-3, to: 2e-2}}")
    trials = simulate(made, valley(5e-3), seed=order)
    states = {(t["variant"], t["settings"]["lr"]): t["state"] for t in trials if t["role"] == "tune"}
    for variant in ("baseline", "gated"):
        mine = [states[variant, rate] for rate in GRID]
        assert mine == ["paused", "complete", "complete", "complete", "paused"]
    repeats = {(t["variant"], t["settings"]["lr"], t["seed"]) for t in trials if t["role"] == "repeat"}
    assert repeats == {(variant, 5e-3, seed) for variant in ("baseline", "gated") for seed in (0, 1)}
    assert 2 * 5 > cost(trials, 8) - 2 == pytest.approx(2 * (3 + 2 * 2 / 8)), "two of five ended at step 2 of 8"


def test_a_plan_goes_on_from_any_table(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: {grid: 1-2-5, from: 1e-3, to: 5e-3}}")
    whole = simulate(made, valley(2e-2, over=1e-1))
    assert max(t["settings"]["lr"] for t in whole) == 2e-2, "two steps beyond 5e-3"
    for ends in range(0, 16, 3):
        begun = simulate(made, valley(2e-2, over=1e-1), ends=ends)
        again = made_plan(tmp_path, "{lr: {grid: 1-2-5, from: 1e-3, to: 5e-3}}")
        assert sorted(map(repr, simulate(again, valley(2e-2, over=1e-1), begun))) == sorted(map(repr, whole))


def test_a_value_that_diverges_after_a_rung_changes_nothing_at_the_rung(tmp_path: Path) -> None:
    """Else who is trained how far would hang on when it diverges, beside which others."""
    rates = "[1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3]"
    made = made_plan(tmp_path, f"{{lr: {rates}, brackets: {{rungs: [0.2, 0.5], keep: 0.5}}}}")

    def loss(variant: str, settings: dict[str, Any], seed: int, share: float) -> float:
        return math.inf if share > 0.6 and settings["lr"] == 6e-3 else 9 - share - 100 * float(settings["lr"])

    for order in range(4):
        trials = [t for t in simulate(made, loss, seed=order) if t["role"] == "tune" and t["variant"] == "gated"]
        mine = sorted(trials, key=lambda t: t["settings"]["lr"])
        assert [t["state"] for t in mine] == ["paused"] * 3 + ["complete"] * 2 + ["diverged"]
        assert {t["result"]["step"] for t in mine[:3]} == {2}, "as before it diverged"


def test_a_model_axis_is_tuned_with_its_sizes(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: [1e-3, 2e-3], block.ffn.width: [64, 128], extend: 1}")

    def loss(variant: str, settings: dict[str, Any], seed: int, share: float) -> float:
        return 3 - share - int(settings["block.ffn.width"]) / 1000 + abs(float(settings["lr"]) - 2e-3)

    trials = simulate(made, loss)
    chosen = {t["variant"]: t["settings"] for t in trials if t["role"] == "repeat"}
    assert chosen["baseline"] == {"lr": 2e-3, "block.ffn.width": 256}
    record = made.record()
    found = compare(record, trials).table.set_index("variant")
    sizes = {each["settings"]["block.ffn.width"]: each["parameters"] for each in record["variants"][0]["tuned"]}
    assert found["parameters"]["baseline"] == sizes[256] > sizes[64]
    text = report(compare(record, trials), rates=True)
    assert "what was tuned" in text and "width 256" in text


def test_ties_go_to_the_lower_rate(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: [1e-3, 2e-3]}")
    trials = simulate(made, lambda *_: 2.0)
    assert {t["settings"]["lr"] for t in trials if t["role"] == "repeat"} == {1e-3}


def test_a_variant_whose_repeat_is_pruned_begins_no_other(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: [1e-3, 2e-3]}", seeds="seeds: 4")
    under_way = (simulate(made, valley(1e-3), ends=ends) for ends in range(4, 12))
    trials, second = next(
        (trials, trial)
        for trials in under_way
        for trial in trials
        if (trial["role"], trial["variant"], trial["seed"], trial["state"]) == ("repeat", "gated", 1, "planned")
    )
    second |= {"state": "pruned", "result": None, "reason": "behind"}
    done = simulate(made, valley(1e-3), trials)
    rows = {(t["seed"], t["state"]) for t in done if t["variant"] == "gated" and t["role"] == "repeat"}
    assert (1, "pruned") in rows and not any(state == "planned" for _, state in rows)
    row = compare(made.record(), done).table.set_index("variant").loc["gated"].to_dict()
    assert row["verdict"] == "pruned" and math.isnan(row["perplexity_mean"]) and row["missing"] == 0


WRONG = {
    "{block.ffn.width: [64, 64]}": "holds 64 twice",
    "{block.ffn.width: {grid: 1-2-5, from: 64, to: 99}}": "holds no value",
    "{lr: [1e-3], extend: 2}": "needs a grid, or a list of at least two numbers",
    "{lr: [1e-3, 2e-3], brackets: {rungs: [0.5, 0.2]}}": "must ascend",
    "{lr: [1e-3, 2e-3], brackets: {rungs: [1.5]}}": "must be less than 1",
    "{extend: 1}": "holds no path",
    "{lr: [1e-3], train.lr: [2e-3]}": "stands here already",
    "{train.batch: [2, 4]}": "changes the batches",
    "{block.ffn.widht: [64]}": "did you mean 'width'",
    "{block.attention.heads: [3, 4]}": "do not divide",
    "{block.attention.heads: [4], block.attention.kv_heads: [4, null]}": "are one model and recipe",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=WRONG.keys())
def test_what_cannot_be_tuned_is_refused_in_words(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        made_plan(tmp_path, text)


def test_a_path_that_a_variant_sets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"`tune` chooses the block.ffn.width of every variant"):
        made_plan(tmp_path, "{block.ffn.width: [64]}", variants="variants:\n  baseline: {}\n  a: {block.ffn.width: 9}")


# what the curve says


def curve(best: float, losses: dict[float, float]) -> Curve:
    return Curve(best, tuple(sorted(losses)), tuple(losses[rate] for rate in sorted(losses)))


def test_a_parabola_is_fitted_exactly() -> None:
    losses = {rate: 2 + 0.3 * math.log(rate / 3.3e-3) ** 2 / 2 for rate in (1e-3, 2e-3, 5e-3, 1e-2)}
    assert fit(curve(5e-3, losses)) == pytest.approx((3.3e-3, 2.0, 0.3))


@pytest.mark.parametrize(
    "losses",
    [
        {1e-3: 3.0, 2e-3: 2.0},
        {1e-3: 3.0, 2e-3: 2.0, 4e-3: math.inf},
        {1e-3: 3.0, 2e-3: 2.0, 4e-3: math.nan, 8e-3: 4.0},
        {1e-3: 2.0, 2e-3: 2.0, 4e-3: 2.0},
    ],
    ids=["two", "diverged", "ended early", "flat"],
)
def test_nothing_is_fitted_where_the_best_is_not_enclosed(losses: dict[float, float]) -> None:
    assert fit(curve(2e-3, losses)) is None


def test_the_largest_stable_rate_is_below_what_diverged() -> None:
    assert stable(curve(1e-3, {1e-3: 2.0, 2e-3: 2.1, 4e-3: math.inf, 8e-3: 2.2})) == (2e-3, 4e-3)
    low, none = stable(curve(1e-3, {1e-3: 2.0, 2e-3: 2.1}))
    assert low == 2e-3 and math.isnan(none)
    assert stable(curve(1e-3, {1e-3: 2.0, 2e-3: math.nan, 4e-3: math.inf})) == (1e-3, 4e-3), "2e-3 ended early"


def test_sensitivity_is_the_mean_excess_with_what_diverged_as_if_untrained() -> None:
    found = sensitivity(curve(2e-3, {1e-3: 3.0, 2e-3: 2.0, 4e-3: math.inf}), start=5.0)
    assert found == pytest.approx(((0.5 + 1.5) / 2, 1e-3, 4e-3))
    assert math.isnan(sensitivity(curve(2e-3, {1e-3: 3.0, 2e-3: 2.0, 4e-3: math.nan}), 5.0)[0])


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ((2.9, 1.9, 2.4), "robust"),
        ((3.2, 1.9, 2.4), "LR-dependent"),
        ((3.2, 2.2, 1.8), "LR-dependent"),
        ((math.inf, 1.9, 2.4), "LR-dependent"),
        ((2.8, 2.3, 2.6), "inverted"),
        ((3.1, 2.1, 2.6), "worse"),
        ((3.1, 2.01, 2.6), "within noise"),
        ((math.nan, 1.9, math.nan), ""),
    ],
    ids=str,
)
def test_the_verdict_says_whether_a_difference_hangs_on_the_rate(ours: tuple[float, ...], expected: str) -> None:
    rates = (1e-3, 2e-3, 4e-3)
    base = curve(2e-3, dict(zip(rates, (3.0, 2.0, 2.5), strict=True)))
    known = {rate: loss for rate, loss in zip(rates, ours, strict=True) if math.isfinite(loss)}
    mine = curve(min(known, key=lambda rate: known[rate]), dict(zip(rates, ours, strict=True)))
    assert verdict(mine, base, noise=0.05) == expected


def test_there_is_no_verdict_on_a_rate_before_the_noise_is_known(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: [1e-3, 5e-3, 2e-2]}", seeds="seeds: 1")
    found = compare(made.record(), simulate(made, valley(5e-3)))
    assert found.noise["seed_sd"] is None and [*found.tuning["verdict"]] == ["baseline", ""]


def test_reports_show_the_curve_and_what_ended_early(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: {grid: 1-2-5, from: 1e-3, to: 2e-2}}", seeds="seeds: 3")
    trials = simulate(made, valley(5e-3, over=1.5e-2))
    record = made.record()
    found = compare(record, trials)
    assert found.tuning.set_index("variant")["fitted_lr"]["gated"] == pytest.approx(5e-3)
    assert list(found.tuning["diverged_lr"]) == [2e-2] * 2 or found.tuning["diverged_lr"].isna().all()
    for form in FORMATS:
        assert "fitted_lr" in report(found, form) if form == "json" else report(found, form, rates=True)
    text = report(found, rates=True)
    assert "ended early at 25%" in text and "Learning rates on validation" in text and "waits" not in text
    assert "with one seed" in text.split("Learning rates on validation")[1]
    (selection, *_) = select(record, trials)
    assert any("ended early, being behind" in note for note in tuning_notes(selection))
    assert not selection.missing_points and selection.settled


@pytest.mark.parametrize("ends", [1, 3, 5])
def test_a_rate_that_waits_for_the_others_has_not_ended_early(ends: int, tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: [1e-3, 2e-3, 5e-3, 1e-2, 2e-2], brackets: {rungs: [0.2], keep: 0.4}}")
    trials = simulate(made, valley(2e-3), ends=ends)
    assert any(trial["state"] == "paused" for trial in trials)
    found = compare(made.record(), trials)
    text = report(found, rates=True)
    assert "waits at 25%" in text and "ended early" not in text and "settings wait until the others are as far" in text
    text = report(compare(made.record(), simulate(made, valley(2e-3), trials)), rates=True)
    assert "ended early at 25%" in text and "waits" not in text and "wait until" not in text


def test_a_report_without_a_finished_trial_names_no_seeds(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: [1e-3, 2e-3]}", seeds="seeds: {min: 2, max: 4, until: resolved}")
    assert (
        report(compare(made.record(), simulate(made, valley(2e-3), ends=0)))
        .split("\n\n>")[0]
        .endswith("; no finished trial")
    )
    assert "seeds ;" not in report(compare(made.record(), simulate(made, valley(2e-3), ends=0)))


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ("lr: [1e-3, 2e-3]", 0.0),
        ("lr: {grid: 1-2-5, from: 1e-3, to: 2e-2}", 2 * 0.8),  # 3 of 5 go on from a fifth
        ("lr: [1e-3, 2e-3, 3e-3, 4e-3], brackets: {rungs: [0.2, 0.5], keep: 0.5}", 2 * 0.8 + 1 * 0.5),
    ],
)
def test_what_brackets_save_is_known_beforehand(options: str, saved: float) -> None:
    assert tune_of(f"{{{options}}}").saved == pytest.approx(saved)


# trials that end in other ways


@pytest.mark.parametrize("state", ["failed", "pruned", "diverged"])
def test_a_trial_that_ended_without_a_loss_keeps_those_that_it_had_at_rungs(tmp_path: Path, state: str) -> None:
    """What it stood at a rung for stays decided: the best at the first rung fails, and nobody takes its place there."""
    made = made_plan(tmp_path, "{lr: {grid: 1-2-5, from: 1e-3, to: 2e-2}, brackets: {rungs: [0.2, 0.5], keep: 0.5}}")
    assert made.tuner is not None
    table = simulate(made, valley(5e-3), ends=6)
    first = made.tuner.rungs(made.variants[0])[0]
    best = min((row for row in table if row["variant"] == "baseline"), key=lambda row: dict(row["curve"]).get(first, 9))
    before = made.tuner._losses(best, made.tuner.rungs(made.variants[0]))
    ended = {**best, "state": state, "result": None}
    after = made.tuner._losses(ended, made.tuner.rungs(made.variants[0]))
    assert after[0] == before[0] and math.isfinite(before[0] or math.nan)
    assert after[-1] == math.inf


def test_a_trial_that_went_on_from_a_shorter_one_stands_at_a_rung_between_its_neighbours(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: {grid: 1-2-5, from: 1e-3, to: 2e-2}}")
    assert made.tuner is not None
    measured = {"loss": 2.0, "perplexity": math.exp(2), "bits_per_byte": 2 / math.log(2)}
    result = {"step": 80, "validation": measured}
    row = {"key": "k", "state": "complete", "result": result, "curve": [(10, 4.0), (40, 3.0), (80, 2.0)]}
    assert list(made.tuner._losses(row, [10, 20])) == [4.0, pytest.approx(3.5), 2.0]
    assert list(made.tuner._losses({**row, "key": "l"}, [5])) == [4.0, 2.0]


def test_a_variant_whose_values_all_wait_without_a_loss_has_diverged(tmp_path: Path) -> None:
    made = made_plan(tmp_path, "{lr: {grid: 1-2-5, from: 1e-3, to: 2e-2}}")
    table = simulate(made, lambda variant, *_: math.inf if variant == "gated" else 3.0)
    for row in table:
        if row["variant"] == "gated":
            row |= {"state": "paused", "until": 1, "result": {"step": 1, "validation": {"loss": None}}}
    gated = next(each for each in select(made.record(), table) if each.variant == "gated")
    assert gated.settled and gated.diverged
    found = compare(made.record(), table).table.set_index("variant")
    assert found.loc["gated", "verdict"] == "diverged"


def test_a_variant_that_is_given_up_is_expected_to_have_no_more_trials(tmp_path: Path) -> None:
    from archlab.dashboards.library import Study
    from archlab.search.store.notes import Note

    made = made_plan(tmp_path, "{lr: {grid: 1-2-5, from: 1e-3, to: 2e-2}}", seeds="seeds: 3")
    table = simulate(made, lambda variant, *_: math.inf if variant == "gated" else 3.0)
    study = Study("gates", "", made.record(), table, None, None, None, {}, Note())
    assert study.done == study.expected == len({row["key"] for row in table})
    begun = simulate(made, valley(5e-3), ends=1)
    assert Study("gates", "", made.record(), begun, None, None, None, {}, Note()).expected == made.trials
