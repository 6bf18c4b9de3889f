"""Scaling laws: what was planted is found within its interval as often as that says, and what is not there is not."""

from __future__ import annotations

import csv
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from archlab.search.comparison.compare import compare
from archlab.search.formatting.tables import DASH
from archlab.search.planning.plan import plan
from archlab.search.reporting.report import report, to_plain
from archlab.search.results.comparison import Comparison
from archlab.search.statistics.compute_gain import gain
from archlab.search.statistics.power_laws import Estimate, Unidentified, frontier, isoflops, minimum, power_law, surface
from archlab.search.study.load import load_study
from tests.search.compare_kit import FINGERPRINT, make_study, measures, retold
from tests.search.study_files import write_study

E, A, B, ALPHA, BETA = 1.7, 60.0, 50.0, 0.34, 0.28


def planted(n: Any, d: Any) -> Any:
    """The loss surface of these tests."""
    return E + A * np.asarray(n, float) ** -ALPHA + B * np.asarray(d, float) ** -BETA


def crossed(sizes: int = 4) -> tuple[Any, Any]:
    """N and D of a ladder whose sizes are crossed with lengths."""
    steps = 4.0 ** np.arange(sizes)
    n, d = np.meshgrid(1e5 * steps, 1e6 * steps)
    return n.ravel(), d.ravel()


def holds(found: Estimate, value: float) -> bool:
    return (found.low is None or found.low <= value) and (found.high is None or value <= found.high)


def covers(hits: list[bool], level: float = 0.95) -> bool:
    """Whether so many intervals may come from a method that covers at its level: not the rarest thousandth."""
    return sum(hits) >= int(binom.ppf(1e-3, len(hits), level))


def test_a_planted_power_law_is_within_its_interval() -> None:
    x, hits = 1e5 * 2.0 ** np.arange(4), []
    for seed in range(300):
        noise = np.random.default_rng(seed).normal(0, 0.01, 4)
        found = power_law(x, 8 * x**-0.07 * np.exp(noise))
        hits.append((holds(found["b"], 0.07), holds(found["a"], 8.0)))
    exact = binom.ppf([1e-3, 1 - 1e-3], 300, 0.95)
    for each in zip(*hits, strict=True):
        assert exact[0] <= sum(each) <= exact[1], "exact for such noise: not too wide either"


def test_a_surface_without_noise_is_found() -> None:
    n, d = crossed()
    found = {name: each.value for name, each in surface(n, d, planted(n, d)).items()}
    assert found == pytest.approx(
        {"E": E, "A": A, "B": B, "alpha": ALPHA, "beta": BETA, "a": BETA / (ALPHA + BETA)}, rel=2e-3
    )


@pytest.mark.slow
def test_a_planted_surface_is_within_its_intervals() -> None:
    n, d = crossed()
    hits: dict[str, list[bool]] = {}
    wide = []
    for seed in range(30):
        noise = np.random.default_rng(seed).normal(0, 0.004, len(n))
        found = surface(n, d, planted(n, d) * np.exp(noise))
        for name, value in {"E": E, "alpha": ALPHA, "beta": BETA, "a": BETA / (ALPHA + BETA)}.items():
            hits.setdefault(name, []).append(holds(found[name], value))
        wide.append((found["a"].high or 1) - (found["a"].low or 0))
    assert all(covers(each) for each in hits.values()), {name: sum(each) for name, each in hits.items()}
    assert np.median(wide) < 0.12, "and they tell something"


def test_the_huber_loss_does_without_an_outlier() -> None:
    n, d = crossed()
    loss = planted(n, d)
    loss[5] *= 1.05
    found = surface(n, d, loss)
    assert found["alpha"].value == pytest.approx(ALPHA, rel=0.02)
    assert found["beta"].value == pytest.approx(BETA, rel=0.02)


def test_the_minimum_of_a_parabola_is_within_its_interval() -> None:
    n, compute, hits = 1e5 * 2.0 ** np.arange(6), 1e13, []
    best = 4.5e5
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(0, 0.003, 6)
        found = minimum(n, compute / (6 * n), np.full(6, compute), 3 + 0.05 * np.log(n / best) ** 2 + noise)
        hits.append(holds(found.parameters, best))
        assert found.tokens == pytest.approx(compute / (6 * found.parameters.value), rel=1e-6)
    assert covers(hits), sum(hits)


