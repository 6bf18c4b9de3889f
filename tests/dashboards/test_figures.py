"""Figures hold what they were given, as SVG lines and plain text."""

import math
from dataclasses import replace
from urllib.parse import parse_qsl

import numpy as np
import pytest

from archlab.dashboards import figures, table, theme
from archlab.dashboards.curves import Line, group
from archlab.dashboards.view import CHOICES, View, read_view

BAD = "<b>x</b>"
COLOURS = theme.colours(["baseline", "a", BAD], "baseline")


def _group(name, seeds=3, points=50, diverged=False):
    step = np.arange(1.0, points + 1)
    return group([Line(name, s, f"seed {s}", step, step, 4 / step + 0.01 * s, diverged) for s in range(seeds)])


def _drawn(figure):
    assert {trace["type"] for trace in figure["data"]} <= {"scatter"}
    return [trace for trace in figure["data"] if "lines" in trace["mode"]]


def test_curves_draw_a_mean_a_band_and_thin_seeds_per_variant():
    traces = _drawn(figures.curves([_group("baseline"), _group("a")], COLOURS, "baseline", "x", "y"))
    assert len(traces) == 2 * (1 + 1 + 3)
    assert [trace["name"] for trace in traces if trace.get("showlegend")] == ["baseline", "a"]


def test_a_mean_without_lines_of_its_own_is_drawn():
    whole = _group("a")
    (band, mean) = _drawn(figures.curves([replace(whole, lines=[])], COLOURS, "baseline", "x", "y"))
    assert "fill" in band and mean["y"] == pytest.approx(whole.mean, rel=1e-5)


def test_a_band_on_a_logarithmic_axis_ends_at_the_lowest_line():
    x = np.array([1.0, 2.0, 3.0])
    made = [Line("a", seed, "", x, x, np.array([1.0, each, 10.0])) for seed, each in enumerate((0.5, 9.0))]
    figure = figures.curves([group(made)], COLOURS, "baseline", "x", "y")
    (band,) = [trace for trace in figure["data"] if "fill" in trace]
    assert min(band["y"]) < 0
    figures.logarithmic(figure, "yaxis")
    assert min(band["y"]) == 0.5 and figure["layout"]["yaxis"]["dtick"] == "D2"
    figures.logarithmic(figure, "xaxis")
    assert figure["layout"]["xaxis"]["type"] == "log" and "dtick" not in figure["layout"]["xaxis"]


@pytest.mark.parametrize("groups, seeds", [(3, 150), (250, 1), (100, 3)], ids=["many seeds", "many rates", "both"])
def test_never_more_than_two_hundred_trials_are_drawn(groups, seeds):
    made = [_group("a", seeds, 5) for _ in range(groups)]
    figure = figures.curves(made, COLOURS, "baseline", "x", "y")
    lines = [trace for trace in _drawn(figure) if "fill" not in trace]
    assert len(lines) <= figures.MAXIMUM_LINES
    drawn, total = figures.hidden_lines(made)
    assert drawn <= figures.MAXIMUM_LINES and total == groups * seeds


def test_a_diverged_trial_ends_in_a_cross_and_enters_no_mean():
    figure = figures.curves([_group("a", 1, diverged=True)], COLOURS, "baseline", "x", "y")
    crosses = [trace for trace in figure["data"] if trace["mode"] == "markers"]
    assert len(crosses) == 1 and "diverged" in crosses[0]["hovertext"]
    assert not [trace for trace in figure["data"] if trace.get("showlegend") is not False]


def test_names_are_escaped_in_every_figure():
    rate = {"variant": BAD, "lr": 1e-3, "validation_perplexity": 4.0, "best": True, "state": "complete"}
    row = {"variant": BAD, "delta": -0.1, "delta_low": -0.2, "delta_high": 0.0, "verdict": "within noise"}
    made = [
        figures.curves([_group(BAD)], COLOURS, "baseline", "x", "y"),
        figures.rate_curve([rate], COLOURS, "baseline"),
        figures.forest([row], COLOURS, "nats/token"),
    ]
    for figure in made:
        assert BAD not in repr(figure) and "&lt;b&gt;x" in repr(figure)


