"""The page of a variant's architecture: its drawing, what it changes, and a row per node with what each costs."""

import json
import shutil
from urllib.parse import quote

import pytest

from archlab import arch_dsl
from archlab.dashboards import make_app
from archlab.dashboards.pages.architecture import SAFE
from archlab.search.models import graphs as architecture
from tests.dashboards.conftest import XSS
from tests.dashboards.generate import CONTEXT, Plan, make_store, make_study, record, spec_of

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="dot is not installed: apt-get install graphviz")


@pytest.fixture(scope="module")
def client(store):
    return make_app(store).server.test_client()


def shown(client, study, **query):
    """The text of the page, as the browser gets it."""
    client.get("/")
    asked = next(d["output"] for d in client.get("/_dash-dependencies").json if "_pages_content" in d["output"])
    inputs = [
        {"id": "_pages_location", "property": "pathname", "value": f"/study/{study}/architecture"},
        {
            "id": "_pages_location",
            "property": "search",
            "value": "?" + "&".join(f"{k}={quote(v)}" for k, v in query.items()),
        },
    ]
    outputs = [{"id": part.split(".")[0], "property": part.split(".")[1]} for part in asked.strip(".").split("...")]
    body = {"output": asked, "outputs": outputs, "inputs": inputs, "changedPropIds": []}
    return json.dumps(client.post("/_dash-update-component", json=body).json)


@needs_dot
def test_a_drawing_is_a_document_that_can_do_nothing(client):
    answer = client.get("/diagram/gate-position.svg?variant=G1")
    assert answer.status_code == 200 and answer.headers["Content-Security-Policy"] == SAFE
    assert b"block.attention.sdpa: added" in answer.data and b"<script" not in answer.data
    kept = client.get("/diagram/gate-position.svg?variant=G1&download")
    assert b"xlink:href" not in kept.data and "G1.svg" in kept.headers["Content-Disposition"]
    assert client.get("/diagram/gate-position.pdf?variant=G1&download").data.startswith(b"%PDF")


def test_a_file_of_any_variant_has_a_name_that_a_header_can_have(tmp_path):
    with make_store(tmp_path) as made:
        make_study(made, Plan("named", effects={"baseline": 0.0, "变体 50%": 0.0}), finish=False)
    http = make_app(tmp_path).server.test_client()
    kept = http.get("/diagram/named.yaml", query_string={"variant": "变体 50%", "download": ""})
    assert kept.status_code == 200 and kept.headers["Content-Disposition"] == "attachment; filename=named--50-.yaml"


def test_what_is_not_there_is_said(client):
    for address in ("/diagram/nothing.svg", "/diagram/gate-position.exe", "/diagram/gate-position.svg?variant=G9"):
        answer = client.get(address)
        assert answer.status_code == 404 and answer.data
    assert (
        b"<html" in client.get("/diagram/..%2f..%2fetc.svg").data
    )  # no drawing, but the application, with no such page
    assert "does not exist" in shown(client, "gate-position", variant="<script>")


def test_the_model_is_offered_as_yaml(client, tmp_path):
    file = tmp_path / "model.yaml"
    file.write_bytes(client.get("/diagram/gate-position.yaml?variant=G2&download").data)
    assert arch_dsl.identity(arch_dsl.load(str(file))) == arch_dsl.identity(arch_dsl.load(spec_of("G2")))


def test_rows_hold_the_costs_of_the_specs():
    found = architecture.graph_of(record(Plan()), "G1", "baseline")
    rows = {row["path"]: row for row in architecture.rows_of(found)}
    one, other = (arch_dsl.load(spec_of(name)) for name in ("G1", "baseline"))
    gained = arch_dsl.cost(one, CONTEXT).parameters - arch_dsl.cost(other, CONTEXT).parameters
    gate = rows["block.attention.sdpa"]
    assert gate["state"] == "added" and gate["parameters"] * one.n_layers == gained == 5 * 128 * 4
    assert rows["block"]["parameters"] - rows["block"]["parameters_before"] == gained
    assert [row["path"] for row in rows.values() if row["state"] != "same"] == ["block.attention.sdpa"]
    assert "attention" in rows["block.attention.attend"]["kernels"]


def test_without_graphviz_the_page_is_text_and_says_what_to_install(client, monkeypatch):
    architecture.drawing.cache_clear()
    monkeypatch.setenv("PATH", "")
    text = shown(client, "gate-position", variant="G5")
    assert "apt-get install graphviz" in text and "+     post  gate" in text and "Nodes" in text
    assert client.get("/diagram/gate-position.svg?variant=G5").status_code == 409
    assert client.get("/diagram/gate-position.dot?variant=G5").status_code == 200


def test_a_variant_that_cannot_be_read_is_a_card(tmp_path):
    root = tmp_path / ".archlab"
    plan = Plan(effects={"baseline": 0.0}, rates=())
    with make_store(root) as made:
        stored = record(plan)
        stored["variants"][0]["spec"] = {**spec_of("baseline"), "final": ["my_norm"]}
        made.save_study(plan.name, stored, "study: x\n")
    text = shown(make_app(root).server.test_client(), plan.name)
    assert "can't be drawn" in text and "my_norm" in text and "--allow-plugins" in text


@needs_dot
def test_a_click_on_a_node_leads_to_its_row_and_the_address_keeps_the_variant(address, visit):
    page = visit.page
    page.goto(f"{address}/study/gate-position/architecture?variant=G2")
    frame = page.frame_locator("iframe.diagram")
    frame.locator("[id='block.attention.value'] a").click()
    page.wait_for_function("location.hash === '#block.attention.value'")
    assert "variant=G2" in page.url
    row = page.locator("tr:target")
    assert row.locator("td").first.inner_text() == "valuenew"  # apart by a margin
    assert "16,384" in row.inner_text()
    page.click("text=B200")
    page.wait_for_function("location.search.includes('device=sm_100')")
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector("iframe.diagram")
    assert "beside baseline" in page.inner_text("main").lower()
    assert page.locator(".nodes td >> text=gate: triton").count() == 1


@needs_dot
def test_a_name_that_looks_like_html_is_drawn_and_said_as_text(address, visit):
    page = visit.page
    page.goto(f"{address}/study/qk-norm/architecture?variant={quote(XSS)}")
    page.frame_locator("iframe.diagram").locator("[id='block.attention.attend']").wait_for()
    assert XSS in page.inner_text("main") or page.locator(f'iframe[title="Diagram of {XSS}"]').count() == 1
    assert page.locator("main img").count() == 0