def test_isoflop_rungs_are_those_of_equal_compute() -> None:
    n = np.array([1e5, 1e5, 2e5, 2e5, 4e5])
    found = [sorted(places.tolist()) for places in isoflops(n, np.array([1e12, 3e12, 1.01e12, 3.05e12, 9e12]))]
    assert found == [[0, 2], [1, 3]]
    assert frontier(np.array([1.0, 2.0, 2.0, 3.0]), np.array([3.0, 2.0, 2.5, 2.2])).tolist() == [0, 1]


@pytest.mark.parametrize("factor", [1.3, 0.8], ids=["better", "worse"])
def test_a_planted_gain_is_within_its_interval(factor: float) -> None:
    x = 1e12 * 4.0 ** np.arange(5)
    hits = []
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(0, 0.002, 10)
        ours = 0.95 * x  # the variant computes a little less
        base, loss = planted(x / 1e7, x / 1e7) * np.exp(noise[:5]), planted(ours * factor / 1e7, ours * factor / 1e7)
        found = gain(x, base, ours, loss * np.exp(noise[5:]))
        hits.append(holds(found.gain, factor))
    assert covers(hits), sum(hits)
    assert np.median(found.rungs) == pytest.approx(factor, rel=0.2)


def test_the_gain_of_a_rung_is_on_the_side_of_its_difference() -> None:
    """A baseline that lies off the common curve at a rung says nothing of the variant that was trained beside it."""
    x, off = 1e12 * 4.0 ** np.arange(4), np.array([0.02, -0.01, -0.02, 0.01])
    ours = np.array([-0.004, 0.004, -0.004, 0.004])
    found = gain(x, 9 * x**-0.05 * np.exp(off), x, 9 * x**-0.05 * np.exp(off + ours))
    assert [each > 1 for each in found.rungs] == [True, False, True, False]


def test_a_gain_that_grows_with_compute_says_so() -> None:
    x = 1e12 * 4.0 ** np.arange(6)
    found = gain(x, 9 * x**-0.05, x, 9 * (x * 1.2 * (x / x[0]) ** 0.1) ** -0.05)
    assert found.trend.value == pytest.approx(0.1, rel=1e-6)
    same = gain(x, 9 * x**-0.05, x, 9 * (1.2 * x) ** -0.05)
    assert same.gain.value == pytest.approx(1.2) and same.trend.value == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("factor", [2.0, 0.5], ids=["better", "worse"])
def test_a_gain_does_not_grow_because_the_curve_is_bent(factor: float) -> None:
    """A floor bends the curve: the same factor of compute is less loss where the curve is flatter."""
    x, hits = 1e12 * 4.0 ** np.arange(5), []
    base, ours = planted(x / 1e7, x / 1e7), planted(factor * x / 1e7, factor * x / 1e7)
    plain = gain(x, base, x, ours)
    assert plain.rungs == pytest.approx([factor] * 5, rel=0.05)
    assert plain.trend.value == pytest.approx(0, abs=5e-3)
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(0, 0.002, 10)
        found = gain(x, base * np.exp(noise[:5]), x, ours * np.exp(noise[5:]))
        hits.append((holds(found.gain, factor), holds(found.trend, 0.0)))
    assert all(covers(list(each)) for each in zip(*hits, strict=True))


@pytest.mark.parametrize("rungs", [2, 3])
def test_a_gain_of_few_rungs_covers(rungs: int) -> None:
    """Of one degree of freedom, and of two; where none can be told that is right too."""
    x, hits = 1e12 * 4.0 ** np.arange(rungs), []
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(0, 0.01, 2 * rungs)
        base, ours = (9 * (factor * x) ** -0.05 for factor in (1.0, 1.3))
        with suppress(Unidentified):
            hits.append(holds(gain(x, base * np.exp(noise[:rungs]), x, ours * np.exp(noise[rungs:])).gain, 1.3))
    assert len(hits) > 20 and covers(hits + [True] * (200 - len(hits)))


