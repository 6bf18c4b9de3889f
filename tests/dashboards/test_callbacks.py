"""What a program with the token can send in place of a callback: ids that no page has are refused, never a failure."""

import copy
import json

import pytest

from archlab.dashboards import make_app
from archlab.search.store.notes import Note, read_notes
from archlab.search.store.store import Store
from tests.dashboards.generate import Plan, make_store, make_study

PATH = "/_dash-update-component"
NOTE = "study gate-position"
WRONG_IDS = [
    {},
    {"note": NOTE},
    {"note": NOTE, "part": "nothing"},
    {"note": NOTE, "part": "text", "more": "x"},
    {"note": None, "part": "text"},
    {"note": {}, "part": []},
    {"note": ["MATCH"], "part": "text"},
    {"note": "folder x", "part": "text"},
    {"note": "study", "part": "text"},
    {"x": "y"},
    None,
    [],
    "text",
]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """The dashboard of a small store."""
    root = tmp_path_factory.mktemp("callbacks") / ".archlab"
    with make_store(root) as made:
        make_study(made, Plan(rates=(), effects={"baseline": 0.0}, seeds=(0,), points=5, steps=5))
    found = make_app(root)
    found.server.test_client().get("/")
    return found


def own(pattern):
    """An id as a page has it: of a pattern one that fits."""
    if not pattern.startswith("{"):
        return pattern
    names = {"note": NOTE, "action": "go on"}
    return {k: names.get(k, "x") if isinstance(each, list) else each for k, each in json.loads(pattern).items()}


def written(app, of):
    """The body of the callback whose output is called so, or has that in its name, as a page sends it."""
    name = of if of in app.callback_map else next(each for each in app.callback_map if of in each)
    known = app.callback_map[name]
    several = isinstance(known["output"], list | tuple)
    outputs = known["output"] if several else [known["output"]]
    outputs = [{"id": own(each.component_id_str()), "property": each.component_property} for each in outputs]
    inputs, state = ([part(each) for each in known[kind]] for kind in ("inputs", "state"))
    told = {"output": name, "outputs": outputs if several else outputs[0], "inputs": inputs, "state": state}
    return {**told, "changedPropIds": []}


def part(of):
    """An input or a state without a value; where all that fit a pattern are sent, a list of one."""
    found = {"id": own(of["id"]), "property": of["property"], "value": None}
    return [found] if '["ALL"]' in of["id"] else found


def name_of(sent):
    """What a changed property is called."""
    of = sent["id"] if isinstance(sent["id"], str) else json.dumps(sent["id"], separators=(",", ":"))
    return f"{of}.{sent['property']}"


def status(app, body):
    """The status of its answer, and the text."""
    answer = app.server.test_client().post(PATH, json=body)
    return answer.status_code, answer.text


def changed(app, part, value):
    """A note of a study, one part of which has become `value`."""
    inputs = ({"id": json.dumps({"note": ["MATCH"], "part": part}, separators=(",", ":")), "property": "value"},)
    name = next(each for each, told in app.callback_map.items() if tuple(told["inputs"]) == inputs)
    body = written(app, name)
    body["inputs"][0]["value"] = value
    return body | {"changedPropIds": [name_of(body["inputs"][0])]}


@pytest.fixture
def note(app):
    """The text of a note, as it is written to a study."""
    return changed(app, "text", "It helps.")


@pytest.fixture
def tags(app):
    """Its tags; their callback sets two parts of the page."""
    return changed(app, "tags", ["paper"])


def test_a_note_as_a_page_sends_it_is_kept(app, note, tags):
    for body in (note, tags, changed(app, "text", "It does not.")):
        code, text = status(app, body)
        assert code == 200 and "Kept." in text
    assert app.server.config["LIBRARY"].notes().studies["gate-position"] == Note("It does not.", ("paper",))


def test_a_tag_with_a_space_is_not_kept_and_the_ones_before_are_shown(app, tags):
    status(app, tags)
    code, text = status(app, changed(app, "tags", ["paper", "two words"]))
    assert code == 200 and "Not kept: tag" in text and '"value":["paper"]' in text


@pytest.mark.parametrize("where", ["outputs", "inputs"])
@pytest.mark.parametrize("wrong", WRONG_IDS, ids=repr)
def test_an_id_that_no_page_has_is_refused(app, tags, where, wrong):
    for place in range(len(tags[where])):
        body = copy.deepcopy(tags)
        if body[where][place]["id"] == wrong:
            continue
        body[where][place]["id"] = wrong
        assert status(app, body) == (400, "this is no callback of these pages\n")


