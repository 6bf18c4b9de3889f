"""Verdicts on claims: the intervals of any two variants by numpy, what holds, and how often chance alone says so."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from archlab.search.comparison.compare import compare
from archlab.search.formatting.tables import DASH
from archlab.search.reporting.report import report
from archlab.search.results.comparison import Comparison
from archlab.search.results.losses import lay_out
from archlab.search.results.pairs import Differences
from archlab.search.results.selection import with_baselines
from archlab.search.sections.published.claims import claims_frame
from archlab.search.sections.published.told import decided_by
from archlab.search.sections.rooms import select
from archlab.search.statistics.sequential import always_valid_critical
from tests.search.compare_kit import end_as, make_study, measures, pick
from tests.search.noise_kit import by_hand

EFFECTS = {"baseline": 0.0, "a": -0.1, "b": -0.06, "c": 0.0, "d": 0.08}


def claim(
    lower: str = "", than: str = "", equal: str = "", margin: float | None = None, on: str = "perplexity", **more: Any
) -> dict[str, Any]:
    """A claim as the store keeps it; rows are named as variants."""
    pairs = [*product(lower.split(), than.split())] if lower else [(equal.split()[0], equal.split()[1])]
    told = {"claim": f"{lower or equal}", "where": "", "testable": None, "margin": margin, "on": on}
    return {**told, "pairs": [list(pair) for pair in pairs], **more}


def with_claims(record: dict[str, Any], *claims: dict[str, Any], left_out: str = "") -> dict[str, Any]:
    """The record with a published table whose rows are the study's own variants, but for some."""
    names = [variant["name"] for variant in record["variants"] if variant["name"] not in left_out.split()]
    return record | {
        "published": {
            "table": "paper.table",
            "source": {"title": "A paper", "arxiv": "", "printed": ""},
            "caption": "",
            "columns": ["ppl"],
            "measures": {"ppl": {"number": "perplexity", "times": 1.0}},
            "rows": {name: [6.0 + place] for place, name in enumerate(names)},
            "claims": list(claims),
            "variants": {name: {"rows": [name], "group": ""} for name in names},
            "without": [],
        }
    }


def judged(found: Comparison) -> list[str]:
    return [str(verdict) for verdict in found.claims["verdict"]]


def measure(trials: list[dict[str, Any]], variant: str, label: str, **values: list[float]) -> None:
    """What was measured of a variant's seeds."""
    for place, trial in enumerate(pick(trials, variant, role="repeat")):
        own = {name: found[place] for name, found in values.items()}
        trial.setdefault("measures", []).append(
            {"measure": label, "version": 1, "values": own, "curves": {}, "grids": {}}
        )


# Over cells


def test_a_claim_is_summed_up_over_the_cells_that_a_study_has() -> None:
    effects = {f"{name} {cell}": effect for cell in ("x", "y") for name, effect in (("base", 0.0), ("a", -0.1))}
    effects["a y"] = 0.1
    record, trials = make_study(effects, seeds=4, rates=())
    told = with_claims(record, claim("a", "base"), claim("base", "a", on="accuracy"))
    told["published"]["rows"] = {"base": [6.0], "a": [7.0]}
    told["published"]["variants"] = {each: {"rows": [each[:-2]], "group": f"recipe={each[-1]}"} for each in effects}
    text = report(compare(told, trials))
    block = text[text.index("how far each claim goes") :].splitlines()[:5]
    assert block[1].split() == ["claim", "holds", "in", "reversed", "in", "neither", "in"]
    first, second = (line for line in block if line.startswith(("a ", "base ")))
    assert first.split() == ["a", "recipe=x", "recipe=y", DASH]
    assert second.split() == ["base", DASH, DASH, "all", "2"]


