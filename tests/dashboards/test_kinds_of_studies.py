"""Pages of ladders, factorials and measured studies without a browser: what was planted is on them."""

import re

import pytest

from tests.dashboards.findings_kit import measure_all
from tests.dashboards.generate import make_store, make_study
from tests.dashboards.special_studies import FACTORIAL, LADDER, RECIPES, make_factorial, make_ladder, make_recipes
from tests.dashboards.test_app import Client


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds") / ".archlab"
    with make_store(root) as made:
        make_study(made)
        measure_all(made, "gate-position")
        make_ladder(made)
        make_factorial(made)
        make_recipes(made)
    return Client(root)


def texts(page):
    """What stands in the cells and headings of a page, in order."""
    return re.findall(r'"children": "([^"]*)"', page)


def test_a_ladder_shows_its_laws_the_gain_of_each_rung_and_the_best_sizes(client):
    told = texts(client.page(f"/study/{LADDER}/scaling"))
    assert {"Laws", "Compute-equivalent gain", "IsoFLOP minima", "Tables"} <= set(told)
    rungs = [at for at, text in enumerate(told) if text.startswith("gated [")]
    gains = [float(text[:-1]) for at in rungs for text in told[at : at + 8] if re.fullmatch(r"[0-9.]+×", text)]
    assert len(gains) >= 2 and min(gains) > 1  # the gated series was planted 0.03 nats below


def test_a_factorial_shows_the_effects_that_were_planted(client):
    told = texts(client.page(f"/study/{FACTORIAL}/factor"))
    effect = float(told[told.index("gate") + 1].replace("−", "-"))
    assert effect == pytest.approx(-0.05 + 0.03 / 2, abs=0.003)  # beside qk_norm, in half of its cells, it helps less
    assert "Interactions" in told


@pytest.mark.parametrize("factor", ["qk_norm", "short_conv", "block.norm.placement"])
def test_any_factor_can_be_asked_for(client, factor):
    told = texts(client.page(f"/study/{FACTORIAL}/factor", f"?factor={factor}"))
    assert "Effect" in told and "Interactions" in told


def test_what_was_measured_of_attention_is_drawn_for_every_variant(client):
    page = client.page("/study/gate-position/inspect")
    told = texts(page)
    assert {"Attention on the first token", "Entropy of attention"} <= set(told) and '"heatmap"' in page
    values = [text for text in told if re.fullmatch(r"0\.[0-9]+ ± 0\.[0-9]+", text)]
    assert len(values) >= 6 and float(values[0].split()[0]) == pytest.approx(0.37, abs=0.02)


def test_curves_of_stability_are_drawn_over_rates_and_over_the_training(client):
    page = client.page("/study/gate-position/stability")
    assert {"Learning rates on validation", "Diverged", "Spikes"} <= set(texts(page))


def test_a_study_of_several_recipes_begins_with_what_holds_under_them(client):
    told = texts(client.page(f"/study/{RECIPES}"))
    verdicts = [text for text in told if text.startswith(("good is", "careful is"))]
    assert verdicts[0].startswith("good is better than baseline: ") and verdicts[0].endswith(
        "better under 2 of 2 recipes"
    )
    assert verdicts[1] == "careful is within noise of baseline"
    assert "better under one recipe only (rough)" in told
