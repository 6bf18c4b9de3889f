"""Optuna's own dashboard inside of ours: it shows what the store sent there, and can change nothing."""

import pytest

from archlab.dashboards import make_app
from archlab.dashboards.optuna_mount import absent, pages_of
from archlab.search.trackers.database import open_optuna

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed: pip install optuna-dashboard")
optuna = pytest.importorskip("optuna")


@pytest.fixture(scope="module")
def root(store):
    """The store, with the study in its Optuna database as the sink would have written it."""
    storage = open_optuna(store)
    study = optuna.create_study(storage=storage, study_name="gate-position", direction="minimize")
    for lr in (1e-3, 2e-3):
        params, kinds = {"lr": lr}, {"lr": optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True)}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=1.0 + lr))
    storage.remove_session()
    return store


@pytest.fixture(scope="module")
def client(root):
    return make_app(root).server.test_client()


def test_it_shows_the_study_under_the_same_policy(client, root):
    ((name, page),) = pages_of(root, "gate-position").items()
    assert name == "gate-position" and page.startswith("/dashboard/studies/")
    with client.get(page) as answer:
        assert answer.status_code == 200 and b"Optuna Dashboard" in answer.data
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    number = page.rpartition("/")[2]
    trials = client.get(f"/api/studies/{number}").json["trials"]
    assert sorted(trial["values"][0] for trial in trials) == [1.001, 1.002]
    with client.get("/static/bundle.js") as script:
        assert script.status_code == 200


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch", "options"])
def test_it_takes_nothing(client, root, method):
    for path in ("/api/studies", "/api/studies/1", "/api/studies/1/note", "/api/trials/1/user-attrs"):
        assert getattr(client, method)(path, json={"body": "x", "version": 9}).status_code == 405
    assert list(pages_of(root, "gate-position")) == ["gate-position"]


def test_its_own_connection_can_not_write(root):
    from archlab.dashboards.optuna_mount import _application

    wsgi = _application(root / "optuna.db", 0)
    from werkzeug.test import Client

    answer = Client(wsgi).put("/api/studies/1/note", json={"body": "x", "version": 9})
    assert answer.status_code >= 400
    assert Client(wsgi).get("/api/studies/1").json["note"]["body"] == ""


def test_where_there_is_none_it_says_so(tmp_path):
    assert "nothing was sent to Optuna" in absent(tmp_path)
    assert pages_of(tmp_path, "x") == {}
    answer = make_app(tmp_path).server.test_client().get("/dashboard")
    assert answer.status_code == 404 and b"nothing was sent" in answer.data


@pytest.mark.slow
def test_it_opens_from_the_page_of_the_study(root, address, visit):
    page = visit.page
    page.goto(f"{address}/study/gate-position")
    link = page.locator("a[href^='/dashboard/studies/']")
    link.wait_for()
    page.goto(address + link.get_attribute("href"))
    page.get_by_text("gate-position").first.wait_for()
    assert page.url.startswith(f"{address}/dashboard/studies/"), "and its frontend does not lead elsewhere"
