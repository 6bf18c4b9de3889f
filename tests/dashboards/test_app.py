"""The application without a browser: pages and downloads for every state a store can be in."""

import json
import re
import shlex
import sqlite3
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256

import pytest

from archlab.cli.kit import parsed
from archlab.dashboards import PortTaken, make_app, words
from archlab.dashboards.library import Library, NotFound, Study
from archlab.dashboards.server import listen
from archlab.search.comparison.compare import load_comparison
from archlab.search.reporting.report import report
from archlab.search.results.losses import read_documents
from archlab.search.store.notes import Note
from archlab.search.store.store import Store
from tests.dashboards.generate import Plan, make_store, make_study, planned, rows, run_trial


class Client:
    """Asks an app for pages as the browser does."""

    def __init__(self, root, **options):
        self.http = make_app(root, **options).server.test_client()
        self.http.get("/")
        found = [d["output"] for d in self.http.get("/_dash-dependencies").json if "_pages_content" in d["output"]]
        self.output = found[0]

    def page(self, path, search=""):
        """The page at an address, as the JSON text of its components."""
        location = [
            {"id": "_pages_location", "property": p, "value": v} for p, v in (("pathname", path), ("search", search))
        ]
        outputs = [{"id": i, "property": p} for i, p in (("_pages_content", "children"), ("_pages_store", "data"))]
        changed = ["_pages_location.pathname"]
        body = {"output": self.output, "outputs": outputs, "inputs": location, "changedPropIds": changed}
        answer = self.http.post("/_dash-update-component", json=body)
        assert answer.status_code == 200
        return json.dumps(answer.json["response"]["_pages_content"], ensure_ascii=False)


@pytest.fixture(scope="module")
def client(store):
    return Client(store)


def test_pages_hold_what_the_store_holds(client):
    assert "Where should attention be gated?" in client.page("/")
    page = client.page("/study/gate-position")
    assert "G1 is better than baseline" in page and "Smallest difference this table could have resolved" in page
    assert "archlab run gate-position.yaml" in page and "block.attention.sdpa" in page


def test_the_command_that_goes_on_is_the_one_that_was_typed():
    record = {"file": "my studies/a.yaml", "overrides": {"train.tokens": "20k", "tune.lr": [1e-3, 2e-3]}}
    study = Study("a", "1", record, [], None, None, None, {}, Note())
    typed = shlex.split(words.command(study, default_store=False, root="/r"))
    assert typed[:3] == ["archlab", "run", "my studies/a.yaml"] and typed[-2:] == ["--store", "/r"]
    assert typed[3:-2] == ["--set", "train.tokens=20k", "--set", "tune.lr=[0.001, 0.002]"]
    assert parsed(tuple(typed[4:-2:2])) == record["overrides"]


@pytest.mark.parametrize("name", ["nope", "..%2F..%2Fetc", "Gate-Position", "a" * 300, "%3Cb%3E"])
def test_a_wrong_study_is_a_card_that_names_the_right_ones(client, name):
    page = client.page(f"/study/{name}")
    assert "No such study" in page and "/study/gate-position" in page
    assert "Content-Disposition" not in client.http.get(f"/download/{name}.md").headers


