"""The pages of why: their numbers are those of numpy on what was stored, and their views are addresses."""

import itertools
import json
import math
import re
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t

from archlab.dashboards import panels
from archlab.dashboards.figures_context import by_position
from archlab.dashboards.figures_search import Dimension, brushed, front, spoken
from archlab.dashboards.library import Library
from archlab.dashboards.pages import context, inspect
from archlab.dashboards.pages.search import plain_rows, replaced
from archlab.dashboards.pages.shell import Choice, _read
from archlab.dashboards.parts import asks, missing
from archlab.dashboards.words import unlike_baseline
from archlab.search.comparison.compare import load_comparison
from archlab.search.comparison.figure_frames import (
    minus_baseline,
    over_rows,
    probes_frame,
    settings_frame,
    smoothed,
    uniform_frame,
)
from archlab.search.formatting.filters import parse_filter
from archlab.search.formatting.tables import DASH, with_error
from archlab.search.reporting.report import report
from archlab.search.sections.design.frames import (
    all_effects,
    always_with,
    effects_frame,
    factors,
    interactions_frame,
    paired,
    pairs_frame,
)
from archlab.search.sections.design.told import ToldOfDesign
from archlab.search.sections.ladder.frames import scaling_lines
from archlab.search.statistics import power_laws as scaling
from archlab.search.store.findings import ask, keep_finding
from archlab.search.store.store import Store
from tests.dashboards.conftest import XSS
from tests.dashboards.findings_kit import LENGTHS, WINDOW, measure_all
from tests.dashboards.generate import Plan, make_store, make_study
from tests.dashboards.special_studies import FACTORIAL, LADDER, SEARCH, finish, make_factorial, make_ladder, make_search
from tests.search.compare_kit import retold

