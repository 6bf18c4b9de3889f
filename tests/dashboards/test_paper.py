"""Figures, tables and the page of a study: the report's numbers, the same bytes each time, nothing from elsewhere."""

import hashlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.request import url2pathname
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from archlab.arch_dsl.language.errors import SpecError
from archlab.cli.main import main
from archlab.dashboards.library import Library
from archlab.dashboards.paper.drawing import STYLE, Look, counted
from archlab.dashboards.paper.files import write
from archlab.dashboards.paper.inline import inline
from archlab.dashboards.paper.more import fronts
from archlab.dashboards.paper.page import page
from archlab.dashboards.paper.pictures import domains, drawings
from archlab.search.comparison.compare import load_comparison
from archlab.search.models.graphs import graph_of
from archlab.search.reporting.report import report
from archlab.search.store.store import Store
from tests.dashboards.conftest import XSS
from tests.dashboards.findings_kit import measure_all
from tests.dashboards.generate import Plan, make_store, make_study
from tests.dashboards.special_studies import LADDER, SEARCH, make_ladder, make_search
from tests.search.compare_kit import retold


@pytest.fixture(scope="module")
def study(store):
    return Library(store).study("gate-position")


@pytest.fixture(scope="module")
def written(study, tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    return {path.name: path.read_bytes() for path in write(study, folder, 3.25, "archlab figures gate-position")}


def test_a_study_leaves_its_figures_tables_and_where_they_come_from(written):
    drawn = {name.rpartition(".")[0] for name in written if name.endswith(".pdf")}
    assert drawn == {"training", "training-seeds", "differences", "learning-rates", "gradient-norm"}
    tables = {f"table.{ending}" for ending in ("tex", "md", "csv", "json")}
    forms = {f"{name}.{form}" for name in drawn for form in ("pdf", "svg", "png", "csv")}
    assert set(written) == forms | tables | {"provenance.json"}
    told = json.loads(written["provenance.json"])
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in written.items() if name != "provenance.json"}
    assert told["sha256"] == digests and told["command"] == "archlab figures gate-position"
    assert len(told["trials"]) == 18 and set(told["captions"]) == drawn


def test_the_numbers_behind_a_figure_are_those_of_the_report(written, store):
    with Store.open(store, create=False) as read:
        found = load_comparison(read, "gate-position")
    assert written["table.tex"].decode() == report(found, "latex")
    table = found.table.set_index("variant")
    rows = pd.read_csv(io.BytesIO(written["differences.csv"])).set_index("variant")
    assert list(rows.index) == ["G1", "G2", "G3", "G4", "G5"]
    for column in ("delta", "delta_low", "delta_high"):
        np.testing.assert_allclose(rows[column], table.loc[rows.index, column], rtol=1e-12)
    curve = pd.read_csv(io.BytesIO(written["training.csv"]))
    last = curve[curve["variant"] == "G1"].iloc[-1]
    ends = []
    for trial in found.trials.query("variant == 'G1' and reported").to_dict("records"):
        with open(f"{trial['folder']}/metrics.jsonl") as lines:
            ends.append([v["validation_loss"] for v in map(json.loads, lines) if "validation_loss" in v][-1])
    assert last["mean"] == pytest.approx(np.mean(ends)) and last["std"] == pytest.approx(np.std(ends, ddof=1))
    assert last["n"] == 3
    alone = pd.read_csv(io.BytesIO(written["training-seeds.csv"])).query("variant == 'G1'")
    assert alone.groupby("seed")["value"].last().tolist() == pytest.approx(ends)
    norms = pd.read_csv(io.BytesIO(written["gradient-norm.csv"]))
    assert norms["key"].nunique() == 18 and (norms["value"] > 0).all()


def test_files_are_what_a_paper_needs(written):
    pdf = written["differences.pdf"]
    assert (pdf.startswith(b"%PDF") and b"/TrueType" in pdf) or b"/FontFile2" in pdf
    assert b"/Type3" not in pdf and b"CreationDate" not in pdf
    svg = ElementTree.fromstring(written["differences.svg"])
    texts = {element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"G1", "G5", "Difference in test loss (nats/token)"} <= texts
    png = written["differences.png"]
    assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20], "big") == 975  # 3.25 inches at 300 dpi


def test_the_same_study_gives_the_same_bytes(study, written):
    drawing = next(each for each in drawings(study) if each.name == "learning-rates")
    again = drawing.files(3.25)
    assert {f"learning-rates.{form}": data for form, data in again.items()}.items() <= written.items()