def test_forest_is_hollow_within_noise_and_its_labels_sit_on_their_rows():
    rows = [
        {"variant": "a", "delta": -0.1, "delta_low": -0.2, "delta_high": 0.0, "verdict": "within noise"},
        {"variant": BAD, "delta": 0.3, "delta_low": 0.1, "delta_high": 0.5, "verdict": "worse"},
    ]
    figure = figures.forest(rows, COLOURS, "nats/token")
    by_place = {trace["y"][0]: trace for trace in figure["data"]}
    ticks = dict(zip(figure["layout"]["yaxis"]["tickvals"], figure["layout"]["yaxis"]["ticktext"], strict=True))
    assert ticks[1] == "a" and by_place[1]["x"] == [-0.1] and by_place[1]["marker"]["color"] == "#ffffff"
    assert by_place[0]["x"] == [0.3] and by_place[0]["error_x"]["array"] == [pytest.approx(0.2)]
    low, high = figure["layout"]["xaxis"]["range"]
    assert low < -0.2 and high > 0.5


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("other objective", "another objective than the baseline"),
        ("lossy tokenizer", "does not keep all of the text"),
        ("incomplete", "have a finished trial in common"),
    ],
)
def test_a_forest_without_differences_says_why(verdict, said):
    row = {"variant": "a", "delta": math.nan, "delta_low": math.nan, "delta_high": math.nan, "verdict": verdict}
    assert said in repr(figures.forest([row], COLOURS, "nats/token"))


def test_rate_curve_rings_the_choice_and_crosses_a_diverged_rate():
    rates = [
        {"variant": "a", "lr": 1e-3, "validation_perplexity": 5.0, "best": False, "state": "complete"},
        {"variant": "a", "lr": 2e-3, "validation_perplexity": 4.0, "best": True, "state": "complete"},
        {"variant": "a", "lr": 4e-3, "validation_perplexity": math.nan, "best": False, "state": "diverged"},
    ]
    line, cross = figures.rate_curve(rates, COLOURS, "baseline")["data"]
    assert line["x"] == [1e-3, 2e-3] and line["marker"]["size"][1] > line["marker"]["size"][0]
    assert cross["x"] == [4e-3] and cross["y"][0] > 5.0


def test_a_difference_is_headed_by_its_unit():
    assert table.heading("delta", "Δ nats/token").title == "Δ loss"
    bits = table.heading("delta", "Δ bits/byte")
    assert bits.title == "Δ bits/byte" and "loss" not in bits.tip


def test_an_empty_figure_says_why():
    for figure in (figures.curves([], COLOURS, "baseline", "x", "y"), figures.rate_curve([], COLOURS, "baseline")):
        assert figure["data"] == [] and figure["layout"]["annotations"][0]["text"]


@pytest.mark.parametrize("lr, text", [(1e-3, "1e-3"), (2.5e-4, "2.5e-4"), (1.0, "1e0"), (0.0, "0")])
def test_rates_read_as_in_papers(lr, text):
    assert figures.rate_text(lr) == text


def test_colours_stay_with_their_variants():
    names = ["baseline", *(f"v{i}" for i in range(25))]
    few, many = theme.colours(names[:4], "baseline"), theme.colours(names, "baseline")
    assert all(many[name] == colour for name, colour in few.items())
    styles = theme.dashes(names, "baseline")
    assert len({(many[name], styles[name]) for name in names}) == len(names)


def test_a_view_survives_its_address():
    for key, options in CHOICES.items():
        for value in options:
            view = View(**{key: value})
            assert read_view(dict(parse_qsl(view.query().removeprefix("?")))) == (view, [])
    assert View().query() == ""
    view, notices = read_view({"metric": "<script>", "other": "1"})
    assert view == View() and len(notices) == 1