def test_a_claim_is_judged_by_the_mean_of_its_differences_over_recipes_too() -> None:
    """Beyond noise under none of two recipes, and on average; a measure as well, and as few claims share its error."""
    cells = {f"{row} [recipe={cell}]": (row, cell) for cell in ("x", "y") for row in ("base", "a")}
    record, trials = make_study({name: -0.028 * (row == "a") for name, (row, _) in cells.items()}, 4, (), 0.012)
    for name, (row, _) in cells.items():
        measure(trials, name, "gates", mean=[0.5 - 0.1 * (row == "a") + 0.001 * seed for seed in range(4)])
    told = with_claims(record, claim("a", "base"), claim("a", "base", on="gates.mean", claim="lower gates"))
    told["recipes"] = {"named": {}, "rows": {name: list(cell) for name, cell in cells.items()}}
    for variant in told["variants"]:
        variant |= {"baseline": variant["name"].replace("a [", "base [")}
    told["published"]["rows"] = {"base": [6.0], "a": [7.0]}
    told["published"]["variants"] = {
        name: {"rows": [row], "group": f"recipe={cell}"} for name, (row, cell) in cells.items()
    }
    found = compare(told, trials)
    claims = found.claims.set_index(["on", "group"])
    assert claims.loc[("perplexity", "mean of the recipes"), "verdict"] == "holds"
    assert {*claims.loc["perplexity"]["verdict"][:2]} == {"undecided"}
    assert claims["comparisons"].tolist() == [2, 2, 2, 2, 1, 1]
    (pair,) = claims.loc[("gates.mean", "mean of the recipes"), "pairs"]
    assert pair["difference"] == pytest.approx(-0.1) and pair["n"] == 4
    text = report(found)
    block = text[text.index("how far each claim goes") :].splitlines()[:5]
    assert block[1].split()[:3] == ["claim", "on", "average"]
    assert next(line for line in block if line.startswith("a ")).split()[:2] == ["a", "holds"]


# Intervals


def test_the_interval_of_any_pair_is_that_of_its_moderated_noise_and_its_documents() -> None:
    record, trials = make_study(EFFECTS, seeds=4, rates=())
    found = compare(with_claims(record, claim("a", "b c"), claim("b", "d")), trials)
    tests = np.array([[t["result"]["test"]["loss"] for t in pick(trials, name)] for name in EFFECTS])
    for row in found.claims.to_dict("records"):
        for pair in row["pairs"]:
            one, other = ([*EFFECTS].index(pair[name]) for name in ("lower", "than"))
            shares = []
            for place in (one, other):
                mine = [t["documents"] for t in pick(trials, [*EFFECTS][place])]
                nll, size = (np.mean([d[key] for d in mine], axis=0) for key in ("nll", "tokens"))
                shares.append((nll - nll.sum() / size.sum() * size) / size.sum())
            documents = 80 / 79 * ((shares[0] - shares[1]) ** 2).sum()
            variance, df = by_hand(tests, one, other, {0})
            seeds = variance / 4
            alpha = 0.05 / 2  # two claims
            critical = [stats.t.ppf(1 - alpha / 2, each) for each in (df, 79)]
            weighted = (seeds * critical[0] + documents * critical[1]) / (seeds + documents)
            half = weighted * np.sqrt(seeds + documents)
            middle = (tests[one] - tests[other]).mean()
            assert pair["difference"] == pytest.approx(middle)
            assert (pair["low"], pair["high"]) == pytest.approx((middle - half, middle + half))
            assert pair["n"] == 4


def test_one_comparison_is_the_interval_of_the_table() -> None:
    record, trials = make_study({"baseline": 0.0, "a": -0.01}, seeds=3)
    found = compare(with_claims(record, claim("a", "baseline")), trials)
    row = found.table.set_index("variant").loc["a"]
    pair = found.claims["pairs"][0][0]
    assert (pair["low"], pair["high"]) == pytest.approx((row["delta_low"], row["delta_high"]))