@pytest.mark.slow
def test_everything_that_is_measured_is_drawn(tmp_path):
    root = tmp_path / ".archlab"
    with make_store(root) as made:
        make_study(made, Plan(effects={"baseline": 0.0, "G1": -0.05, "$x_1$": 0.01, "_old": 0.02}, rates=()))
        measure_all(made, "gate-position")
    study = Library(root).study("gate-position")
    made = {drawing.name: drawing for drawing in drawings(study)}
    grids = {name.replace("_", "-") for name in study.comparison.grids["name"]}
    layers = {name.replace("_", "-") for name in study.comparison.curves["name"] if "_by_layer" in name}
    assert {"loss-by-position-512", "probes", "needle-chosen"} | grids | layers <= set(made)
    for drawing in made.values():
        files = drawing.files(6.75, ("svg",))
        assert b"<text" in files["svg"] and b"mathdefault" not in files["svg"]
    needle = made["needle-chosen"].rows
    told = study.comparison.grids.query("name == 'needle_chosen'")
    assert set(needle["x"]) == set(told["y"]) and needle["mean"].tolist() == told["mean"].tolist()
    assert b"$x_1$" in made["training"].files(3.25, ("svg",))["svg"]  # a name is no formula
    for name in ("training", "probes", "loss-by-position-512"):
        assert b"_old" in made[name].files(3.25, ("svg",))["svg"], name


def test_a_dozen_long_names_leave_the_axes_their_room(tmp_path):
    """In a column of a page; that axes collapse is a warning, and here an error."""
    cells = [f"norm={norm}, size={size}" for norm in ("rmsnorm", "layernorm") for size in ("12.6k", "101k")]
    names = [f"{gate} gate [{cell}]" for gate in ("query", "key", "value") for cell in cells]
    plan = Plan(rates=(), effects={"baseline": 0.0, **dict.fromkeys(names, -0.01)})
    root = tmp_path / ".archlab"
    with make_store(root) as made:
        make_study(made, plan)
    for drawing in drawings(Library(root).study(plan.name)):
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(3.25, drawing.height))
            drawing.draw(figure)
            figure.draw_without_rendering()
        (axes,) = figure.axes
        assert axes.get_position().height * figure.get_figheight() > 0.9, drawing.name


@pytest.mark.slow
def test_ladders_and_searches_are_drawn(tmp_path):
    root = tmp_path / ".archlab"
    with make_store(root) as made:
        make_ladder(made)
        make_search(made)
    library = Library(root)
    ladder, search = library.study(LADDER), library.study(SEARCH)
    made = {drawing.name: drawing for drawing in [*drawings(ladder), *drawings(search)]}
    assert {"scaling-compute", "front"} <= set(made)
    for name in {"scaling-compute", "isoflops", "front"} & set(made):
        svg = made[name].files(3.25, ("svg",))["svg"]
        assert b"<text" in svg and b"mathdefault" not in svg
    points = made["scaling-compute"].rows.query("kind == 'rung'")
    assert points["loss"].tolist() == ladder.comparison.rungs["loss"].tolist()
    front = made["front"].rows
    assert set(front[front["front"]]["number"]) == set(search.comparison.search.query("front")["number"])


def test_a_front_of_three_goals_is_drawn_per_pair_without_false_trade_offs(tmp_path):
    values = [(0, 1e6, 5.0, 9.0, True), (1, 2e6, 1.0, 9.5, True), (2, 3e6, 4.0, 8.0, True), (3, 4e6, 9.0, 8.5, False)]
    columns = ["number", "flops_per_token", "cache", "validation_perplexity", "front"]
    search = pd.DataFrame(values, columns=columns).assign(state="complete", feasible=True)
    with make_store(tmp_path) as made:
        make_search(made)
        found = load_comparison(made, SEARCH)
    goals = ["perplexity", "flops_per_token", "cache"]
    made = {each.name: each for each in fronts(retold(found, search=search, searched={"minimize": goals}))}
    assert set(made) == {"front-flops-per-token", "front-cache"}
    for name, x in (("front-flops-per-token", [1e6, 3e6]), ("front-cache", [1.0, 4.0])):
        figure = Figure()
        made[name].draw(figure)
        (steps,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "-"]
        assert list(steps.get_xdata()) == x and list(steps.get_ydata()) == sorted(steps.get_ydata())[::-1]
        (points,) = [line for line in figure.axes[0].lines if line.get_label() == "front"]
        assert len(points.get_xdata()) == 3


def test_domains_are_points_of_each_variant_in_their_rows(study):
    rows = [("baseline", "code", 4.0), ("baseline", "_prose", 9.0), ("G1", "code", 3.5), ("G1", "_prose", 9.5)]
    frame = pd.DataFrame(rows, columns=["variant", "domain", "perplexity"]).assign(loss=np.nan)
    look = Look({"baseline": "#000000", "G1": "#0072b2"}, {"baseline": "solid", "G1": "solid"})
    drawing, figure = domains(replace(study.comparison, domains=frame), look), Figure()
    drawing.draw(figure)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["code", "_prose"]
    for line, x in zip(axes.lines, ([4.0, 9.0], [3.5, 9.5]), strict=True):
        assert list(line.get_xdata()) == x and [round(y) for y in line.get_ydata()] == [0, 1]
    assert domains(study.comparison, look) is None


