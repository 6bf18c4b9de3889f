"""The pages of a study's table and trials without a browser: what they hold, and what they say of a wrong address."""

import csv
import io
import json
import re
from dataclasses import replace
from urllib.parse import urlencode

import numpy as np
import pytest
from click.testing import CliRunner
from dash._pages import _parse_query_string

from archlab.cli.main import main
from archlab.dashboards import lines
from archlab.dashboards.library import Library
from archlab.dashboards.pages import stability
from archlab.dashboards.pages.compare import Sides
from archlab.dashboards.pages.compare import _wanted as beside
from archlab.dashboards.pages.table import Wanted, wanted
from archlab.dashboards.view import View
from archlab.search.reporting.findings import findings
from archlab.search.store.lock import StudyLock
from archlab.search.store.store import Store
from tests.dashboards.conftest import QK_NORM, XSS
from tests.dashboards.generate import Plan, make_store, make_study, planned, record, rows, run_trial
from tests.dashboards.test_app import Client

TABLE = "/study/gate-position/table"


@pytest.fixture(scope="module")
def client(store):
    return Client(store)


@pytest.fixture(scope="module")
def trials(store):
    """The rows of the finished study."""
    with Store.open(store, create=False) as opened:
        return opened.study_trials("gate-position")


def test_the_table_has_the_means_of_the_raw_results(client, trials):
    page = client.page(TABLE, "?cols=perplexity,memory&err=se")
    for variant in ("baseline", "G1", "G5"):
        done = {
            t["seed"]: t["result"]["test"]["perplexity"]
            for t in trials
            if t["variant"] == variant and t["role"] == "repeat"
        }
        values = np.array(list(done.values()))
        assert len(values) == 3
        assert f"{values.mean():.3f} ± {values.std(ddof=1) / np.sqrt(3):.3f}" in page
    assert "393 MiB" in page and '"headerName": "Verdict"' not in page and '"headerName": "Memory"' in page


def test_an_open_row_shows_its_trials_and_leads_to_them(client, trials):
    page = client.page(TABLE, "?open=G1")
    mine = {t["key"] for t in trials if t["variant"] == "G1"}
    assert len(mine) == 5 and all(f"/run/{key}" in page for key in mine)
    assert "seed 0 · tuning" in page
    assert not any(f"/run/{t['key']}" in page for t in trials if t["variant"] == "G2")


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("?q=verdit=better", "did you mean 'verdict'"),
        ("?q=lr>=x", "is no number"),
        ("?err=mad", "The address asks for what is not there: 'mad' is no error of a mean"),
        ("?cols=n,perplexty", "there is no 'perplexty' here; did you mean 'perplexity'?"),
        ("?q=variant=nobody", "No variant matches the filter"),
    ],
)
def test_a_wrong_choice_is_said_beside_a_whole_page(client, query, says):
    page = client.page(TABLE, query)
    assert says in page.replace("\\'", "'") and '"ablation"' in page


def test_no_tick_takes_the_place_of_a_choice_that_is_not_answered_yet(client):
    told = [[each["id"] for each in made["inputs"]] for made in client.http.get("/_dash-dependencies").json]
    ticking = {next(each for each in ids if each.endswith("-tick")): ids for ids in told if "-tick" in str(ids)}
    together = {tick for tick, ids in ticking.items() if len(ids) > 1}
    assert {"ablation-tick", "runs-tick", "compare-tick"} <= ticking.keys()
    assert not together