def test_variants_of_other_batches_have_welchs_interval() -> None:
    record, trials = make_study(EFFECTS, seeds=4, rates=(), paired=False)
    for trial in trials:
        trial["documents"] = None
    pair = compare(with_claims(record, claim("a", "d")), trials).claims["pairs"][0][0]
    one, other = ([t["result"]["test"]["loss"] for t in pick(trials, name)] for name in ("a", "d"))
    interval = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    assert (pair["low"], pair["high"]) == pytest.approx((interval.low, interval.high))


def test_a_sequential_study_has_the_interval_that_holds_at_every_number_of_seeds() -> None:
    record, trials = make_study(EFFECTS, seeds=4, rates=())
    for trial in trials:
        trial["documents"] = None
    record["sequential"] = {"min": 2, "max": 4, "until": "resolved", "margin": None}
    found = compare(with_claims(record, claim("a", "b"), claim("c", "d")), trials)
    tests = np.array([[t["result"]["test"]["loss"] for t in pick(trials, name)] for name in EFFECTS])
    residual = tests - tests.mean(1, keepdims=True) - tests.mean(0) + tests.mean()
    half = always_valid_critical(4, 12, 12, 2) * np.sqrt(2 * (residual**2).sum() / 12 / 4)
    pair = found.claims["pairs"][0][0]
    assert pair["high"] - pair["low"] == pytest.approx(2 * half)


def test_what_was_measured_has_the_interval_of_its_own_differences() -> None:
    record, trials = make_study(EFFECTS)
    one, other = [0.1, 0.14, 0.12], [0.5, 0.58, 0.51]
    measure(trials, "a", "gates", gate_mean=one)
    measure(trials, "b", "gates", gate_mean=other)
    found = compare(with_claims(record, claim("a", "b", on="gates.gate_mean"), claim("a", "b")), trials)
    pair = found.claims["pairs"][0][0]
    interval = stats.ttest_rel(one, other).confidence_interval(0.95)
    assert (pair["low"], pair["high"]) == pytest.approx((interval.low, interval.high))
    assert found.claims["comparisons"].tolist() == [1, 1], "claims on other numbers don't share the error"
    assert judged(found) == ["holds", "holds"]


# Verdicts


@pytest.mark.parametrize(
    ("asked", "verdict", "deciding"),
    [
        (claim("a", "b c d"), "holds", 3),
        (claim("a b", "c d"), "holds", 4),
        (claim("d", "a"), "reversed", 1),
        (claim("a c", "b d"), "reversed", 1),
        (claim("c", "baseline"), "undecided", 1),
        (claim("a c", "baseline"), "undecided", 1),
        (claim(equal="c baseline", margin=0.05), "holds", 1),
        (claim(equal="a baseline", margin=0.05), "reversed", 1),
        (claim(equal="c baseline", margin=0.001), "undecided", 1),
        (claim("a", "e"), "not covered", 0),
        (claim("a", "b", on="gates.gate_mean"), "not covered", 0),
    ],
    ids=lambda value: value["claim"] if isinstance(value, dict) else str(value),
)
def test_a_claim_gets_its_verdict(asked: dict[str, Any], verdict: str, deciding: int) -> None:
    record, trials = make_study(EFFECTS, rates=())
    found = compare(with_claims(record, asked), trials)
    assert judged(found) == [verdict]
    assert sum(pair["decides"] for pair in found.claims["pairs"][0]) == deciding
    assert found.claims["n"][0] == (3 if deciding else 0)
    assert bool(found.claims["reason"][0]) == (verdict == "not covered")


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [("reversed", "b - d: +0.25 [+0.2, +0.3]"), ("undecided", "a - d: +0.2 [-0.1, +0.5]")],
)
def test_the_pair_that_decides_is_the_surest_of_those_reversed_and_else_the_furthest(
    verdict: str, expected: str
) -> None:
    far = {"lower": "a", "than": "d", "difference": 0.2, "low": 0.01 if verdict == "reversed" else -0.1, "high": 0.5}
    sure = {"lower": "b", "than": "d", "difference": 0.25, "low": 0.2, "high": 0.3}
    pairs = [{**pair, "diverged": "", "decides": True} for pair in (far, sure)]
    row = {"verdict": verdict, "reason": "", "margin": None, "pairs": pairs}
    assert decided_by(row) == f"{expected}; 2 of 2 pairs"