JSON = "application/json"
MALFORMED = {
    "nothing": b"",
    "half": b"{",
    "a list": b"[]",
    "no output": b"{}",
    "an output that is none": b'{"output": []}',
    "of no page": b'{"output": "a.b", "outputs": {"id": "a", "property": "b"}, "inputs": [], "changedPropIds": []}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_callback_is_refused(client, body):
    answer = client.http.post("/_dash-update-component", data=body, content_type=JSON)
    assert answer.status_code == 400


@pytest.mark.parametrize("part", ["outputs", "inputs", "changedPropIds", "output"])
@pytest.mark.parametrize("value", [None, 7, "x", [], [7], [{"id": 1}], {}, [[]]], ids=repr)
def test_a_callback_with_a_wrong_part_is_refused(client, part, value):
    inputs = [{"id": "_pages_location", "property": each, "value": "/"} for each in ("pathname", "search")]
    outputs = [{"id": i, "property": p} for i, p in (("_pages_content", "children"), ("_pages_store", "data"))]
    body = {"output": client.output, "outputs": outputs, "inputs": inputs, "changedPropIds": ["_pages_location.search"]}
    assert client.http.post("/_dash-update-component", json=body).status_code == 200
    answer = client.http.post("/_dash-update-component", json=body | {part: value})
    assert answer.status_code == (200 if (part, value) == ("changedPropIds", []) else 400)


def test_what_is_far_too_long_is_refused(client):
    assert client.http.post("/_dash-update-component", data=b" " * 9_000_000, content_type=JSON).status_code == 413


def test_a_wrong_address_is_a_card(client):
    assert "No such page" in client.page("/nothing/here")


@pytest.mark.parametrize("ending, form", [("md", "md"), ("csv", "csv"), ("tex", "latex"), ("json", "json")])
def test_downloads_are_the_report(client, store, ending, form):
    answer = client.http.get(f"/download/gate-position.{ending}")
    with Store.open(store, create=False) as opened:
        assert answer.text == report(load_comparison(opened, "gate-position"), form)
    assert f"gate-position.{ending}" in answer.headers["Content-Disposition"]


def test_the_browser_is_told_to_load_nothing_from_elsewhere(client):
    answer = client.http.get("/")
    assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    assert "https://" not in answer.text.replace("https://www.w3.org", "")
    assert client.http.get("/download/gate-position.exe").status_code == 404


def _missing(root):
    pass


def _newer(root):
    make_store(root).close()
    (root / "store.json").write_text('{"version": 99}')


def _damaged(root):
    make_store(root).close()
    (root / "trials.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)


def _half_written(root):
    make_store(root).close()
    (root / "trials.db").unlink()


def _marker_cut(root):
    make_store(root).close()
    (root / "store.json").write_text('{"vers')


@pytest.mark.parametrize(
    "break_it, says",
    [
        (_missing, "No studies yet"),
        (_newer, "upgrade archlab"),
        (_damaged, "damaged"),
        (_half_written, "missing"),
        (_marker_cut, "store.json"),
    ],
)
def test_a_store_that_cannot_be_read_is_a_card_that_says_what_to_do(tmp_path, break_it, says):
    root = tmp_path / ".archlab"
    break_it(root)
    client = Client(root)
    for path in ("/", "/study/gate-position"):
        assert says in client.page(path)


def test_a_locked_store_is_a_card_and_opens_again(tmp_path):
    root = tmp_path / ".archlab"
    with make_store(root) as made:
        make_study(made, Plan(rates=(), effects={"baseline": 0.0}))
    holder = sqlite3.connect(root / "trials.db")
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("PRAGMA journal_mode = DELETE")
    holder.execute("BEGIN EXCLUSIVE")
    client = Client(root)
    assert "locked by another program" in client.page("/")
    holder.rollback()
    holder.close()
    assert "Where should attention be gated?" in client.page("/")


@pytest.mark.parametrize("until, sentence", [(37, "finished"), (None, "not running")])
def test_a_trial_that_waits_where_it_was_to_is_done(tmp_path, until, sentence):
    plan = Plan(effects={"baseline": 0.0}, rates=(1e-3, 2e-3), seeds=(0,))
    with make_store(tmp_path) as made:
        make_study(made, plan, finish=False)
        slow, *others = planned(made, plan)
        for key in others:
            run_trial(made, plan, key)
        attempt = run_trial(made, plan, slow, fraction=0.1)
        made.finish(slow, attempt, "paused", {"state": "paused", "step": 37, "tokens": 9, "validation": {"loss": 3.0}})
        made.add_trials(plan.name, [row._replace(until=until) for row in rows(plan) if row.trial.key == slow])
    study = Library(tmp_path).study(plan.name)
    assert words.progress(study) == f"{1 if until is None else 2} of 2 trials · 1 paused"
    assert words.activity(study)[1].startswith(sentence)


def test_a_damaged_result_costs_the_table_but_not_the_page(tmp_path):
    root = tmp_path / ".archlab"
    with make_store(root) as made:
        make_study(made, Plan(rates=(), effects={"baseline": 0.0, "G1": -0.1}))
    for path in root.glob("trials/*/*/test_documents.npz"):
        path.write_bytes(b"PK\x03\x04 cut")
    client = Client(root)
    page = client.page("/study/gate-position")
    assert "can't be compared" in page and "test_documents.npz" in page and "Curves" in page
    assert "can't be compared" in client.page("/")
    assert client.http.get("/download/gate-position.md").status_code == 409


def test_a_study_without_any_result_has_a_page(tmp_path):
    root = tmp_path / ".archlab"
    with make_store(root) as made:
        make_study(made, finish=False)
    page = Client(root).page("/study/gate-position")
    assert "0 of 30 trials" in page and "no complete trial" in page


@pytest.mark.parametrize("other", [{"objective": {"type": "masked"}}, {"bytes_per_token": 3.5}, {"lossy": "b" * 16}])
def test_no_perplexity_is_the_lowest_where_they_do_not_compare(tmp_path, other):
    root = tmp_path / ".archlab"
    plan = Plan(rates=(), effects={"baseline": 0.0, "G1": -0.1})
    with make_store(root) as made:
        make_study(made, plan)
        client, record = Client(root), made.study(plan.name)
        before = client.page("/")
        record["variants"][1] |= other
        made.save_study(plan.name, record, "study: gate-position\n")
    after = Client(root).page("/")
    assert "lowest perplexity" in before and "lowest perplexity" in after
    assert "do not compare" in after and "do not compare" not in before


def test_a_search_shows_its_best_trials(tmp_path):
    root = tmp_path / ".archlab"
    plan = Plan(rates=(), effects={"baseline": 0.0, "G1": -0.1})
    with make_store(root) as made:
        make_study(made, plan)
        tried = [
            row._replace(role="search", settings={"number": i, "width": 64 * i}) for i, row in enumerate(rows(plan))
        ]
        made.add_trials(plan.name, tried)
    page = Client(root).page("/study/gate-position")
    assert "Search, validation (6 trials)" in page and "width=128" in page


def test_the_library_reads_again_only_what_changed(tmp_path, monkeypatch):
    root = tmp_path / ".archlab"
    plan = Plan(rates=(), effects={"baseline": 0.0, "G1": -0.1})
    with make_store(root) as made:
        make_study(made, plan, finish=False)
        keys = planned(made, plan)
        for key in keys[:2]:
            run_trial(made, plan, key)
        library = Library(root)
        first = library.study(plan.name)
        compared = []
        monkeypatch.setattr(library, "_compare", lambda name, _rows: compared.append(name) or (first.comparison, None))
        assert library.study(plan.name) is first
        run_trial(made, plan, keys[2], fraction=0.5)
        second = library.study(plan.name)
        assert second.version != first.version and compared == [plan.name]
        curve = made.trial_folder(keys[2]) / "metrics.jsonl"
        curve.write_text(curve.read_text() + '{"step": 360, "time": 1.0, "attempt": 1, "loss": 1.5}\n')
        third = library.study(plan.name)
        assert third.version != second.version and compared == [plan.name]
        assert third.curves[keys[0]] is first.curves[keys[0]]
    with pytest.raises(NotFound):
        library.study("nope")


def test_two_apps_in_one_process_show_their_own_stores(client, tmp_path):
    other = Client(tmp_path / ".archlab")
    assert "No studies yet" in other.page("/")
    assert "gate-position" in client.page("/")


def test_an_explicit_port_that_is_taken_is_refused_and_else_the_next_is_used(tmp_path):
    first = listen(tmp_path, port=None)
    try:
        with pytest.raises(PortTaken, match=f"port {first.port} of 127.0.0.1 is in use"):
            listen(tmp_path, port=first.port)
        second = listen(tmp_path, port=None)
        assert second.port > first.port
        second.server_close()
    finally:
        first.server_close()


def test_the_dashboard_starts_without_the_heavy_packages():
    heavy = ("torch", "ray", "mlflow", "optuna", "matplotlib", "pandas", "pyarrow", "scipy.special", "scipy.optimize")
    code = "import sys; from archlab.dashboards import app, server; "
    code += f"print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"


def test_the_newest_study_is_compared_before_it_is_asked_for(store):
    library = Library(store)
    library.prepare()
    library._compare = lambda name, _rows: pytest.fail(f"{name} is compared again")
    assert library.summary("qk-norm").comparison is not None


def test_a_store_that_is_not_there_is_nothing_to_prepare(tmp_path):
    Library(tmp_path / "none").prepare()
    assert not (tmp_path / "none").exists()


def test_the_documents_of_a_trial_with_two_rows_are_read_once(store, monkeypatch):
    read = []
    monkeypatch.setattr(
        "archlab.search.comparison.compare.read_documents", lambda folder: read.append(folder) or read_documents(folder)
    )
    with Store.open(store) as opened:
        rows = [
            trial["key"]
            for trial in load_comparison(opened, "gate-position").trials.query("reported").to_dict("records")
        ]
        every = [trial["key"] for trial in opened.study_trials("gate-position") if trial["key"] in rows]
    assert sorted(folder.name for folder in read) == sorted(set(rows)) and len(every) > len(read)


def test_a_study_of_an_older_version_is_compared_without_torch(tmp_path):
    with make_store(tmp_path) as store:
        make_study(store, Plan(effects={"baseline": 0.0, "G1": -0.05}, points=5, steps=5))
        assert not any("identity" in each for each in store.study("gate-position")["variants"])
    code = (
        "import sys; from archlab.dashboards.library import Library; from pathlib import Path\n"
        "found = Library(Path(sys.argv[1])).study('gate-position').comparison\n"
        "print(len(found.provenance['identities']), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split() == ["2", "False"]


def test_scripts_that_a_study_asks_to_load_early_exist(client):
    for link in client.http.get("/study/gate-position").headers["Link"].split(", "):
        path = link[1 : link.index(">")]
        assert client.http.get(path).mimetype.endswith("javascript")


def test_a_page_runs_the_scripts_that_it_was_sent_with_and_no_others(client):
    answer = client.http.get("/")
    policy = answer.headers["Content-Security-Policy"]
    (allowed,) = [part.split() for part in policy.split("; ") if part.startswith("script-src")]
    text = re.sub(r"<!--.*?-->", "", answer.text, flags=re.DOTALL)
    inline = re.findall(r"<script(?![^>]*(?:src=|json))[^>]*>(.*?)</script>", text, re.DOTALL)
    hashes = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in inline]
    assert len(hashes) > 1
    assert {"'self'", "'unsafe-eval'", *hashes} == set(allowed[1:])


def test_a_table_on_a_server_is_read_again_only_when_somebody_has_written(tmp_path, postgres, monkeypatch):
    root, plan = tmp_path / ".archlab", Plan(rates=(), effects={"baseline": 0.0, "G1": -0.1}, points=5, steps=5)
    monkeypatch.setenv("ARCHLAB_DATABASE", postgres.emptied())
    with make_store(root) as made:
        make_study(made, plan, finish=False)
        keys = planned(made, plan)
        run_trial(made, plan, keys[0])
        library = Library(root)
        first, rows = library.study(plan.name), library.rows(plan.name)
        assert library.study(plan.name) is first and library.rows(plan.name) is rows
        run_trial(made, plan, keys[1])
        assert library.study(plan.name).counts["complete"] == 2 and library.rows(plan.name) is not rows
        library.write("It helps.", [], study=plan.name)
        assert library.study(plan.name).note.text == "It helps."


def test_trials_that_have_not_changed_are_not_made_again(store):
    library = Library(store)
    before = library.summary("qk-norm").trials
    assert library.summary("qk-norm").trials is before
    library.write("", ["odd"], trial=before[0]["key"])
    after = library.summary("qk-norm").trials
    assert after is not before and after[0]["note"].tags == ("odd",)
    library.write("", [], trial=before[0]["key"])