def test_downloads_of_the_table_have_its_rows_and_columns(client):
    query = "?q=verdict=better&cols=n,delta"
    rows = list(csv.DictReader(io.StringIO(client.http.get(f"/download/gate-position/table.csv{query}").text)))
    assert [row["variant"] for row in rows] == ["G1", "G2"]
    hidden = "?hide=G1&hide=baseline"
    rows = list(csv.DictReader(io.StringIO(client.http.get(f"/download/gate-position/table.csv{hidden}").text)))
    told = client.http.get(f"/download/gate-position/table.json{hidden}").json["table"]
    assert [row["variant"] for row in rows] == [row["variant"] for row in told] == ["G2", "G3", "G4", "G5"]
    tex = client.http.get(f"/download/gate-position/table.tex{query}").text
    assert tex.count(r"\begin{tabular}{lrr}") == 1 and tex.count(r"\end{table}") == 1 and "verdict=better" in tex
    assert "G3" not in tex.split(r"\bottomrule")[0] and "torch 2.13.0" in tex
    assert client.http.get("/download/gate-position/table.md?q=verdit=1").status_code == 400
    wrong = client.http.get("/download/gate-position/table.csv?err=mad&cols=n,nonsense")
    assert wrong.status_code == 400 and "'mad'" in wrong.text and "'nonsense'" in wrong.text
    assert client.http.get("/download/gate-position/table.exe").status_code == 404
    told = client.http.get("/download/gate-position/provenance.json").json
    assert told["provenance"]["data"]["source"] == "stdlib" and len(told["trials"]) == 18
    assert told["command"].startswith("archlab run gate-position.yaml")