def test_a_margin_in_nats_is_not_held_against_bits() -> None:
    record, trials = make_study(EFFECTS)
    layout = lay_out(with_baselines(record), select(with_baselines(record), trials))
    bits = Differences(record, select(with_baselines(record), trials), replace(layout, unit="bits/byte"))
    found = claims_frame(with_claims(record, claim(equal="c baseline", margin=0.05), claim("a", "b")), bits)
    assert found["verdict"].tolist()[0] == "not covered" and "bits/byte" in found["reason"][0]
    assert found["verdict"].tolist()[1] != "not covered"


def test_claims_share_the_error_whatever_came_of_them() -> None:
    record, trials = make_study(EFFECTS)
    claims = [claim("a", "b"), claim("c", "d"), claim("a", "d"), claim("a", "e")]
    found = compare(with_claims(record, *claims), trials)
    assert found.claims["comparisons"].tolist() == [3] * 4, "what is not covered is not tested"
    one = compare(with_claims(record, claims[0]), trials).claims["pairs"][0][0]
    three = found.claims["pairs"][0][0]
    assert three["high"] - three["low"] > one["high"] - one["low"]


@pytest.mark.parametrize(
    ("baseline", "uniform", "verdict", "reason"),
    [
        ([0.5, 0.52, 0.48], 0.02, "holds", ""),
        ([0.05, 0.06, 0.055], 0.02, "not testable at this scale", "is 0.055, below 3 times"),
        (None, None, "not covered", "which was not measured"),
    ],
    ids=["a sink", "no sink", "not measured"],
)
def test_a_claim_may_need_something_of_our_data(
    baseline: list[float] | None, uniform: float, verdict: str, reason: str
) -> None:
    record, trials = make_study(EFFECTS)
    needs = {"number": "first_token_attention", "of": "baseline", "at_least": 3.0}
    needs["times"] = "first_token_attention.first_token_attention_uniform"
    if baseline:
        own = {"first_token_attention": baseline, "first_token_attention_uniform": [uniform] * 3}
        measure(trials, "baseline", "first_token_attention", **own)
    found = compare(with_claims(record, claim("a", "b", testable=needs)), trials)
    assert judged(found) == [verdict]
    assert reason in found.claims["reason"][0]


@pytest.mark.parametrize(
    ("ended", "verdicts"),
    [
        ({"d": (0, 1, 2)}, ["holds", "reversed"]),
        ({"d": (0, 1)}, ["undecided", "undecided"]),
        ({"d": (0, 1, 2), "a": (1,)}, ["undecided", "undecided"]),
        ({"d": (0, 1, 2), "a": (0, 1, 2)}, ["undecided", "undecided"]),
    ],
    ids=["at all seeds", "at some", "the other at some", "both"],
)
def test_what_diverged_at_all_seeds_is_higher_than_what_finished(
    ended: dict[str, tuple[int, ...]], verdicts: list[str]
) -> None:
    record, trials = make_study(EFFECTS)
    for name, seeds in ended.items():
        for seed in seeds:
            end_as(pick(trials, name, role="repeat", seed=seed), "diverged")
    found = compare(with_claims(record, claim("a", "d"), claim("d", "a")), trials)
    assert judged(found) == verdicts
    if verdicts[0] == "holds":
        pair = found.claims["pairs"][0][0]
        assert (pair["diverged"], pair["difference"], found.claims["n"][0]) == ("d", None, 3)


def test_one_seed_that_diverged_says_nothing() -> None:
    record, trials = make_study(EFFECTS, seeds=1)
    end_as(pick(trials, "d", role="repeat"), "diverged")
    assert judged(compare(with_claims(record, claim("a", "d")), trials)) == ["undecided"]