@pytest.mark.parametrize("where", ["outputs", "inputs"])
@pytest.mark.parametrize("wrong", ["", "nothing", None, 7, {}], ids=repr)
def test_a_property_that_no_page_sends_is_refused(app, tags, where, wrong):
    tags[where][0]["property"] = wrong
    assert status(app, tags)[0] == 400


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "x",
        ".",
        "x.y.z",
        "{",
        "{}",
        "{}.value",
        "{.value",
        "[1].value",
        '{"note":1}.value',
        "_pages_location.search",
    ],
)
def test_what_did_not_change_is_refused(app, note, wrong):
    assert status(app, note | {"changedPropIds": [wrong]})[0] == 400


def test_parts_of_two_components_are_no_callback(app, tags):
    tags["outputs"][1]["id"] = tags["outputs"][1]["id"] | {"note": "study another"}
    assert status(app, tags)[0] == 400


def test_every_callback_refuses_what_is_none_of_its_ids(app):
    """Of every callback of every page each part in turn, with ids that are none of it."""
    for name in [each for each, told in app.callback_map.items() if "callback" in told]:
        body = written(app, name)
        for where in ("outputs", "inputs", "state"):
            for place in range(len(body[where]) if isinstance(body[where], list) else 1):
                for wrong in WRONG_IDS:
                    sent = copy.deepcopy(body)
                    at = sent[where][place] if isinstance(sent[where], list) else sent[where]
                    at = at[0] if isinstance(at, list) else at
                    if at["id"] == wrong:
                        continue
                    at["id"] = wrong
                    assert status(app, sent)[0] == 400, (name, where, place, wrong)


@pytest.mark.parametrize("name", ["study nope", "trial ffffffff", "trial ../x"])
def test_a_note_on_what_is_not_there_is_not_kept(app, note, name):
    body = json.loads(json.dumps(note).replace(NOTE, name).replace(json.dumps(NOTE)[1:-1], name))
    body["changedPropIds"] = [name_of(body["inputs"][0])]
    code, text = status(app, body)
    assert code == 200 and "Not kept: there is no" in text
    with Store.open(app.server.config["LIBRARY"].root, create=False) as store:
        notes = read_notes(store)
    assert name.partition(" ")[2] not in {**notes.studies, **notes.trials}


def test_a_note_on_a_trial_is_kept(app, note):
    library = app.server.config["LIBRARY"]
    with Store.open(library.root, create=False) as store:
        key = store.study_trials("gate-position")[0]["key"]
    body = json.loads(json.dumps(note).replace(NOTE, f"trial {key}"))
    body["changedPropIds"] = [name_of(body["inputs"][0])]
    assert "Kept." in status(app, body)[1] and library.notes().trials[key].text == "It helps."


@pytest.mark.parametrize("action", ["", "nothing", "rm", None, 7, ["ALL"]], ids=repr)
def test_a_button_that_no_page_has_does_nothing(app, action):
    body = written(app, "actions.children")
    body["inputs"][0][0] |= {"id": {"action": action}, "value": 1}
    body["changedPropIds"] = [name_of(body["inputs"][0][0])]
    assert status(app, body)[0] == 400


def test_a_click_of_no_button_does_nothing(app):
    body = written(app, "actions.children")
    body["inputs"][0][0]["value"] = 1
    body["state"][0]["value"], body["state"][1]["value"] = "gate-position", ""
    code, text = status(app, body)
    assert code == 200 and json.loads(text)["response"] == {}


@pytest.mark.slow
@pytest.mark.browser
def test_what_a_browser_sends_is_taken(tmp_path, served, visit):
    """A note, its tags, and a choice on a page of a tab: each has an id of a pattern."""
    root = tmp_path / ".archlab"
    with make_store(root) as made:
        make_study(made, Plan(rates=(), effects={"baseline": 0.0, "G1": -0.1}, points=5, steps=5))
    page, address = visit.page, served(root)
    page.goto(f"{address}/study/gate-position")
    page.fill("textarea[aria-label=Note]", "It helps.")
    page.wait_for_selector("text=Kept.")
    page.fill("input[aria-label=Tags]", "paper")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.mantine-TagsInput-pill').length > 0")
    page.goto(f"{address}/study/gate-position/timeline")
    page.wait_for_selector("#timeline-content .js-plotly-plot")
    page.click("text=Variants >> nth=-1")
    page.wait_for_url("**/timeline?rows=variants")
    page.goto(f"{address}/study/gate-position")
    page.wait_for_selector("textarea[aria-label=Note]")
    assert page.input_value("textarea[aria-label=Note]") == "It helps."
