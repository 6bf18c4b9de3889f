"""Stop, go on and retry by a click: what is offered when, what is refused, and a run that stops and goes on."""

import shutil
import time

import pytest

from archlab.dashboards.library import Library
from archlab.dashboards.pages.actions import AT_ONCE, GO_ON, RETRY, STOP, Actions, file_of, offered
from archlab.search.store.lock import StudyLock, holder_of, lock_path
from archlab.search.store.store import Store
from archlab.search.study.files import TEMPLATE
from archlab.search.utils.files import lock_file
from tests.dashboards.conftest import QK_NORM
from tests.dashboards.test_app import Client


@pytest.fixture
def root(store, tmp_path):
    shutil.copytree(store, tmp_path / ".archlab")
    return tmp_path / ".archlab"


def test_what_is_offered_is_what_can_be_done(root):
    library = Library(root)
    actions = Actions(library)
    assert offered(library.study("gate-position"), actions) == [], "it is finished"
    assert offered(library.study(QK_NORM.name), actions) == [GO_ON]
    with StudyLock(root, QK_NORM.name):
        assert offered(library.study(QK_NORM.name), actions) == [STOP]
    with Store.open(root) as store:
        key = next(row["key"] for row in store.study_trials(QK_NORM.name) if row["state"] == "planned")
        store.finish(key, store.claim(key, QK_NORM.name), "failed", None, "it broke")
    assert RETRY in offered(library.study(QK_NORM.name), actions)
    assert actions.do(RETRY, library.study(QK_NORM.name)) == "1 trial planned again."
    assert RETRY not in offered(library.study(QK_NORM.name), actions)


def test_who_was_asked_to_stop_is_so_until_the_lock_is_free_or_somebody_elses(root):
    library = Library(root)
    actions = Actions(library)
    path = lock_path(root, QK_NORM.name)
    path.parent.mkdir(exist_ok=True)
    with lock_file(path) as take:
        assert take()
        path.write_text('{"host": "elsewhere", "pid": 1, "since": "2026-01-01T00:00:00+00:00"}')
        assert actions.do(STOP, library.study(QK_NORM.name)) == ""
        assert offered(library.study(QK_NORM.name), actions) == [AT_ONCE]
        path.write_text("")  # as it is when the lock is about to be given back
        assert offered(library.study(QK_NORM.name), actions) == [AT_ONCE]
        path.write_text('{"host": "elsewhere", "pid": 2, "since": "2026-01-01T00:00:05+00:00"}')
        assert offered(library.study(QK_NORM.name), actions) == [STOP]


def test_a_click_goes_on_with_nothing_but_what_was_run(root, monkeypatch):
    library = Library(root)
    study = library.study(QK_NORM.name)
    monkeypatch.chdir(root.parent)
    assert "is not here" in file_of(study, library)[1]
    with Store.open(root) as store:
        text = store.study_yaml(study.name)
    file = root.parent / "qk-norm.yaml"
    file.write_text(text)
    assert file_of(study, library) == (root.parent, "qk-norm.yaml"), "where it was run, as it was called"
    file.write_text(text + "\n# changed\n")
    assert "has changed since it was run" in file_of(study, library)[1]
    assert "has changed" in Actions(library).do(GO_ON, study) and not (root / "drivers").exists()


def test_a_run_that_ends_at_once_says_why(root):
    client, tmp_path = Client(root), root.parent
    launcher = client.http.application.config["ACTIONS"].launcher
    (tmp_path / "bad.yaml").write_text("study: bad\n")
    started = launcher.run("bad", "bad.yaml", tmp_path)
    assert launcher.of("bad").code is not None or "It begins" in client.page("/study/bad")
    while (found := launcher.of("bad")).code is None:
        time.sleep(0.05)
    assert found.pid == started.pid and found.code == 2 and "is missing" in found.last_lines()
    assert launcher.of("other") is None and "No such study" in client.page("/study/other")
    assert "It did not begin" in client.page("/study/bad") and "is missing" in client.page("/study/bad")


@pytest.mark.slow
def test_a_run_is_started_stopped_by_a_click_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARCHLAB_MLFLOW", "off")
    root, file = tmp_path / ".archlab", tmp_path / "my_study.yaml"
    text = TEMPLATE.read_text().replace("tokens: 300k", "tokens: 3M")
    file.write_text(text)
    library = Library(root)
    actions = Actions(library)
    first = actions.launcher.run("my-study", "my_study.yaml", tmp_path)
    assert actions.launcher.run("my-study", "my_study.yaml", tmp_path) == first, "a second click starts nothing"

    def wait(what):
        while not what():
            assert actions.launcher.of("my-study").code is None, first.last_lines()
            time.sleep(0.1)

    wait(lambda: (root / "store.json").exists() and [row["name"] for row in library.listing()] == ["my-study"])
    wait(lambda: any(file.last_step for file in library.study("my-study").curves.values()))
    study = library.study("my-study")
    assert offered(study, actions) == [STOP] and actions.do(STOP, study) == ""
    assert actions.stopping(library.study("my-study")) or library.study("my-study").holder is None
    while actions.launcher.of("my-study").code is None:
        assert offered(library.study("my-study"), actions) in ([AT_ONCE], [])
        time.sleep(0.1)
    assert actions.launcher.of("my-study").code == 130
    study = library.study("my-study")
    assert study.holder is None and offered(study, actions) == [GO_ON]
    assert actions.do(GO_ON, study) == ""
    second = actions.launcher.of("my-study")
    assert second.pid != first.pid
    wait(lambda: holder_of(root, "my-study"))
    wait(lambda: any(trial["attempt"] == 2 for trial in library.study("my-study").trials))
    assert actions.do(STOP, library.study("my-study")) == ""
    while actions.launcher.of("my-study").code is None:
        time.sleep(0.1)
