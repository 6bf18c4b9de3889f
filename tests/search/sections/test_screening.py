"""Which variants a screen lets through: a function of the rows alone, whatever ended first and wherever it stopped."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from archlab.search.comparison.compare import compare
from archlab.search.reporting.report import FORMATS, report
from archlab.search.sections.screen.decide import Screened, probe_tokens, screened, sentences, tokens_of
from archlab.search.sections.seeds.decide import wanted_seeds
from archlab.search.statistics.rank_correlation import FEWEST, ranks, spearman
from tests.search.compare_kit import end_as, make_study, make_trial, measures, pick

NAMES = ("baseline", *"abcdefghijk")
SCREEN = {"train": {"tokens": 10_000}, "keep": 0.25, "calibrate": 4, "audit": 0.25, "correlation": 0.5}
Losses = dict[str, float]


def study(rates: tuple[float, ...] = (), names: tuple[str, ...] = NAMES, **options: Any) -> dict[str, Any]:
    """A record with a screen of twelve variants, without trials."""
    record, _ = make_study(dict.fromkeys(names, 0.0), rates=rates)
    variants = [v | {"tokens": 500_000, "probe": {"tokens": 10_000, "flops_per_token": 9}} for v in record["variants"]]
    return record | {"variants": variants, "screen": SCREEN | options}


def probe(name: str, loss: float) -> dict[str, Any]:
    """A probe that ended: diverged where its loss is not finite."""
    found = make_trial(name, "screen", {"lr": 1e-2}, 0, loss)
    found["result"] |= {"validation": measures(loss)} if math.isfinite(loss) else {}
    if not math.isfinite(loss):
        end_as([found], "diverged")
    return found


def trial(name: str, role: str, settings: dict[str, Any], seed: int, loss: float) -> dict[str, Any]:
    found = make_trial(name, role, settings, seed, loss if math.isfinite(loss) else 0.0)
    found["result"] |= {"validation": measures(loss)} if math.isfinite(loss) else {}
    if not math.isfinite(loss):
        end_as([found], "diverged")
    return found


def in_order(names: tuple[str, ...] = NAMES, step: float = 0.1) -> Losses:
    """A loss for each name, in their order."""
    return {name: 1.0 + step * index for index, name in enumerate(names)}


def wanted(record: dict[str, Any], trials: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    """What a plan without tuning asks for: probes, then the seeds of the variants that are wanted."""
    found, seeds = screened(record, trials), wanted_seeds(record, trials)
    names = [variant["name"] for variant in record["variants"]]
    repeats = [(n, "repeat", seed) for n in names if n in found.wanted for seed in seeds[n]]
    return [*((name, "screen", 0) for name in names), *repeats]


def trained(
    record: dict[str, Any], probes: Losses, losses: Losses, chance: random.Random | None = None
) -> list[list[dict[str, Any]]]:
    """The rows after every ending, asking for what is wanted until nothing more is, in the planned order or by chance.

    A row that is wanted no more leaves the table, as the driver has it.
    """
    ended: dict[tuple[str, str, int], dict[str, Any]] = {}
    found = [list(ended.values())]
    while True:
        asked = wanted(record, found[-1])
        ended = {member: row for member, row in ended.items() if member in asked}
        missing = [member for member in asked if member not in ended]
        if not missing:
            return found
        name, role, seed = chance.choice(missing) if chance else missing[0]
        made = probe(name, probes[name]) if role == "screen" else trial(name, role, {}, seed, losses[name])
        ended[name, role, seed] = made
        found.append(list(ended.values()))


def last(record: dict[str, Any], probes: Losses, losses: Losses) -> Screened:
    return screened(record, trained(record, probes, losses)[-1])


CALIBRATE = screened(study(), []).calibrators
"""The four that calibrate, by the draw of their names."""


def test_nothing_begins_before_all_probes_have_ended() -> None:
    record, probes = study(), [probe(name, loss) for name, loss in in_order().items()]
    for count in range(len(NAMES)):
        found = screened(record, probes[:count])
        assert (found.state, found.wanted, list(found.probes)) == ("probes", frozenset(), list(NAMES[:count]))
    waiting = [*probes[1:], probes[0] | {"state": "running", "result": None}]
    assert screened(record, waiting).state == "probes"
    assert screened(record, probes).wanted == {*CALIBRATE}
    assert len(CALIBRATE) == 4 and "baseline" in CALIBRATE


def shuffled(names: tuple[str, ...]) -> Losses:
    """Losses that rank these names the other way round, and the others in order."""
    losses = in_order()
    return losses | dict(zip(names, reversed([losses[name] for name in names]), strict=True))


CASES: dict[str, tuple[Losses, Losses, dict[str, Any], str, Callable[[Screened], bool]]] = {
    "ranks that agree leave the worst out": (
        in_order(),
        in_order(),
        {},
        "on",
        lambda f: {*f.left_out, *f.wanted} == {*NAMES} and f.kept == NAMES[:3] and bool(f.left_out),
    ),
    "a rho below the threshold at once trains everything": (
        in_order(),
        shuffled(CALIBRATE),
        {},
        "off",
        lambda f: f.last is None and f.first is not None and f.first.rho == pytest.approx(-1) and not f.kept,
    ),
    "equal probes tell nothing": (
        dict.fromkeys(NAMES, 1.0),
        in_order(),
        {},
        "off",
        lambda f: f.first is not None and f.first.rho is None and f.last is None,
    ),
    "equal losses tell nothing": (
        in_order(),
        dict.fromkeys(NAMES, 1.0),
        {},
        "off",
        lambda f: f.first is not None and f.first.rho is None,
    ),
    "what ties with the last that is kept goes on too": (
        in_order() | {"c": 1.2, "d": 1.2},
        in_order(),
        {},
        "on",
        lambda f: f.kept == ("baseline", "a", "b", "c", "d"),
    ),
    "a diverged probe is the worst": (
        in_order() | {"a": math.inf},
        in_order() | {"a": math.inf},
        {"calibrate": 5},
        "on",
        lambda f: f.probes["a"] == math.inf and "a" not in f.kept,
    ),
    "no audit": (in_order(), in_order(), {"audit": 0.0}, "on", lambda f: f.audited == ()),
    "the baseline stays, whatever its probe says": (
        in_order() | {"baseline": 9.0},
        in_order() | {"baseline": 9.0},
        {},
        "on",
        lambda f: "baseline" in f.wanted and "baseline" not in f.kept,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decision(case: tuple[Losses, Losses, dict[str, Any], str, Callable[[Screened], bool]]) -> None:
    probes, losses, options, state, holds = case
    found = last(study(**options), probes, losses)
    assert found.state == state and holds(found), found
    assert found.wanted == ({*NAMES} if state == "off" else {*found.calibrators, *found.kept, *found.audited})
    assert {*NAMES} - found.wanted == {*found.left_out}


def test_a_quarter_of_the_others_is_audited_and_drawn_by_name_alone() -> None:
    found = last(study(), in_order(), in_order())
    others = {*NAMES} - {*found.kept, *found.calibrators}
    assert len(found.audited) == math.ceil(len(others) / 4) and {*found.audited} <= others
    again = last(study(), in_order() | {"baseline": 1.05}, in_order())
    assert again.calibrators == found.calibrators and again.audited == found.audited
    assert last(study() | {"study": "other"}, in_order(), in_order()).calibrators != found.calibrators


def test_shares_are_rounded_up_but_not_for_a_rounding_error() -> None:
    names = ("baseline", *(f"v{index}" for index in range(29)))
    found = last(study(names=names, keep=0.1, audit=0.0), in_order(names), in_order(names))
    assert len(found.kept) == 3


def test_it_is_switched_off_later_where_the_ranks_of_all_that_went_on_disagree() -> None:
    """The four that calibrate agree; the three best by probe are the worst by far."""
    record = study()
    best = [name for name in NAMES if name not in CALIBRATE][:3]
    probes = in_order() | {name: 0.1 * index for index, name in enumerate(best)}
    losses = in_order() | dict.fromkeys(best, 5.0)
    found = last(record, probes, losses)
    assert found.state == "off" and found.wanted == {*NAMES} and found.left_out == ()
    assert found.first is not None and found.first.rho == pytest.approx(1)
    assert found.last is not None and found.last.rho is not None and found.last.rho < 0.5
    assert {*found.losses} == {*NAMES}, "the rest were trained after all"
    told = list(sentences(record, found))
    assert "was switched off, every variant is trained: rho is below 0.5" in told[-1]


@pytest.mark.parametrize("which", ["on", "off at once", "off later"])
def test_the_order_of_endings_and_interruptions_change_nothing(which: str) -> None:
    probes, losses = in_order(), in_order()
    if which == "off at once":
        losses = shuffled(CALIBRATE)
    elif which == "off later":
        losses |= {"baseline": 1.0, **dict.fromkeys([n for n in NAMES if n not in CALIBRATE][:4], 9.0)}
    tables = trained(study(), probes, losses)
    final = {row["key"] for row in tables[-1]}
    for seed in range(3):
        other = trained(study(), probes, losses, random.Random(seed))
        assert {row["key"] for row in other[-1]} == final
    for table in tables[:: max(1, len(tables) // 8)]:  # a run that was killed there reads the table and goes on
        wanted_then = {(name, role, seed) for name, role, seed in wanted(study(), table)}
        assert {(row["variant"], row["role"], row["seed"]) for row in table} <= wanted_then
    decided = [screened(study(), table) for table in tables]
    for before, after in itertools.pairwise(decided):
        assert before.wanted <= after.wanted, "no decision is taken back"
    states = [found.state for found in decided]
    assert states == sorted(states, key=["probes", "calibration", "check", "on", "off"].index)


def test_a_trial_that_is_tried_again_takes_no_other_from_the_table() -> None:
    record = study()
    table = trained(record, in_order(), in_order())[-1]
    before = screened(record, table)
    for role, name in (("screen", "k"), ("repeat", CALIBRATE[-1]), ("repeat", before.kept[0])):
        again = [dict(row) for row in table]
        planned = pick(again, name, role=role, seed=0)[0]
        planned |= {"state": "planned", "result": None, "attempt": 1}
        assert screened(record, again).wanted == before.wanted
        planned |= {"state": "complete", "result": pick(table, name, role=role, seed=0)[0]["result"]}
        assert screened(record, again) == before


def test_a_failed_probe_is_the_worst_and_a_failed_trial_is_no_pair() -> None:
    record, table = study(), trained(study(), in_order(), in_order())[-1]
    end_as(pick(table, "k", role="screen"), "failed")
    assert screened(record, table).probes["k"] == math.inf
    name = CALIBRATE[0]
    end_as(pick(table, name, role="repeat", seed=0), "failed")
    found = screened(record, table)
    assert name not in found.losses and found.first is not None and found.first.n == 3
    assert found.state == "off", "three pairs are too few"


def test_tuned_variants_count_at_the_settings_that_they_chose() -> None:
    record = study(rates=(1e-3, 2e-3), correlation=0.0)
    table = [probe(name, loss) for name, loss in in_order().items()]
    for name, loss in in_order().items():
        tuned = [trial(name, "tune", {"lr": lr}, 0, loss + (lr - 1e-3) * 100) for lr in (1e-3, 2e-3)]
        table += tuned
    assert screened(record, table).state == "calibration", "no repeat: the tuning may not be over"
    for name, loss in in_order().items():
        table += [trial(name, "repeat", {"lr": 1e-3}, 0, loss)]
    found = screened(record, table)
    assert found.state == "on" and found.losses["baseline"] == pytest.approx(1.0)
    pick(table, CALIBRATE[1], role="tune", lr=2e-3)[0] |= {"state": "running", "result": None}
    assert screened(record, table).state == "calibration"
    end_as(pick(table, CALIBRATE[1], role="tune"), "diverged")
    lost = [row for row in table if (row["variant"], row["role"]) != (CALIBRATE[1], "repeat")]
    assert screened(record, lost).losses[CALIBRATE[1]] == math.inf


def test_baselines_and_what_others_are_matched_to_are_never_left_out() -> None:
    record = study(calibrate=4) | {"match": {"kind": "parameters", "to": "k", "by": ["block.ffn.width"]}}
    for variant, base in zip(record["variants"], itertools.cycle(["baseline", "j"]), strict=False):
        variant["baseline"] = base
    found = last(record, in_order(), in_order())
    assert {"baseline", "j", "k"} <= {*found.calibrators} and len(found.calibrators) == 4


def test_seeds_until_resolved_wait_for_the_screen_and_look_at_what_it_leaves() -> None:
    record = study() | {"seeds": list(range(6))}
    record |= {"sequential": {"min": 2, "max": 6, "until": "resolved", "margin": None}}
    tables = trained(record, in_order(), in_order(step=0.0001) | {"k": 2.0})
    for table in tables:
        if screened(record, table).state not in ("on", "off"):
            assert {row["seed"] for row in table} <= {0, 1}
    found = screened(record, tables[-1])
    counts = {name: len(seeds) for name, seeds in wanted_seeds(record, tables[-1]).items()}
    assert set(counts) == found.wanted and max(counts.values()) > 2
    assert {
        row["key"] for row in trained(record, in_order(), in_order(step=0.0001) | {"k": 2.0}, random.Random(1))[-1]
    } == {row["key"] for row in tables[-1]}


# reports


def test_a_report_says_what_was_left_out_and_corrects_for_what_was_trained() -> None:
    record = study()
    table = trained(record, in_order(), in_order())[-1]
    found, comparison = screened(record, table), compare(record, table)
    rows = {row["variant"]: row for row in comparison.table.to_dict("records")}
    assert {name for name, row in rows.items() if row["verdict"] == "left out"} == {*found.left_out}
    for name in found.left_out:
        assert rows[name]["missing"] == 0 and rows[name]["n"] == 0 and math.isnan(rows[name]["delta"])
        assert rows[name]["probe_loss"] == found.probes[name] and rows[name]["probe_rank"] == NAMES.index(name) + 1
        assert not any(note.startswith(f"{name}: not run") for note in comparison.notes)
    assert comparison.noise["comparisons"] == len(found.wanted) - 1
    alone = compare(
        {**record, "screen": None, "variants": [v for v in record["variants"] if v["name"] in found.wanted]}, table
    )
    assert comparison.noise == alone.noise
    trials = comparison.trials
    assert (
        len(trials[trials["role"] == "screen"]) == len(NAMES)
        and not trials[trials["role"] == "screen"]["reported"].any()
    )
    for format in FORMATS:
        printed = report(comparison, format)
        assert "left out" in printed, format
        assert all(name in printed for name in found.left_out)
    told = json.loads(report(comparison, "json"))["screened"]
    assert (told["state"], told["left_out"], told["first"]["n"]) == ("on", list(found.left_out), 4)
    assert told["saved_tokens"] == 3 * 500_000 * len(found.left_out) == tokens_of(record, found.left_out)
    assert told["probe_tokens"] == probe_tokens(record) == 120_000


def test_what_brackets_spare_anyway_is_not_saved_by_a_screen() -> None:
    record = study(rates=(1e-3, 2e-3, 5e-3, 1e-2)) | {"seeds": [0]}
    assert tokens_of(record, ["a"]) == 4 * 500_000
    record["tune"]["brackets"] = {"rungs": [0.25], "keep": 0.5}
    assert tokens_of(record, ["a", "b"]) == 2 * (2 + 2 * 0.25) * 500_000


def test_a_diverged_probe_is_no_trial_of_its_variant() -> None:
    record = study()
    table = trained(record, in_order() | {"a": math.inf}, in_order())[-1]
    comparison = compare(record, table)
    row = comparison.table.set_index("variant").loc["a"]
    assert row["diverged"] == 0 and row["probe_loss"] == math.inf
    assert not any(note.startswith("a: ") for note in comparison.notes)
    assert "diverged (12)" in report(comparison, "md")


def test_a_report_on_the_way_says_what_is_waited_for() -> None:
    record = study()
    for table, said in (
        ([], "0 of 12 probes have ended"),
        ([probe(n, loss) for n, loss in in_order().items()], "waits for the 4 variants that calibrate it"),
    ):
        comparison = compare(record, table)
        assert any(said in note for note in comparison.notes)
        assert set(comparison.table["verdict"]) == {"baseline", "incomplete"}
        assert all(report(comparison, format) for format in FORMATS)


# Spearman


def test_rho_is_scipys_with_ties_and_infinite_values() -> None:
    rng = np.random.default_rng(0)
    for n in (4, 7, 20):
        one, other = rng.integers(0, 5, n).astype(float), rng.normal(size=n)
        expected = stats.spearmanr(one, other).statistic
        assert spearman(list(one), list(other)).rho == pytest.approx(expected)
    assert ranks([2.0, math.inf, 1.0, math.inf]) == [2.0, 3.5, 1.0, 3.5]


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ([1, 2, 3], [1, 2, 3], "there is none: 3 pairs are too few"),
        ([1, 1, 1, 1], [1, 2, 3, 4], "there is none: all are equal"),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], "1.00 [0.36, 1.00]"),
        ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], "-1.00 [-1.00, -0.36]"),
    ],
    ids=["too few", "equal", "all", "reversed"],
)
def test_interval_in_words(one: list[float], other: list[float], told: str) -> None:
    assert str(spearman(one, other)) == told


@pytest.mark.parametrize(("n", "r"), [(6, 0.5), (12, 0.0), (12, 0.8), (30, 0.8)], ids=str)
def test_interval_covers_the_rho_of_its_population(n: int, r: float) -> None:
    """Of bivariate normal pairs, whose rho is 6 / pi asin(r / 2)."""
    rng, truth, rounds = np.random.default_rng(n), 6 / math.pi * math.asin(r / 2), 1500
    inside = 0
    for _ in range(rounds):
        x = rng.normal(size=n)
        y = r * x + math.sqrt(1 - r * r) * rng.normal(size=n)
        found = spearman(list(x), list(y))
        assert found.low is not None and found.high is not None
        inside += found.low <= truth <= found.high
    assert n >= FEWEST and inside / rounds > 0.92