N, D = crossed()
LINE = 1e5 * 4.0 ** np.arange(6)
UNIDENTIFIED = {
    "five constants of four rungs": (lambda: surface(N[:4], D[:4], planted(N, D)[:4]), "need six rungs, found 4"),
    "two sizes": (lambda: surface(np.tile([1e5, 2e5], 4), D[:8], planted(N, D)[:8]), "needs three sizes, found 2"),
    "tokens by a rule": (lambda: surface(LINE, 20 * LINE, planted(LINE, LINE)), "the two terms are one; cross them"),
    "one compute": (lambda: power_law(np.full(3, 1e12), np.array([3.0, 2.9, 2.8])), "do not differ in it"),
    "two sizes at a compute": (lambda: minimum(N[:2], D[:2], N[:2] * D[:2], D[:2]), "needs three sizes at a compute"),
    "best beyond the rungs": (
        lambda: minimum(LINE, 1 / LINE, LINE * 0 + 1, (np.log(LINE) - 30) ** 2),
        "more parameters",
    ),
    "no minimum": (lambda: minimum(LINE, 1 / LINE, LINE * 0 + 1, 9 - (np.log(LINE) - 14) ** 2 / 9), "bend downwards"),
    "a flat baseline": (lambda: gain(LINE, 3 + np.sin(LINE) / 9, LINE, 3 + np.cos(LINE) / 9), "no compute makes up"),
    "one rung": (lambda: gain(LINE[:1], LINE[:1], LINE[:1], LINE[:1]), "two computes"),
}


@pytest.mark.parametrize("name", UNIDENTIFIED)
def test_what_the_rungs_do_not_tell_is_said(name: str) -> None:
    fit, said = UNIDENTIFIED[name]
    with pytest.raises(Unidentified, match=said):
        fit()


def test_two_rungs_have_no_interval() -> None:
    assert power_law(LINE[:2], planted(LINE, LINE)[:2])["b"].exact


def compared(folder: Path, ladder: str, factor: float = 1.3, domains: bool = False, lost: str = "") -> Comparison:
    """A study whose trials have the losses of the planted surface, `gated` those of `factor` times the compute; the
    first rung of `lost` diverged."""
    train = "train: {data: {text: corpus.txt}, context: 32, batch: 4, lr: 1e-3}"
    planned = plan(load_study(write_study(folder, train=train, ladder=ladder)), folder / "data")
    record, trials = planned.record(), []
    diverged = {next((each.name for each in planned.variants if each.base == lost), "")}
    for row in planned.rows([]):
        variant = next(each for each in planned.variants if each.name == row.variant)
        n, d = variant.figures["non_embedding"], variant.recipe.tokens
        own = factor**0.5 if variant.base == "gated" else 1.0
        loss = float(planted(n * own, d * own))
        test = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2)}
        result = {"test": test, "validation": test, "tokens": d, "fingerprint": FINGERPRINT}
        documents = None
        if domains:
            each = {"tokens": np.array([10, 10]), "bytes": np.array([10, 10]), "domain": np.array([0, 1])}
            documents = each | {"nll": np.array([10 * loss, 5 * loss])}
        trials.append(
            {"key": row.trial.key, "variant": row.variant, "role": row.role, "settings": row.settings, "seed": row.seed}
            | {
                "state": "diverged" if row.variant in diverged else "complete",
                "attempt": 1,
                "reused": False,
                "reason": None,
                "folder": "",
                "until": None,
                "curve": [],
            }
            | {"result": result, "documents": documents}
        )
    for variant in record["variants"] if domains else ():
        variant["domains"] = ["prose", "code"]
    return compare(record, trials)


def test_a_gain_owes_nothing_to_the_seeds_of_a_variant() -> None:
    """Both have the same losses at each of four rungs; the variant has two of the five seeds, the lucky ones."""
    luck = [-0.05, -0.05, 0.08, 0.08, 0.08]
    names = {f"{row} {rung}": 0.0 for rung in range(4) for row in ("base", "gated")}
    record, trials = make_study(names, seeds=5, rates=())
    record |= {"ladder": {"count": "parameters", "lengths": 1}}
    for variant in record["variants"]:
        row, rung = variant["name"].split()
        size = 10**5 * 4 ** int(rung)
        variant |= {"baseline": f"base {rung}", "series": row, "rung": rung, "tokens": 10**6}
        variant |= dict.fromkeys(("parameters", "non_embedding", "training_flops_per_token"), size)
    for trial in trials:
        test = measures(3.0 - 0.2 * int(trial["variant"][-1]) + luck[trial["seed"]])
        trial["result"] = {**trial["result"], "tokens": 10**6, "test": test}
    fewer = [trial for trial in trials if trial["variant"].startswith("base") or trial["seed"] < 2]
    gains = compare(record, fewer).rungs.set_index("variant")["gain"]
    assert [gains[f"gated {rung}"] for rung in range(4)] == pytest.approx([1.0] * 4, abs=0.02)


SIZES = "sizes: {d_model: [32, 64, 128, 256], block.attention.heads: [2, 4, 8, 16]}"