WHY = "gate-why"
NAMES = {"baseline": 0.0, "G1": -0.046, "G2": -0.021, XSS: 0.03}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(root, findings by variant and seed, losses of the search, losses of the factorial)."""
    root = tmp_path_factory.mktemp("why") / ".archlab"
    with make_store(root) as made:
        make_study(made, Plan(WHY, f"Why? {XSS}", NAMES, seeds=(0, 1), diverge=((XSS, 4e-3),)))
        kept = measure_all(made, WHY)
        make_study(made, Plan("bare", "Nothing measured", {"baseline": 0.0, "G1": -0.04}, rates=(), seeds=(0,)))
        found = make_search(made)
        make_ladder(made)
        return root, kept, found, make_factorial(made)


@pytest.fixture(scope="module")
def compared(told):
    """Study -> (comparison, record)."""
    with Store.open(told[0], create=False) as store:
        return {name: (load_comparison(store, name), store.study(name)) for name in (WHY, SEARCH, LADDER, FACTORIAL)}


def raw(kept, variant, measure, kind, name):
    """What was kept of a variant, one entry per seed."""
    return [
        next(each for each in found if each["measure"] == measure)[kind][name]
        for (own, _), found in sorted(kept.items(), key=lambda item: item[0][1])
        if own == variant
    ]


def test_smoothed_losses_are_weighted_means_of_their_neighbours(told, compared):
    curves = compared[WHY][0].curves
    own = curves[curves["name"] == "loss_by_position_512"]
    found = smoothed(own, 11)
    for variant in NAMES:
        stored = raw(told[1], variant, "loss_by_position_512", "curves", "loss_by_position_512")
        mean, n = np.mean([each["y"] for each in stored], axis=0), np.array(stored[0]["n"])
        for place in (0, 3, 250, 400, WINDOW - 1):
            near = slice(max(place - 5, 0), place + 6)
            shown = found[found["variant"] == variant]["mean"].iloc[place]
            assert shown == pytest.approx(np.average(mean[near], weights=n[near]), rel=1e-12)
    assert smoothed(own, 1) is own
    holes = own.assign(mean=own["mean"].where(own["x"] != 7))
    assert np.isfinite(smoothed(holes, 11)["mean"]).all(), "a place without a target is left out"


def test_differences_are_to_the_own_baseline_and_need_its_cell(compared):
    found = compared[WHY][0]
    grids = found.grids[found.grids["name"] == "first_token_attention"]
    shown = minus_baseline(grids, found.table)
    wide = grids.pivot(index=["y", "x"], columns="variant", values="mean")
    assert set(shown["variant"]) == set(NAMES) - {"baseline"}
    for variant in shown["variant"].unique():
        own = shown[shown["variant"] == variant].set_index(["y", "x"])["mean"]
        assert np.allclose(own, (wide[variant] - wide["baseline"]).loc[own.index])
    other = found.table.assign(baseline="G1")
    assert "baseline" in set(minus_baseline(grids, other)["variant"])
    gates = found.grids[found.grids["name"] == "gate_mean"]
    assert len(minus_baseline(gates, found.table)) == 0, "the baseline has no gates"


def test_losses_that_do_not_compare_are_not_subtracted(told):
    study = Library(told[0]).study(WHY)
    variants = [v | ({"objective": "diffusion"} if v["name"] == "G1" else {}) for v in study.record["variants"]]
    other = replace(study, record={**study.record, "variants": variants})
    assert unlike_baseline(study) == [] and unlike_baseline(other) == ["G1"]
    for each, drawn in ((study, True), (other, False)):
        chosen, _ = _read(context.choices(each), {"show": "difference"})
        part = json.dumps(context.content(each, chosen)[0].to_plotly_json(), default=lambda made: made.to_plotly_json())
        assert ('"name": "G1"' in part) is drawn and ("Not drawn" in part) is not drawn and '"name": "G2"' in part


def test_probes_and_uniform_attention_stand_beside_what_limits_them(told, compared):
    found = compared[WHY][0]
    probes = probes_frame(found.measures).set_index(["variant", "name"])
    stored = raw(told[1], "G1", "recall", "values", "recall_accuracy")
    assert probes.loc[("G1", "recall_accuracy"), "mean"] == pytest.approx(np.mean(stored))
    assert probes.loc[("G1", "recall_accuracy"), "std"] == pytest.approx(np.std(stored, ddof=1))
    assert probes.loc[("G1", "recall_accuracy"), "chance"] == 0.0156
    assert probes.loc[("G2", "needle_chosen"), ["chance", "ceiling"]].tolist() == [0.125, pytest.approx(0.97)]
    assert math.isnan(probes.loc[("G2", "needle_exact"), "chance"])
    assert probes.loc[("G2", "needle_exact"), "ceiling"] == pytest.approx(0.9)
    even = uniform_frame(found.measures)
    assert set(even["name"]) == {"first_token_attention", "attention_entropy"}
    assert even[even["name"] == "first_token_attention"]["uniform"].tolist() == pytest.approx([0.024] * len(NAMES))
    maps = found.grids[found.grids["name"] == "forget_gate_map"]
    own = over_rows(maps)[lambda rows: (rows["variant"] == "baseline") & (rows["x"] == 8)]["mean"]
    assert own.item() == pytest.approx(maps[(maps["variant"] == "baseline") & (maps["x"] == 8)]["mean"].mean())


def test_lines_of_a_ladder_are_the_laws_that_its_table_tells(compared):
    found, record = compared[LADDER]
    lines = scaling_lines(found.rungs, record["ladder"])
    fits = found.scaling[found.scaling["of"] == "test"].set_index(["series", "law", "name"])
    for series in ("baseline", "gated"):
        own = lines[(lines["series"] == series) & (lines["law"] == "power_c")]
        slope = np.polyfit(np.log(own["x"]), np.log(own["loss"]), 1)[0]
        assert slope == pytest.approx(-fits.loc[(series, "power_c", "b"), "value"])
        parabola = lines[(lines["series"] == series) & (lines["law"] == "isoflop") & np.isclose(lines["at"], 4e12)]
        low = found.scaling.query("series == @series and law == 'isoflop' and name == 'L'")["value"].item()
        assert parabola["loss"].min() == pytest.approx(low, abs=1e-3)
    x, loss = np.array([1.0, 2, 4, 8]), np.array([3.0, 2.6, 2.1, 1.9])
    band = scaling.power_line(x, loss, np.array([1.0, 2.0, 3.0]))
    law = scaling.power_law(x, loss)
    assert band[0].value == pytest.approx(law["a"].value) and band[0].low == pytest.approx(law["a"].low)
    assert band[1].high - band[1].low < band[0].high - band[0].low, "the band is narrowest in the middle"


def test_effects_of_a_factorial_are_means_over_its_cells(told, compared):
    losses, (found, record) = told[3], compared[FACTORIAL]
    variants = record["variants"]
    names = factors(variants)
    assert names["gate"] == ("without", "with") and names["block.norm.placement"] == ("pre", "sandwich")
    pairs = pairs_frame(variants, found, "gate")
    by_cell = []
    for others, placement in itertools.product(
        ("", "qk_norm", "short_conv", "qk_norm + short_conv"), ("pre", "sandwich")
    ):
        ours = f"{' + '.join(['gate'] + [others] * bool(others))} [placement={placement}]"
        base = f"{others or 'baseline'} [placement={placement}]"
        by_cell.append(np.mean([losses[ours, seed] - losses[base, seed] for seed in range(3)]))
    effect = effects_frame(pairs, found.noise).to_dict("records")
    assert len(effect) == 1 and effect[0]["cells"] == 8 and effect[0]["pairs"] == 24
    assert effect[0]["mean"] == pytest.approx(np.mean(by_cell))
    half = t.ppf(0.975, found.noise["df"]) * math.sqrt(8 * (2 / 3) / 64) * found.noise["seed_sd"]
    assert effect[0]["high"] - effect[0]["mean"] == pytest.approx(half)
    beside = effects_frame(pairs, found.noise, "at qk_norm").set_index("at")["mean"]
    crossed = interactions_frame(variants, found).set_index(["one", "other"])
    assert crossed.loc[("gate", "qk_norm"), "value"] == pytest.approx(beside["with"] - beside["without"])
    assert crossed.loc[("gate", "qk_norm"), "value"] == pytest.approx(0.03, abs=0.005)
    one = [v for v in variants if v["name"] in ("baseline [placement=pre]", "gate + qk_norm [placement=pre]")]
    assert len(pairs_frame(one, found, "gate")) == 0, "a pair differs in nothing else"
    assert paired(variants) == [*names] and paired(one) == [] and always_with(one, "gate") == ["qk_norm"]
    assert always_with(variants, "gate") == []
    of_all = found.effects.set_index(["factor", "level"])
    assert [*of_all.index] == [(name, names[name][1]) for name in names] and (of_all["cells"] == 8).all()
    assert of_all.loc[("gate", "with"), ["against", "mean", "low", "high", "pairs"]].tolist() == [
        "without", *(effect[0][key] for key in ("mean", "low", "high", "pairs"))
    ]  # fmt: skip
    text = report(found, "text")
    assert "Effects over all else that varies" in text and f"{effect[0]['mean']:+.4f}" in text
    assert not len(all_effects(one, found)) and "Effects" not in report(compared[WHY][0], "text")


def test_of_a_fraction_effects_are_contrasts_over_all_of_its_variants(told, compared):
    losses, (found, record) = told[3], compared[FACTORIAL]
    half = [v for v in record["variants"] if sum(v["components"].values()) % 2 == 1]  # a 2^(3-1) at each placement
    assert paired(half) == ["block.norm.placement"]
    rows = all_effects(half, found).set_index("factor")
    assert [*rows.index] == ["block.norm.placement", "gate", "qk_norm", "short_conv"]
    means = {v["name"]: np.mean([losses[v["name"], seed] for seed in range(3)]) for v in half}
    for name in ("gate", "qk_norm", "short_conv"):
        sides = [np.mean([means[v["name"]] for v in half if v["components"][name] is there]) for there in (True, False)]
        assert rows.loc[name, "mean"] == pytest.approx(sides[0] - sides[1])
        assert rows.loc[name, ["level", "against", "cells", "pairs"]].tolist() == ["with", "without", 2, 12]
        wide = t.ppf(0.975, found.noise["df"]) * found.noise["seed_sd"] * math.sqrt(2 * 4 / 12 / 4)
        assert rows.loc[name, "high"] - rows.loc[name, "mean"] == pytest.approx(wide)
    assert "gate" not in [*all_effects(half[1:], found)["factor"]], "a run is missing: nothing is orthogonal"
    said = "of a component that is never alone"
    (block,) = ToldOfDesign().blocks(retold(found, effects=rows.reset_index()))
    (alone,) = ToldOfDesign().blocks(found)
    assert said in block.legend and said not in alone.legend


def test_losses_of_other_questions_make_no_effect(compared):
    found, record = compared[FACTORIAL]
    for other in ({"objective": {"type": "prefix"}}, {"test": "another text"}, {"bytes_per_token": 4.0}):
        variants = [{**v, **(other if "sandwich" in v["name"] else {})} for v in record["variants"]]
        assert not len(pairs_frame(variants, found, "block.norm.placement"))
        assert [*all_effects(variants, found)["factor"]] == ["gate", "qk_norm", "short_conv"]
        crossed = interactions_frame(variants, found)
        assert len(crossed) == 3 and "block.norm.placement" not in {*crossed["one"], *crossed["other"]}
    variants = [{**v, "batches": v["name"].partition("[")[2]} for v in record["variants"]]
    assert [*all_effects(variants, found)["factor"]] == ["gate", "qk_norm", "short_conv"], "these are not paired"
    (told,) = effects_frame(pairs_frame(variants, found, "block.norm.placement"), found.noise).to_dict("records")
    assert math.isfinite(told["mean"]) and math.isnan(told["low"]) and math.isnan(told["high"])
    assert interactions_frame(variants, found)["half"].notna().all(), "each loss has a partner with its batches"
    four = [{**v, "batches": str((v["name"].partition("[")[2], v["components"]["gate"]))} for v in record["variants"]]
    halves = interactions_frame(four, found).set_index(["one", "other"])["half"]
    assert math.isnan(halves["gate", "block.norm.placement"]) and math.isfinite(halves["gate", "qk_norm"])


def test_effects_have_no_interval_where_the_table_has_none_or_looked_at_the_seeds(compared):
    found, record = compared[FACTORIAL]
    for other in ({"critical_value": None}, {"always_valid": True}):
        seen = replace(found, noise=found.noise | other)
        rows = all_effects(record["variants"], seen)
        assert rows["mean"].notna().all() and rows[["low", "high"]].isna().all(axis=None)
    (block,) = ToldOfDesign().blocks(retold(seen, effects=rows))
    assert "no intervals, as seeds were added until differences were resolved" in block.legend
    (intervals,) = (column.cells for column in block.columns if column.header == "95% interval")
    assert {cell.text for cell in intervals} == {DASH}


def test_rows_that_no_component_tells_apart_are_a_factor_and_pair_with_none_but_themselves(told, compared):
    losses, (found, record) = told[3], compared[FACTORIAL]
    rows = {v["name"]: v["name"].partition(" [")[0] for v in record["variants"]}
    variants = [{**v, "components": {}, "row": rows[v["name"]]} for v in record["variants"]]
    assert list(factors(variants)) == paired(variants) == ["row", "block.norm.placement"]
    pairs = pairs_frame(variants, found, "block.norm.placement")
    assert (pairs["variant"].map(rows) == pairs["reference"].map(rows)).all()
    assert {*pairs["cell"]} == {*rows.values()} and {*pairs["level"]} == {"sandwich"}
    (effect,) = effects_frame(pairs, found.noise).to_dict("records")
    differences = [loss - losses[f"{rows[name]} [placement=pre]", seed] for (name, seed), loss in losses.items()
                   if name.endswith("sandwich]")]  # fmt: skip
    assert effect["cells"] == 8 and effect["mean"] == pytest.approx(np.mean(differences))
    of_rows = effects_frame(pairs_frame(variants, found, "row"), found.noise)
    assert [*of_rows["level"]] == [*dict.fromkeys(rows.values())][1:] and {*of_rows["cells"]} == {2}
    pure = ("baseline", "gate")
    mixed = [{**v, "components": {"gate": row == "gate"}, "row": "" if row in pure else row}
             for v, row in zip(variants, rows.values(), strict=True)]  # fmt: skip
    assert paired(mixed) == ["gate", "block.norm.placement"], "what is no component is no level of one"
    assert {*pairs_frame(mixed, found, "gate")["variant"]} == {"gate [placement=pre]", "gate [placement=sandwich]"}


def test_a_grid_says_its_axes_in_the_record(tmp_path):
    from archlab.search.planning.plan import plan
    from archlab.search.study.load import load_study
    from tests.search.study_files import write_study

    path = write_study(tmp_path, grid="grid: {block.norm.placement: [pre, sandwich]}")
    variants = plan(load_study(path), tmp_path / "data").record()["variants"]
    assert factors(variants)["placement"] == ("pre", "sandwich")
    assert not any("row" in v for v in variants), "components tell them apart"
    written = "variants:\n  baseline: {}\n  gated: [gate]\n  wide: {block.ffn.width: 128}"
    path = write_study(tmp_path, "c.yaml", variants=written, grid="grid: {block.norm.placement: [pre, sandwich]}")
    variants = plan(load_study(path), tmp_path / "data").record()["variants"]
    assert [v.get("row", "") for v in variants] == ["", "", "wide"] * 2
    assert "axes" not in plan(load_study(write_study(tmp_path, "b.yaml")), tmp_path / "data").record()["variants"][0]


def test_a_setting_that_is_an_object_is_said_as_people_do():
    assert spoken('{"size": 32, "type": "window"}') == "window(size=32)" and spoken("causal") == "causal"


def test_brushes_are_filters_and_filters_are_brushes(compared):
    trials, paths = settings_frame(compared[SEARCH][0].search)
    done = trials[trials["perplexity"].notna()]
    axes = {name: Dimension.of(name, done[name]) for name in paths}
    assert axes["train.lr"].log and not axes["n_layers"].log and axes["gate"].texts == ("off", "sdpa_gate")
    assert set(axes["block.attention.mask"].texts) == {"causal", "none", json.dumps({"size": 32, "type": "window"})}
    mask = "block.attention.mask"
    spans = {"train.lr": [-2.6, -2.2], "n_layers": [1.5, 3.2], "gate": [0.6, 1.4], mask: [0.6, 2.2]}
    for name, span in spans.items():
        terms = axes[name].terms(span)
        where = parse_filter(terms, paths)
        kept = [where.holds(row) for row in plain_rows(done)]
        assert kept == [span[0] <= value <= span[1] for value in axes[name].values] and any(kept) and not all(kept)
        shown = axes[name].span(where)
        assert [shown[0] <= value <= shown[1] for value in axes[name].values] == kept
    listed = list(axes.values())
    event = [{f"dimensions[{paths.index('gate')}].constraintrange": [[0.5, 1.5]]}, [0]]
    assert brushed(event, listed) == {"gate": "gate=sdpa_gate"}
    off = [{f"dimensions[{paths.index('gate')}].constraintrange": None}, [0]]
    assert brushed(off, listed) == {"gate": ""} and brushed([{"line.color": 1}, [0]], listed) == {}
    names = ["n_layers", "gate", "gate_bias", "block.ffn.width"]
    text = "n_layers>=2 gate=off 'a b' gate_bias=yes"
    assert replaced(text, {"gate": "gate=on"}, names) == "n_layers>=2 'a b' gate_bias=yes gate=on"
    assert replaced("width>=64 nonsense=1", {"block.ffn.width": ""}, names) == "nonsense=1", (
        "the end of a path names it"
    )


def test_uniform_attention_is_marked_where_each_mask_has_it(compared):
    found, name = compared[WHY][0], "first_token_attention"
    of_g1 = (found.measures["variant"] == "G1") & (found.measures["name"] == f"{name}_uniform")
    masked = retold(found, measures=found.measures.assign(mean=found.measures["mean"].mask(of_g1, 0.05)))
    for each, marks in ((found, [0.024]), (masked, [0.024, 0.05])):
        drawn, _ = inspect._measure(each, name, [], dict.fromkeys(NAMES, "#0072b2"))
        assert sorted(shape["x0"] for shape in drawn.figure["layout"]["shapes"]) == pytest.approx(marks)


def test_the_steps_of_a_front_of_three_goals_only_fall():
    rows = [(0, 1e6, 9.0, True), (1, 2e6, 9.5, True), (2, 3e6, 8.0, True), (3, 4e6, 8.5, False)]
    trials = pd.DataFrame(rows, columns=["number", "flops_per_token", "perplexity", "front"])
    figure = front(trials.assign(feasible=True, told=""), "flops_per_token", "FLOPs per token")
    steps = next(trace for trace in figure["data"] if trace["mode"] == "lines")
    points = next(trace for trace in figure["data"] if trace.get("name") == "front")
    assert steps["x"] == [1e6, 3e6] and steps["y"] == [9.0, 8.0] and points["x"] == [1e6, 2e6, 3e6]


def test_choices_of_an_address_are_checked_and_texts_are_bounded():
    offered = [Choice("x", "X", {"a": "A", "b": "B"}, "b"), Choice("q", "Q", {})]
    assert _read(offered, {}) == ({"x": "b", "q": ""}, [])
    chosen, notices = _read(offered, {"x": "nonsense", "q": "y" * 900, "unknown": 1})
    assert chosen == {"x": "b", "q": "y" * 500} and "nonsense" in notices[0] and "a, b" in notices[0]


def test_figures_keep_names_as_text_and_few_lines(compared):
    found = compared[WHY][0]
    colours = dict.fromkeys(NAMES, "#0072b2")
    heads = found.grids[found.grids["name"] == "first_token_attention"]
    figure, height = panels.panels(heads, list(NAMES), colours, panels.Look())
    assert len(figure["data"]) == 4 and height > 150 and "<img" not in json.dumps(figure)
    many = pd.concat([heads[heads["variant"] == "G1"].assign(variant=f"v{i}") for i in range(30)])
    drawn, _ = panels.panels(many, [f"v{i}" for i in range(30)], {f"v{i}": "#0072b2" for i in range(30)}, panels.Look())
    assert len(drawn["data"]) == panels.MOST and panels.left_out(many) == 30 - panels.MOST
    losses = found.curves[found.curves["name"] == "loss_by_position_512"]
    for log in (False, True):
        lines = by_position(losses, colours, "baseline", "L(i)", [256, 4096], log)
        assert "<img" not in json.dumps(lines) and len(lines["layout"]["shapes"]) == 1
        assert all(len(trace["x"]) <= 1002 and trace["type"] == "scatter" for trace in lines["data"])


def test_a_new_finding_changes_what_a_page_that_shows_it_is_told(tmp_path):
    root = tmp_path / ".archlab"
    with make_store(root) as store:
        make_study(store, Plan("small", "?", {"baseline": 0.0}, rates=(), seeds=(0,)))
        library = Library(root)
        before = library.study("small")
        key = store.study_trials("small")[0]["key"]
        finding = {"measure": "recall", "version": 1, "values": {"recall_accuracy": 0.5}, "curves": {}, "grids": {}}
        keep_finding(store, key, "digest", finding)
        after = library.study("small")
    assert after.version.partition(":")[0] != before.version.partition(":")[0]
    assert after.comparison.measures["mean"].tolist() == [0.5] and not len(before.comparison.measures)
    assert replace(after, version="").record == replace(before, version="").record


def test_what_another_study_has_measured_of_a_shared_trial_is_no_column_of_this_table(tmp_path):
    plan = Plan("small", "?", {"baseline": 0.0, "G1": -0.05}, rates=(), seeds=(0,))
    with make_store(tmp_path) as store:
        make_study(store, plan)

        def measure(variant, label):
            (key,) = [t["key"] for t in store.study_trials("small") if t["variant"] == variant]
            keep_finding(store, key, label, {"measure": label, "version": 1, "values": {label: 0.5}, "curves": {}})

        def shown():
            return {*load_comparison(store, "small").measures["name"]}

        measure("G1", "recall")
        measure("G1", "needle")
        assert not shown()
        measure("baseline", "recall")
        assert shown() == {"recall"}, "all of its trials have it"
        ask(store, "small", ["needle"])
        assert shown() == {"recall", "needle"}, "a reader has asked for it"
        measure("G1", "gates")
        store.save_study("small", {**store.study("small"), "measures": ["gates"]}, "study: small\n")
        assert shown() == {"recall", "needle", "gates"}, "the study asks for it"


def test_the_page_of_context_opens_with_the_windows_that_most_variants_have(told):
    study = Library(told[0]).study(WHY)
    found = study.comparison.curves
    short = found[found["name"] == "loss_by_position_512"].assign(name="loss_by_position")
    for kept, usual in ((short, "trained"), (short[short["variant"] == "G1"], "512")):
        compared = retold(study.comparison, curves=pd.concat([kept, found]))
        (window,) = [each for each in context.choices(replace(study, comparison=compared)) if each.key == "window"]
        assert [*window.values] == ["trained", "512"] and window.default == usual


def test_what_a_study_asks_for_is_awaited_and_the_rest_is_offered(told):
    study = Library(told[0]).study("bare")
    asked = replace(study, record={**study.record, "evaluate": ["perplexity", {"type": "needle", "samples": 4}]})
    assert asks(asked, "needle") and not asks(asked, "recall") and not asks(study, "needle")
    assert "it comes when" in json.dumps(
        missing("Needles.", "evaluate: [needle]", None, True).to_plotly_json(), default=str
    )
    assert "evaluate: [needle]" in str(missing("Needles.", "evaluate: [needle]"))


def drawn(page, name):
    """The traces of a figure as plotly has them."""
    page.wait_for_selector(f"[id='{name}'] .main-svg")
    return page.evaluate("id => document.getElementById(id).querySelector('.js-plotly-plot').data", name)


@pytest.mark.browser
@pytest.mark.slow
def test_pages_of_why_show_what_was_stored(told, compared, served, visit):
    """Each page once: its numbers, its empty states, its notices, and no script from a name."""
    root, kept = told[:2]
    page, start = visit.page, served(root)
    page.goto(f"{start}/study/{WHY}/context?nonsense=1&score=exact&smooth=wide")
    assert "wide" in page.inner_text(".notice")
    lines = {trace["name"]: trace for trace in drawn(page, "perplexity_by_context") if trace.get("name")}
    stored = raw(kept, "G1", "loss_by_position_512", "curves", "perplexity_by_context_512")
    assert lines["G1"]["y"][-1] == pytest.approx(np.mean([each["y"][-1] for each in stored]), rel=1e-5)
    needle = next(trace for trace in drawn(page, "needle") if trace["name"] == "G2")
    cells = np.mean([each["values"] for each in raw(kept, "G2", "needle", "grids", "needle_exact")], axis=0)
    assert np.allclose(needle["z"], cells.T) and needle["x"] == [str(length) for length in LENGTHS]
    probes = next(trace for trace in drawn(page, "probes") if trace["name"] == "G1")
    assert np.mean(raw(kept, "G1", "recall", "values", "recall_accuracy")) == pytest.approx(probes["x"][-1])
    with Store.open(root, create=False) as store:
        whole = json.loads(report(load_comparison(store, WHY), "json"))
    row = next(r for r in whole["measures"] if r["variant"] == "G1" and r["name"] == "needle_exact")
    assert with_error(row["mean"], row["std"]) in page.inner_text("main")

    page.goto(f"{start}/study/{WHY}/inspect")
    heads = next(trace for trace in drawn(page, "first_token_attention") if trace["name"] == "G1")
    stored = raw(kept, "G1", "first_token_attention", "grids", "first_token_attention")
    assert np.allclose(heads["z"], np.mean([each["values"] for each in stored], axis=0))
    page.click("text=Forgetting")
    page.wait_for_function("location.search == '?topic=memory'")
    assert {trace["name"] for trace in drawn(page, "forget_gate_half_life")} == {"baseline", _shown(XSS)}
    page.reload()
    drawn(page, "forget_gate_map-lines")

    page.goto(f"{start}/study/{WHY}/stability")
    rates = drawn(page, "rates")
    assert "loss is not finite" in page.inner_text("main") and "loss_spikes" in page.inner_text("main")
    best = compared[WHY][0].rates.query("variant == 'G1' and best").iloc[0]
    assert best["validation_loss"] in next(trace["y"] for trace in rates if trace["name"] == "G1")
    assert all(trace["type"] == "scatter" for trace in drawn(page, "training"))

    page.goto(f"{start}/study/bare/context")
    page.wait_for_selector(".command")
    text = page.inner_text("main")
    assert "evaluate: [needle]" in text and "archlab eval bare --measure needle" in text
    assert not re.search(r"\b(NaN|undefined|null)\b", text)
    page.goto(f"{start}/study/bare/inspect")
    assert "evaluate: [first_token_attention" in page.inner_text(".section")

    page.goto(f"{start}/study/{FACTORIAL}/factor?component=gate")
    effect = next(trace for trace in drawn(page, "effect") if "error_x" in trace)
    found = effects_frame(pairs_frame(compared[FACTORIAL][1]["variants"], compared[FACTORIAL][0], "gate"), {
        **compared[FACTORIAL][0].noise})  # fmt: skip
    assert effect["x"][0] == pytest.approx(found["mean"].iloc[0])
    assert f"{found['mean'].iloc[0]:+.4f}" in page.inner_text("main").replace("\N{MINUS SIGN}", "-")
    page.goto(f"{start}/study/{LADDER}/scaling")
    gain = next(trace for trace in drawn(page, "gains") if "error_x" in trace)
    told_gain = compared[LADDER][0].scaling.query("law == 'gain' and name == 'gain'")["value"].iloc[0]
    assert gain["x"] == [pytest.approx(told_gain)] and "IsoFLOP minima" in page.inner_text("main")


@pytest.mark.slow
@pytest.mark.browser
def test_a_click_on_a_pair_shows_its_two_variants_and_on_an_effect_the_curves_of_the_levels(told, served, visit):
    page = visit.page
    page.goto(f"{served(told[0])}/study/{FACTORIAL}/factor?component=gate")
    pair = drawn(page, "effect")[0]
    click_point(page, "effect", 0, 0)
    page.wait_for_url(lambda url: url.endswith(pair["customdata"][0]))
    page.wait_for_selector(".beside")
    named = parse_qs(urlsplit(page.url).query)["variants"]
    assert len(named) == 2 and {"gate" in each for each in named} == {True, False}
    page.go_back()
    drawn(page, "effect")
    click_point(page, "effect", 1, 0)
    page.wait_for_url(lambda url: url.endswith("/curves?by=gate"))
    page.wait_for_selector("#curve")
    assert page.locator("#curve-by input:checked").first.get_attribute("value") == "gate"


def click_point(page, figure, trace, point):
    """Clicks a point of a figure where it is drawn."""
    x, y = page.evaluate(
        """([figure, trace, point]) => {
        const graph = document.querySelector(`#${figure} .js-plotly-plot`), own = graph.data[trace];
        const {xaxis, yaxis} = graph._fullLayout, box = graph.getBoundingClientRect();
        return [box.left + xaxis._offset + xaxis.c2p(own.x[point]), box.top + yaxis._offset + yaxis.c2p(own.y[point])];
    }""",
        [figure, trace, point],
    )
    page.mouse.move(x - 3, y - 3)
    page.mouse.move(x, y)
    page.wait_for_selector(f"#{figure} .hoverlayer .hovertext")
    page.mouse.click(x, y)


@pytest.mark.slow
@pytest.mark.browser
def test_a_brush_narrows_the_table_and_lands_in_the_address(told, compared, served, visit):
    page, start = visit.page, served(told[0])
    page.goto(f"{start}/study/{SEARCH}/search")
    page.wait_for_selector("#parallel .axis-brush")
    shown = next(trace for trace in drawn(page, "front") if trace.get("name") == "front")
    own = compared[SEARCH][0].search
    best = own[own["front"]].sort_values("flops_per_token")
    assert shown["x"] == best["flops_per_token"].tolist()
    assert shown["y"] == pytest.approx(best["validation_perplexity"].tolist())
    _, paths = settings_frame(own)
    page.evaluate(
        """([axis, span]) => Plotly.restyle(document.querySelector('#parallel .js-plotly-plot'),
        {['dimensions[' + axis + '].constraintrange']: [span]}, [0])""",
        [paths.index("n_layers"), [2.5, 4.2]],
    )
    page.wait_for_function("location.search.includes('n_layers')")
    deep = sum(each["n_layers"] >= 3 for each in own["settings"])
    page.wait_for_selector(f"text={deep} of 30 trials")
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector(f"text={deep} of 30 trials")
    assert page.locator(".searched tbody tr").count() == deep
    page.goto(f"{start}/study/{SEARCH}/search?q=state%3Dplanned")
    page.wait_for_selector("text=2 of 30 trials")
    with Store.open(told[0], create=False) as store:
        waiting = next(each for each in store.study_trials(SEARCH) if each["state"] == "planned")
        finish(store, SEARCH, waiting, 2.0)
    page.wait_for_selector("text=1 of 30 trials")
    assert page.input_value("[aria-label=Filter]") == "state=planned"
    page.goto(f"{start}/study/{SEARCH}/search?q=n_layer%3D3")
    assert "did you mean 'n_layers'" in page.inner_text(".notice")


def _shown(name):
    """A name as plotly's data has it."""
    from html import escape

    return escape(name)