def test_variants_that_were_asked_other_things_are_not_compared() -> None:
    record, trials = make_study(EFFECTS)
    record["variants"][1]["test"] = "another text"
    found = compare(with_claims(record, claim("a", "d"), claim("b", "d")), trials)
    assert judged(found) == ["not covered", "holds"]
    assert "other objectives, tokenizers or test texts" in found.claims["reason"][0]


def test_every_cell_of_a_grid_has_its_own_verdict() -> None:
    names = [f"{name} [lr={rate}]" for rate in (1, 2) for name in ("baseline", "g1")]
    record, trials = make_study(dict(zip(names, (0.0, -0.1, 0.0, 0.1), strict=True)))
    for variant, base in zip(record["variants"], (names[0], names[0], names[2], names[2]), strict=True):
        variant["baseline"] = base
    record = with_claims(record, {**claim("g1", "baseline"), "pairs": [["g1", "baseline"]]})
    record["published"]["variants"] = {
        name: {"rows": [name.partition(" ")[0]], "group": name.partition("[")[2][:-1]} for name in names
    }
    record["published"]["rows"] = {"baseline": [6.0], "g1": [5.0]}
    found = compare(record, trials)
    assert found.claims["group"].tolist() == ["lr=1", "lr=2"]
    assert judged(found) == ["holds", "reversed"]
    assert found.claims["comparisons"].tolist() == [2, 2]


# Chance


def chance(
    claims: list[dict[str, Any]], effects: dict[str, float], studies: int, sequential: bool = False
) -> pd.Series:
    """How often each claim was said to hold and to be reversed, in simulated studies of noise alone around effects."""
    record, trials = make_study(dict.fromkeys(effects, 0.0), seeds=3, rates=())
    record = with_baselines(with_claims(record, *claims))
    if sequential:
        record["sequential"] = {"min": 2, "max": 3, "until": "resolved", "margin": None}
    rng, counts = np.random.default_rng(11), []
    for _ in range(studies):
        noise = rng.normal(size=3) + rng.normal(size=(len(effects), 3))
        for trial in trials:
            place = [*effects].index(trial["variant"])
            loss = 30 + effects[trial["variant"]] + noise[place, trial["seed"]]
            trial["result"] = trial["result"] | {"test": measures(loss), "validation": measures(loss)}
            trial["documents"] = None
        selections = select(record, trials)
        differences = Differences(record, selections, lay_out(record, selections))
        counts.append(claims_frame(record, differences)["verdict"].tolist())
    return pd.DataFrame(counts).apply(lambda column: column.value_counts()).fillna(0).T


@pytest.mark.slow
@pytest.mark.parametrize("sequential", [False, True], ids=["fixed seeds", "until resolved"])
def test_a_claim_of_equal_variants_holds_or_is_reversed_no_more_often_than_its_level(sequential: bool) -> None:
    """Three claims: of one pair, of two and of four; in the last only one pair is not as claimed."""
    effects = {"a": 0.0, "b": 0.0, "c": 0.0, "low": -40.0, "high": 40.0}
    claims = [claim("a", "b"), claim("a", "b c"), claim("low a", "b high")]
    studies = 1200
    found = chance(claims, effects, studies, sequential).reindex(columns=["holds", "reversed", "undecided"]).fillna(0)
    for verdict in ("holds", "reversed"):
        for place in range(3):
            count = int(found.loc[place, verdict])
            assert stats.binomtest(count, studies, 0.05 / 3, alternative="greater").pvalue > 1e-3, (verdict, place)
    if not sequential:
        for place in (0, 2):  # half of the two-sided level lies on either side
            assert stats.binomtest(int(found.loc[place, "holds"]), studies, 0.05 / 6).pvalue > 1e-3


def test_a_planted_order_is_found() -> None:
    found = chance([claim("a", "b c")], {"a": -6.0, "b": 0.0, "c": 0.0, "d": 0.0}, 60)
    assert found.loc[0, "holds"] > 50