def fit(found: Comparison, law: str, name: str, series: str = "baseline", of: str = "test") -> dict[Any, Any]:
    (row,) = (
        row
        for row in found.scaling.to_dict("records")
        if (row["law"], row["name"], row["series"], row["of"]) == (law, name, series, of)
    )
    return row


def test_a_crossed_ladder_is_reported_with_its_surface_and_gain(tmp_path: Path) -> None:
    found = compared(tmp_path, f"ladder: {{{SIZES}, tokens: [20k, 80k, 320k, 1M]}}")
    assert fit(found, "surface", "alpha")["value"] == pytest.approx(ALPHA, rel=0.02)
    assert fit(found, "surface", "E")["value"] == pytest.approx(E, rel=0.1)
    assert fit(found, "gain", "gain", "gated")["value"] == pytest.approx(1.3, rel=0.06)
    text = report(found)
    assert all(head in text for head in ("Ladder", "Power laws", "L = E + A N^-alpha + B D^-beta"))
    head, *lines = csv.reader(report(found, "csv").splitlines())
    assert "scaling.test.gain.gain_low" in head and {len(line) for line in lines} == {len(head)}
    assert to_plain(found)["scaling"][0].keys() >= {"law", "value", "low", "high", "why"}
    assert "E + A N" in report(found, "md")


def test_a_ladder_by_rule_says_what_it_cannot_tell(tmp_path: Path) -> None:
    found = compared(tmp_path, f"ladder: {{{SIZES}, tokens: 5 per parameter}}", domains=True)
    assert any(
        note.startswith("no L = E + A N^-alpha + B D^-beta of baseline, gated: its five") for note in found.notes
    )
    assert not (found.scaling["law"] == "surface")[found.scaling["name"] != ""].any()
    assert fit(found, "power_n", "b")["value"] > fit(found, "power_c", "b")["value"] > 0
    mean = fit(found, "power_c", "b", of="mean of domains")
    assert mean["value"] == pytest.approx(fit(found, "power_c", "b")["value"])
    whole, half = fit(found, "power_c", "a"), fit(found, "power_c", "a", of="code")
    assert half["value"] == pytest.approx(whole["value"] / 2, rel=1e-6)


def test_equal_flops_have_a_best_size(tmp_path: Path) -> None:
    flops = "tokens: [6e10 FLOPs, 3e11 FLOPs, 1.5e12 FLOPs]"
    found = compared(tmp_path, f"ladder: {{{SIZES}, {flops}}}")
    best = [row for row in found.scaling.to_dict("records") if (row["law"], row["name"]) == ("isoflop", "N")]
    assert best and all(row["value"] > 0 for row in best)
    assert "IsoFLOP minima" in report(found)


def test_an_interval_without_bounds_is_told_from_none(tmp_path: Path) -> None:
    found = compared(tmp_path, f"ladder: {{{SIZES}, tokens: 5 per parameter}}")
    row = {**fit(found, "power_c", "b"), "low": math.nan, "high": math.nan}
    for exact, said in ((False, f" [{DASH}, {DASH}]"), (True, "")):
        told = report(retold(found, scaling=pd.DataFrame([row | {"exact": exact}])))
        assert re.search(rf"^baseline +{row['value']:.3g}{re.escape(said)}$", told, re.MULTILINE)


def test_a_rung_without_a_loss_is_left_out_and_named(tmp_path: Path) -> None:
    found = compared(tmp_path, f"ladder: {{{SIZES}, tokens: 5 per parameter}}", lost="gated")
    (note,) = (note for note in found.notes if note.startswith("fits leave out what has no loss: gated [size="))
    assert note.count("gated") == 1
    assert fit(found, "power_c", "b", "gated")["n"] == 3 and fit(found, "power_c", "b")["n"] == 4
    assert fit(found, "gain", "gain", "gated")["value"] == pytest.approx(1.3, rel=0.06)


def test_a_ladder_that_has_not_run_is_reported(tmp_path: Path) -> None:
    train = "train: {data: {text: corpus.txt}, context: 32, batch: 4, lr: 1e-3}"
    ladder = f"ladder: {{{SIZES}, tokens: [20k, 80k]}}"
    planned = plan(load_study(write_study(tmp_path, train=train, ladder=ladder)), tmp_path / "data")
    found = compare(planned.record(), [])
    assert not (found.scaling["name"] != "").any() and set(found.rungs["loss"].isna()) == {True}
    assert all(report(found, form) for form in ("text", "md", "csv", "json", "latex"))