def test_the_command_line_prints_the_table_that_is_downloaded(client, store):
    asked = ["--where", "verdict=better", "--error", "ci", "--columns", "n,perplexity,sdpa"]
    query = "?q=verdict=better&err=interval&cols=n,perplexity,varied.block.attention.sdpa"
    for form, ending in (("md", "md"), ("latex", "tex")):
        done = CliRunner().invoke(main, ["report", "gate-position", "--store", str(store), "--format", form, *asked])
        assert done.exit_code == 0, done.output
        assert done.stdout == client.http.get(f"/download/gate-position/table.{ending}{query}").text
        assert "G1" in done.stdout and "of the 95" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--where", "verdit=better"], "--where: column 1: there is no 'verdit' here; did you mean 'verdict'?"),
        (
            ["--error", "stdd", "--columns", "perplexty"],
            "did you mean 'std'? (std, se, interval)\ncolumns: there is no",
        ),
        (["--columns", "perplexty"], "did you mean 'perplexity'? (there is: variant"),
        (["--columns", "n", "--json"], "json has every column with exact numbers: it goes with --where alone"),
        (["--where", "n=3", "--html", "x.html"], "it goes with none of --where, --error, --columns"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_says_what_a_table_can_not_be(store, arguments, says):
    done = CliRunner().invoke(main, ["report", "gate-position", "--store", str(store), *arguments])
    assert done.exit_code == 2 and done.stdout == "" and says in done.stderr


def test_rows_that_a_filter_keeps_are_left_in_the_exact_numbers(store):
    asked = ["report", "gate-position", "--store", str(store), "--json"]
    whole, some = (json.loads(CliRunner().invoke(main, [*asked, *more]).stdout) for more in ([], ["--where", "G1"]))
    assert [row["variant"] for row in some["table"]] == ["G1"]
    assert some["table"][0] in whole["table"] and some["trials"] == whole["trials"]


def test_runs_are_all_trials_and_a_filter_finds_some(client, trials):
    page = client.page("/study/gate-position/runs")
    assert f"{len({t['key'] for t in trials})} trials" in page
    assert "3 of 30 trials" in client.page("/study/gate-position/runs", "?q=variant=G1 seed=0")
    assert "there is no 'sed' here; did you mean 'seed'?" in client.page("/study/gate-position/runs", "?q=sed=0")
    half = client.page("/study/qk-norm/runs")
    assert "interrupted" in half and "diverged" in half and "loss is not finite at step 130" in half


def test_a_trial_whose_driver_is_gone_is_interrupted_in_every_filter(client, store):
    assert "No variant matches" not in client.page("/study/qk-norm/table", "?q=state=interrupted")
    assert "No variant matches" in client.page("/study/qk-norm/table", "?q=state=running")
    assert "1 of " in client.page("/study/qk-norm/runs", "?q=state=interrupted")
    asked = ["report", "qk-norm", "--store", str(store), "--json", "--where", "state=interrupted"]
    told = json.loads(CliRunner().invoke(main, asked).stdout)
    (gone,) = [trial for trial in told["trials"] if trial["state"] == "interrupted"]
    assert [row["variant"] for row in told["table"]] == [gone["variant"]]


def test_a_trial_is_found_by_its_key_and_its_beginning(client, trials):
    trial = trials[0]
    for key in (trial["key"], trial["key"][:12]):
        page = client.page(f"/run/{key}")
        assert f"{trial['variant']} · seed 0 · lr=0.001" in page
        assert "tokens: 1500000" in page and "2.13.0" in page and "Attempts" in page
        assert "checkpoints: 3, 29.5 MB in all, waited for 0.04 s, 0.93 s of writing" in page


def test_a_trial_of_two_studies_is_shown_as_the_one_wants_it_that_a_reader_comes_from(tmp_path):
    plan = Plan("first", effects={"baseline": 0.0, "G1": -0.1}, rates=(), seeds=(0,))
    with make_store(tmp_path) as made:
        make_study(made, plan)
        made.save_study("second", record(replace(plan, name="second")), "study: second\n")
        made.add_trials("second", rows(plan))
        key = made.study_trials("first")[0]["key"]
    client = Client(tmp_path)
    for name, other in (("first", "second"), ("second", "first")):
        (link,) = set(re.findall(rf"/run/{key}[^\"\\]*", client.page(f"/study/{name}/runs")))
        crumbs = client.page(*re.fullmatch(r"(.*)(\?.*)", link).groups()).split("run-seen")[0]
        assert f"/study/{name}/runs" in crumbs and f"/study/{other}" not in crumbs


def test_a_trial_that_another_study_trains_is_running_in_both_and_reused_in_one_when_it_ends(tmp_path):
    plan = Plan("first", effects={"baseline": 0.0}, rates=(), seeds=(0,))
    with make_store(tmp_path) as made:
        make_study(made, plan, finish=False)
        made.save_study("second", record(replace(plan, name="second")), "study: second\n")
        made.add_trials("second", rows(plan))
        (key,) = planned(made, plan)
        attempt = run_trial(made, plan, key, 0.5)  # `first` owns it
        pages = ["/study/first/runs", "/study/second/runs", "/study/first", "/study/second", "/"]
        for driven, there, gone in ((True, "running", "interrupted"), (False, "interrupted", "running")):
            client, lock = Client(tmp_path), StudyLock(tmp_path, "first")
            if driven:
                lock.acquire()
            said = [client.page(path) for path in pages[:2]]
            assert all(f'"c_state": "{there}"' in page and f'"c_state": "{gone}"' not in page for page in said)
            assert all(f"0 of 1 trials · 1 {there}" in client.page(path) for path in pages[2:])
            for study in ("first", "second"):
                assert f"badge-{there}" in client.page(f"/run/{key}", f"?study={study}")
            if driven:
                lock.release()
        made.finish(key, attempt, "failed", None, "RuntimeError: lost")
    client = Client(tmp_path)
    assert '"c_reason": "RuntimeError: lost"' in client.page(pages[0])
    assert '"c_reason": "reused, RuntimeError: lost"' in client.page(pages[1])


def test_ticks_of_an_address_are_those_of_the_grid_and_an_unknown_one_is_said(client, trials):
    ticked = list(dict.fromkeys(t["key"] for t in trials))[:2]
    page = client.page("/study/gate-position/runs", f"?ticked={ticked[0][:12]},{ticked[1]},0zz")
    ids = set(json.loads(re.search(r'"selectedRows": ({[^}]*})', page)[1])["ids"])
    assert {each.rpartition("/")[2] for each in ids} == {*ticked}
    assert "ticks the trial '0zz', which the study lacks" in page
    assert "selectedRows" not in client.page("/study/gate-position/runs")


@pytest.mark.parametrize("path", ["table", "curves", "runs"])
def test_a_filter_goes_along_to_the_other_pages_that_have_one(client, path):
    page = client.page(f"/study/gate-position/{path}", "?q=verdict=better seed=0")
    for other in {"table", "curves", "runs"} - {path}:
        assert f'"/study/gate-position/{other}?q=verdict%3Dbetter+seed%3D0"' in page
    assert '"/study/gate-position/stability"' in page
    assert '"/study/gate-position/curves?metric=training"' in client.page("/study/gate-position", "?metric=training")


def test_of_many_verdicts_the_largest_are_said_and_how_many_more_there_are(tmp_path):
    effects = {"baseline": 0.0, **{f"v{i}": -0.05 * i for i in range(1, 9)}, **{f"same{i}": 0.0 for i in range(8)}}
    plan = Plan("many", effects=effects, rates=())
    with make_store(tmp_path) as made:
        make_study(made, plan)
    said = findings(Library(tmp_path).study("many").comparison)
    better = [text for kind, text in said if kind == "better"]
    assert [text.split()[0] for text in better] == ["v8", "v7", "v6", "v5", "v4", "v3", "2"]
    assert better[-1] == "2 more are better than baseline, by less"
    (noise,) = [text for kind, text in said if kind == "within noise"]
    assert noise == "same0, same1, same2, same3, same4 and 3 more are within noise of baseline"


def test_figures_of_very_many_variants_draw_the_baseline_and_the_best(tmp_path):
    effects = {"baseline": 0.0} | {f"v{i}": 0.01 * (7 * i % 40 - 20) for i in range(1, 40)}
    plan = Plan("many", effects=effects, rates=(), points=8, steps=8)
    with make_store(tmp_path) as made:
        make_study(made, plan)
    study = Library(tmp_path).study("many")
    best = study.comparison.table.sort_values("loss_mean")["variant"]
    wanted = {"baseline", *[name for name in best if name != "baseline"][:23]}
    assert lines.leading(study) == [name for name in effects if name in wanted]
    page = Client(tmp_path).page("/study/many")
    assert page.count("Drawn are 24 of 40 variants, the best and their baselines") == 2
    drawn = [name for name in effects if json.dumps({"variant": name}) in page]
    assert drawn == lines.leading(study)


def test_figures_of_very_many_cells_draw_the_best_beside_what_they_are_compared_with(tmp_path):
    names = [f"{row} [width={width}]" for width in range(20) for row in ("baseline", "G1")]
    effects = {name: 0.02 * (index // 2) - 0.01 * (index % 2) for index, name in enumerate(names)}
    plan = Plan("cells", effects=effects, rates=(), seeds=(0,), points=8, steps=8)
    with make_store(tmp_path) as made:
        stored = record(make_study(made, plan))
        for variant in stored["variants"]:
            variant["baseline"] = variant["name"].replace("G1", "baseline")
        stored["baseline"] = names[0]
        made.save_study(plan.name, stored, "study: cells\n")
    shown = lines.leading(Library(tmp_path).study("cells"))
    assert shown == names[:24]


def test_a_study_of_several_lengths_says_from_which_to_which(tmp_path):
    plan = Plan("lengths", effects={"baseline": 0.0, "longer": 0.1}, rates=(), points=8, steps=8)
    with make_store(tmp_path) as made:
        stored = record(make_study(made, plan))
        assert f"{stored['tokens']:,} tokens per trial" in Client(tmp_path).page("/study/lengths")
        stored["variants"][1]["tokens"] = 4 * stored["tokens"]
        made.save_study(plan.name, stored, "study: lengths\n")
    said = f"{stored['tokens']:,} to {4 * stored['tokens']:,} tokens per trial"
    assert said in Client(tmp_path).page("/study/lengths")


def test_figures_of_very_many_variants_draw_what_trains_while_there_are_no_losses(tmp_path):
    effects = {"baseline": 0.0} | {f"v{i}": 0.0 for i in range(1, 41)}
    plan = Plan("many", effects=effects, rates=(), seeds=(0,), points=8, steps=8)
    with make_store(tmp_path) as made:
        make_study(made, plan, finish=False)
        keys = planned(made, plan)
        for key in keys[30:34]:
            run_trial(made, plan, key, 0.5)
    began = {*list(effects)[30:34]}
    drawn = lines.leading(Library(tmp_path).study("many"))
    assert {"baseline", *began} < {*drawn} and len(drawn) == 24
    page = Client(tmp_path).page("/study/many")
    assert "Drawn are 24 of 41 variants, what trains first and its baselines" in page


def test_curves_are_means_over_what_shares_a_level(tmp_path):
    plan = Plan(rates=(), effects={"baseline": 0.0, "G1": -0.05, "G2": -0.02, "G3": 0.01}, seeds=(0, 1))
    with make_store(tmp_path) as made:
        stored = record(make_study(made, plan))
        for variant in stored["variants"]:
            variant["components"] = {"gate": variant["name"] in ("G1", "G2")}
            variant["axes"] = {"block.norm.placement": "pre"}
        made.save_study(plan.name, stored, "study: gate-position\n")
    study = Library(tmp_path).study(plan.name)
    each = {group.variant: group for group in lines.groups(study, View())}
    levels = {group.variant: group for group in lines.groups(study, View(by="gate"))}
    assert {name: group.seeds for name, group in levels.items()} == {"without gate": 4, "with gate": 4}
    wanted = (each["G1"].mean + each["G2"].mean) / 2
    np.testing.assert_allclose(levels["with gate"].mean, wanted)
    assert len(lines.groups(study, View(by="gate", lines="runs"))) == 8
    client = Client(tmp_path)
    page = client.page(f"/study/{plan.name}/curves", "?by=gate")
    assert "with gate (n = 4)" in page and '{"level": "gate"}' in page
    page = client.page(f"/study/{plan.name}/curves", "?by=block.norm.placement")
    assert "by 'block.norm.placement', which the study does not vary" in page and '{"variant": "G1"}' in page


def test_rates_of_a_grid_are_a_curve_of_each_of_its_other_combinations(tmp_path):
    names = [f"{row} [lr={rate}]" for rate in ("0.004", "0.016", "0.064") for row in ("baseline", "G1")]
    effects = dict(zip(names, (0.0, -0.05, 0.3, 0.1, 0.4, 0.4), strict=True))
    plan = Plan("rates", effects=effects, rates=(), seeds=(0, 1), diverge=((names[-1], 1e-3),))
    with make_store(tmp_path) as made:
        stored = record(make_study(made, plan))
        for variant in stored["variants"]:
            row, _, rate = variant["name"].rstrip("]").partition(" [lr=")
            variant |= {"axes": {"lr": rate}, "row": row, "components": {}, "baseline": f"baseline [lr={rate}]"}
        made.save_study(plan.name, stored, "study: rates\n")
    study = Library(tmp_path).study("rates")
    rows = stability.crossed_rates(study, study.comparison)
    assert [(row["variant"], row["lr"], row["best"]) for row in rows] == [
        ("baseline", 0.004, True), ("G1", 0.004, True), ("baseline", 0.016, False), ("G1", 0.016, False),
        ("baseline", 0.064, False), ("G1", 0.064, False),
    ]  # fmt: skip
    assert [row["state"] for row in rows] == ["complete"] * 5 + ["diverged"]
    trials = study.comparison.trials
    for row, name in zip(rows[:-1], names[:-1], strict=True):
        own = trials[(trials["variant"] == name) & trials["reported"]]["validation_loss"]
        assert len(own) == 2 and row["validation_loss"] == pytest.approx(own.mean())
    assert "Each rate of the grid" in Client(tmp_path).page("/study/rates/stability")


@pytest.mark.parametrize("key", ["0", "f" * 64, "..%2F..%2Fetc%2Fpasswd", "%3Cb%3E", "zz"])
def test_a_wrong_key_is_a_card(client, key):
    assert "No such trial" in client.page(f"/run/{key}")


def test_a_failed_trial_says_why_and_how_to_try_again(tmp_path):
    root = tmp_path / ".archlab"
    plan = Plan(rates=(), effects={"baseline": 0.0, XSS: -0.1}, fail=((XSS, 1e-3),))
    with make_store(root) as made:
        make_study(made, plan)
        failed = next(t for t in made.study_trials(plan.name) if t["state"] == "failed")
        made.trial_folder(failed["key"]).joinpath("error.txt").write_text(
            "Traceback\n  line 7\nRuntimeError: <b>oom</b>\n"
        )
    client = Client(root)
    page = client.page(f"/run/{failed['key']}")
    assert "RuntimeError: out of memory" in page and "RuntimeError: <b>oom</b>" in page
    assert "archlab retry gate-position --variant" in page
    assert "archlab retry gate-position" in client.page("/study/gate-position/runs")


def test_compared_variants_show_their_own_specs_and_rows(client):
    page = client.page("/study/gate-position/compare", "?variants=G1,G2,nobody")
    assert "the study lacks" in page and "nobody" in page
    shown = json.loads(page)
    assert "variant" in json.dumps(shown) and "Results" in page and '"G3"' in page  # among the choices alone
    rows = page.split('"compare-content"')[0].split("Results")[1]
    assert "G1" in rows and "G2" in rows and "baseline" not in rows.split("Model")[0]
    assert "G1" in client.page("/study/gate-position/compare", "?variants=G1&places=all&metric=training")


def test_trials_stand_beside_each_other_by_the_beginning_of_their_keys(client, trials):
    one, other = (t for t in trials if (t["variant"], t["role"]) == ("G2", "repeat") and t["seed"] in (1, 2))
    page = client.page("/study/gate-position/compare", f"?runs={one['key'][:10]},{other['key']},ffffffff")
    assert "The address asks for the trial 'ffffffff': the study has no trial" in page.replace("\\'", "'")
    assert "G2 · seed 1 · lr=0.002" in page and "G2 · seed 2 · lr=0.002" in page
    differs = page.split('"compare-content"')[0].split("Results")[1]
    model, recipe, machine = (differs.split(f'"{part}"')[1] for part in ("Model", "Recipe", "Machine"))
    assert "No differences." in model.split("Recipe")[0] and "No differences." in machine.split("Curves")[0]
    assert '"seed"' in recipe.split("Machine")[0] and '"tokens"' not in recipe.split("Machine")[0]
    assert f"{one['result']['test']['loss']:.4f}" in differs


def test_names_of_any_letters_survive_their_addresses(tmp_path):
    names = ["baseline", "a|b", "c,d", "e&f=g", "a" * 64]
    with make_store(tmp_path) as made:
        make_study(made, Plan("named", effects=dict.fromkeys(names, 0.0), rates=(), seeds=(0,)))
    study = Library(tmp_path).study("named")
    for chosen in (("a|b", "baseline"), ("c,d",), ("c,d", "e&f=g"), tuple(names)):
        sides = Sides(variants=chosen, trials=(study.trials[0]["key"],))
        asked = _parse_query_string(f"?{urlencode(sides.query(), doseq=True, safe=',')}")
        assert beside(study, asked.get("variants", ""), asked.get("runs", "")) == (sides, [])
        opened = tuple(name for name in names if name in chosen)
        asked = _parse_query_string(f"?{urlencode(Wanted(opened=opened).query(), doseq=True)}")
        assert wanted(asked, study) == (Wanted(opened=opened), [])


def test_the_timeline_has_a_bar_for_each_attempt(client, tmp_path):
    page = client.page("/study/gate-position/timeline")
    assert re.search(r"(\d+ attempts of \d+ trials)", page)[1] == "30 attempts of 30 trials"
    page = client.page("/study/qk-norm/timeline", "?rows=variants")
    assert "interrupted" in page and "6 attempts of 6 trials" in page
    with make_store(tmp_path) as made:
        make_study(made, QK_NORM, finish=False)
        run_trial(made, QK_NORM, planned(made, QK_NORM)[0])
    assert "1 attempts of 1 trials" in Client(tmp_path).page("/study/qk-norm/timeline")


def test_studies_stand_beside_each_other(client):
    page = client.page("/compare", f"?studies=gate-position,{QK_NORM.name}")
    assert "The studies have no change in common." in page and "Only in one of them" in page
    assert "Do verdicts hold?" in page and "do not compare" not in page
    one = client.page("/compare", "?studies=gate-position,nope")
    assert "The store has no study 'nope'" in one and "Two studies with results can be compared." in one
    assert "Choose studies" in client.page("/compare", "?studies=nope")
