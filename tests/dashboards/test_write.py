"""The page on which a study is written: what it opens, checks, saves, and refuses."""

import os
import shutil

import pytest

from archlab.dashboards.drafts import Drafts
from archlab.dashboards.library import Library
from archlab.dashboards.pages.write import Refused, _digest, save
from archlab.search.store.notes import Note, write_note
from archlab.search.store.store import Store
from archlab.search.study.files import TEMPLATE
from tests.dashboards.test_app import Client


@pytest.fixture(scope="module")
def folder(store, tmp_path_factory):
    """A project: a study file beside a store of its own."""
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(store, root / ".archlab")
    (root / "mine.yaml").write_text("study: mine\n")
    (root / "other.yaml").write_text("nothing: here\n")
    return root


@pytest.fixture
def client(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return Client(folder / ".archlab")


def test_it_opens_a_file_of_the_folder_what_was_run_or_the_template(client):
    page = client.page("/write")
    assert "study: my-study" in page and "/write?file=mine.yaml" in page and "other.yaml" not in page
    assert "/write?study=gate-position" in page
    assert '"study: mine\\n"' in client.page("/write", "?file=mine.yaml")
    assert "study: gate-position" in client.page("/write", "?study=gate-position")
    for wrong in ("?file=../mine.yaml", "?file=/etc/passwd", "?file=nope.yaml"):
        page = client.page("/write", wrong)
        assert "There is no study file" in page and "study: " in page, wrong
    assert "has no study 'nope'" in client.page("/write", "?study=nope")


def test_a_text_is_saved_and_nothing_that_was_not_opened_here_is_overwritten(tmp_path):
    assert save(tmp_path, "a.yaml", "study: a\n", {}).read_text() == "study: a\n"
    assert save(tmp_path, "a.yaml", "study: a\n", {}), "the same text is there already"
    with pytest.raises(Refused, match=r"a\.yaml exists"):
        save(tmp_path, "a.yaml", "study: b\n", {})
    opened = {"file": "a.yaml", "digest": _digest("study: a\n")}
    assert save(tmp_path, "a.yaml", "study: b\n", opened).read_text() == "study: b\n"
    with pytest.raises(Refused, match="has changed on disk"):
        save(tmp_path, "a.yaml", "study: c\n", opened)
    for name in ("", "a", "../a.yaml", "a/../../b.yaml", "/tmp/a.yaml", ".a.yaml", ".a/b.yaml", "a.py", "a.yaml\n"):
        with pytest.raises(Refused, match="no name of a study file"):
            save(tmp_path, name, "study: a\n", {})


def test_words_are_offered_to_a_page_of_ours(client):
    found = client.http.post("/write/complete", json={"text": "stu", "position": 3}).json
    assert found["start"] == 0 and found["words"][0][0] == "study"
    assert client.http.post("/write/complete", json=[1]).status_code == 400
    assert client.http.post("/write/complete", json={"text": "stu", "position": "x"}).status_code == 400


def test_a_page_that_keeps_a_note_leaves_the_tags_that_came_meanwhile(folder):
    library = Library(folder / ".archlab")
    library.write("first", ["a"], study="gate-position")
    with Store.open(folder / ".archlab") as store:  # somebody at the command line
        write_note(store, Note("first", ("a", "b")), study="gate-position")
    library.write("second", None, study="gate-position")
    assert library.study("gate-position").note == Note("second", ("a", "b"))
    library.write(None, [], study="gate-position")
    assert library.study("gate-position").note == Note("second")


@pytest.mark.slow  # another process, which loads torch
def test_a_draft_has_its_problems_with_their_lines_or_its_plan(tmp_path):
    drafts = Drafts(tmp_path / ".archlab", tmp_path)
    try:
        text = TEMPLATE.read_text()
        found = drafts.check(text, "my_study.yaml")
        assert (
            found["name"] == "my-study"
            and found["problems"] == []
            and found["plan"]["lines"][-1] == "nothing was trained"
        )
        assert [row["name"] for row in found["plan"]["variants"]] == ["baseline", "gated", "shifted"]
        assert "block.ffn.width: 176 → 155" in found["plan"]["variants"][1]["changes"]
        (problem,) = drafts.check(text.replace("type: rmsnorm", "type: rmsnrm"), "my_study.yaml")["problems"]
        line = next(i for i, each in enumerate(text.splitlines(), 1) if "type: rmsnorm" in each)
        assert problem["line"] == line and "did you mean 'rmsnorm'" in problem["message"]
        (problem,) = drafts.check("study: [", "my_study.yaml")["problems"]
        assert "not YAML" in problem["message"]
        (tmp_path / "evil.py").write_text("raise SystemExit('it was run')\n")
        told = drafts.check(text + "plugins: [evil.py]\n", "my_study.yaml")["problems"]
        assert told and "--allow-plugins" in told[0]["message"]
        assert drafts.newest(text, "my_study.yaml", "a writer")["name"] == "my-study"
        drafts._worker[0].kill()
        assert "has died" in drafts.check(text, "my_study.yaml")["problems"][0]["message"]
        assert drafts.check(text, "my_study.yaml")["problems"] == []
    finally:
        drafts.close()
    assert sorted(os.listdir(tmp_path)) == [".archlab", "evil.py"] and "trials.db" not in os.listdir(
        tmp_path / ".archlab"
    )


def test_a_dashboard_that_only_reads_changes_nothing(folder, monkeypatch):
    monkeypatch.chdir(folder)
    client = Client(folder / ".archlab", read_only=True)
    page = client.page("/write")
    assert "This dashboard only reads" in page
    study = client.page("/study/gate-position")
    assert '"type": "Textarea"' not in study and '"actions"' not in study
    before = sorted(os.listdir(folder))
    values = {"write-text": "study: new\n", "write-file": "new.yaml"}
    states = [{"id": name, "property": "value", "value": value} for name, value in values.items()]
    given = [("write-said", "children"), ("write-before", "data"), ("write-opened", "children")]
    body = {
        "output": "..write-said.children...write-before.data...write-opened.children..",
        "outputs": [{"id": name, "property": what} for name, what in given],
        "inputs": [{"id": f"write-{key}", "property": "n_clicks", "value": 1} for key in ("save", "run")],
        "state": [*states, {"id": "write-before", "property": "data", "value": {}}],
        "changedPropIds": ["write-save.n_clicks"],
    }
    assert "only reads" in client.http.post("/_dash-update-component", json=body).get_data(as_text=True)
    assert sorted(os.listdir(folder)) == before