def test_figures_says_what_is_wrong_before_it_draws(store, tmp_path):
    run = CliRunner().invoke
    answer = run(main, ["figures", "gate-positio", "--store", str(store)])
    assert answer.exit_code == 2 and "did you mean 'gate-position'" in answer.output
    answer = run(main, ["figures", "gate-position", "--store", str(store), "--width", "wide"])
    assert answer.exit_code == 2 and "'wide' is no width" in answer.output
    answer = run(main, ["report", "gate-position", "--html", str(tmp_path / "x"), "--json", "--store", str(store)])
    assert answer.exit_code == 2 and "neither --json nor --format" in answer.output


@pytest.fixture(scope="module")
def reported(store, tmp_path_factory):
    """The page of the half done study, whose names look like HTML."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    answer = CliRunner().invoke(main, ["report", "qk-norm", "--html", str(file), "--store", str(store)])
    assert answer.exit_code == 0, answer.output
    return file


def test_a_report_opens_from_a_disk_and_asks_for_nothing(reported, chromium):
    tab = chromium.new_page()
    asked, said = [], []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: said.append(message.text))
    tab.goto(reported.as_uri())
    assert asked == [reported.as_uri()] and said == []
    text = tab.inner_text("body")
    assert XSS in text and "Provenance" in text and "archlab run" in text
    assert tab.locator("img, script").count() == 0 and tab.locator("figure svg").count() >= 3
    tab.set_viewport_size({"width": 800, "height": 900})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 800
    tab.close()


@pytest.mark.slow
def test_a_report_holds_the_numbers_of_the_table(study):
    text = page(study, "archlab run x.yaml")
    assert text.count("<script") == 0 and "http-equiv" in text
    for row in study.comparison.table.to_dict("records"):
        assert f"{row['perplexity_mean']:.3f} ± {row['perplexity_std']:.3f}" in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)


def test_kernels_that_cannot_be_had_are_said(study, monkeypatch):
    monkeypatch.setenv("ARCHLAB_KERNELS", "fast")
    with pytest.raises(SpecError, match="ARCHLAB_KERNELS must be reference, torch or triton; received 'fast'"):
        graph_of(study.record | {"context": 77}, "G1", "baseline")


def test_a_drawing_inside_of_a_page_can_do_nothing():
    bad = (
        b'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" onload="alert(1)">'
        b'<script>alert(1)</script><style>*{display:none}</style><foreignObject/><image href="https://x.example/a"/>'
        b'<a xlink:href="javascript:alert(1)" xlink:title="a &lt; b"><path id="p" d="M0 0"/></a>'
        b'<use xlink:href="#p"/><use xlink:href="https://x.example/b#p"/></svg>'
    )
    made = inline(bad, "f1")
    assert not re.search("alert|script|style>|foreignObject|x\\.example|onload", made)
    assert '<path d="M0 0" id="f1-p" />' in made and 'href="#f1-p"' in made and "<title>a &lt; b</title>" in made
    with pytest.raises(ValueError, match="found html"):
        inline(b"<html/>", "f1")


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (1500, "1.5k"), (2e6, "2M"), (3e15, "3e15"), (0.25, "0.25")])
def test_counts_are_short(value, text):
    assert counted(value) == text


@pytest.mark.slow
def test_published_studies_are_pages_whose_links_lead_somewhere(store, tmp_path, chromium):
    run = CliRunner().invoke
    site = tmp_path / "site"
    for name in ("gate-position", "qk-norm"):  # the second call keeps what the first has published
        answer = run(main, ["publish", name, "--out", str(site), "--title", XSS, "--store", str(store)])
        assert answer.exit_code == 0, answer.output
    tab = chromium.new_page()
    tab.goto((site / "index.html").as_uri())
    assert tab.locator("section.study").count() == 2 and tab.inner_text("h1") == XSS
    seen = set()
    for file in site.glob("**/index.html"):
        tab.goto(file.as_uri())
        assert tab.locator("script").count() == 0
        seen |= {*tab.locator("a").evaluate_all("links => links.map(link => link.href)")}
    tab.close()
    assert all(Path(url2pathname(url.removeprefix("file://"))).is_file() for url in seen)
    assert {file.relative_to(site) for file in site.rglob("*") if file.is_file()} >= {
        Path("gate-position/study.yaml"),
        Path("gate-position/files/table.tex"),
        Path("gate-position/files/training.pdf"),
    }
    with Store.open(store, create=False) as opened:
        assert (site / "qk-norm" / "study.yaml").read_text() == opened.study_yaml("qk-norm")
    before = {file: file.read_bytes() for file in site.rglob("*") if file.is_file()}
    again = run(main, ["publish", "qk-norm", "--out", str(site), "--title", XSS, "--store", str(store)])
    assert again.exit_code == 0
    assert {file: file.read_bytes() for file in site.rglob("*") if file.is_file()} == before


def test_a_page_of_somebody_else_is_not_written_over(store, tmp_path):
    (tmp_path / "index.html").write_text("<title>my home page</title>")
    answer = CliRunner().invoke(main, ["publish", "--out", str(tmp_path), "--store", str(store)])
    assert answer.exit_code == 2 and "is not a page of archlab" in answer.output
    assert [file.name for file in tmp_path.iterdir()] == ["index.html"]
