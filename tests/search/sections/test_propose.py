"""Spaces say what is wrong with them; a search proposes the same values however often it is killed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.parse import INVALID, parse, parse_value
from archlab.arch_dsl.language.source import Node, read_text
from archlab.search.sections.search.proposer import Ending, Known, Proposer
from archlab.search.sections.search.samplers import RandomSampler, TpeSampler
from archlab.search.sections.search.space import Space, probes
from archlab.search.trackers.database import open_optuna

SPACE = """
window: {int: [64, 512], when: "mask == 'window'"}
mask: {choice: [causal, window]}
kv_heads: {choice: [1, 2, 4, 8]}
width: {int: [256, 2048], step: 64}
lr: {float: [1e-4, 1e-2], log: true}
gate: {choice: [none, {position: sdpa}, [rmsnorm]]}
"""


def space(text: str = SPACE) -> Space:
    return parse(Space, read_text(text, "s.yaml"), "space")


def fresh(folder: Path, **more: Any) -> Proposer:
    folder.mkdir(exist_ok=True)
    return Proposer(folder, "s", **{"space": space(), "seed": 3, **more})


def done(*values: float | None) -> Ending:
    return Ending("complete", values)


def goodness(values: dict[str, Any]) -> float:
    return abs(values["width"] - 1024) / 1000 + values["kv_heads"] / 8


def search(proposer: Proposer, trials: int) -> list[dict[str, Any]]:
    proposed = []
    for _ in range(trials):
        number, values = proposer.ask()
        proposed.append(values)
        proposer.tell(number, done(goodness(values)))
    return proposed


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optuna")
    storage = open_optuna(folder)
    storage.remove_session()
    storage.engine.dispose()
    return folder / "optuna.db"


@pytest.fixture
def root(tmp_path: Path, template: Path) -> Path:
    (tmp_path / "optuna.db").write_bytes(template.read_bytes())
    return tmp_path


# spaces


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "space: must be a mapping from path to axis, found an integer"),
        ("a: 3", "space.a: must be a mapping with one of choice, component, int, float, found an integer"),
        ("a: {chioce: [1]}", "space.a: 'chioce' is not a kind of axis; did you mean 'choice'?"),
        ("a: {}", "space.a: says none of choice, component, int, float"),
        ("a: {int: [1, 2], float: [1, 2]}", "space.a: has both int and float"),
        ("a: {choice: []}", "space.a.choice: must be a list of values, found an empty one"),
        ("a: {choice: 3}", "space.a.choice: must be a list of values, found an integer"),
        ("a: {choice: [{x: 1}, {x: 1}]}", 'space.a.choice.1: {"x":1} is already a choice'),
        ("a: {choice: [1, 1e999]}", "space.a.choice.1: must be finite"),
        ("a: {int: [1]}", "space.a.int: must be a list of two numbers"),
        ("a: {int: [1, x]}", "space.a.int.1: must be an integer, found 'x'"),
        ("a: {int: [1, 2.5]}", "space.a.int.1: must be an integer"),
        ("a: {int: [3, 3]}", "the lowest must be less than the highest"),
        ("a: {int: [0, 8], log: true}", "`log: true` needs a lowest above 0, found 0"),
        ("a: {int: [1, 10], step: 4}", "no step of 4 from 1 ends at 10"),
        ("a: {int: [1, 10], step: 0}", "a step must be at least 1, found 0"),
        ("a: {int: [1, 9], step: 4, log: true}", "has a `step` and `log: true`"),
        ("a: {float: [0, 1], log: yes}", "space.a.log: must be true or false, found 'yes'"),
        ("a: {float: [0, 1], stpe: 1}", "space.a.stpe: 'stpe' is not a key of float"),
        ("a: {float: [0, 1], step: 0}", "space.a.float: a step must be above 0, found 0"),
        ("a: {float: [0, 1], step: 0.3}", "space.a.float: no step of 0.3 from 0 ends at 1"),
        ("a: {float: [1, 2], step: 0.5, log: true}", "has a `step` and `log: true`"),
        (
            "a: {component: [on, 3]}",
            "space.a.component.1: must be the name of a component, on or off, found an integer",
        ),
        ("a: {component: [on, on]}", 'space.a.component.1: "on" is already a choice'),
        ("a: {component: [on, off], when: \"b == 'x' and \"}\nb: {choice: [x]}", "space.a.when: is not a condition"),
        ("a: {int: [1, 2], when: 'b == 1 and b == 3'}\nb: {choice: [1, 2]}", "'3' is not a choice of b"),
        (
            "a: {int: [1, 2], when: \"b == 'of'\"}\nb: {component: [on, off]}",
            "'of' is not a choice of b; did you mean 'off'?",
        ),
        (
            "a: {int: [1, 2], when: 'b == 1 and c == 1'}\nb: {int: [1, 2]}\nc: {int: [1, 2], when: 'a == 1'}",
            "space.a.when: its condition depends on itself",
        ),
        ("a: {int: [1, 2], when: 'b is 3'}", "space.a.when: is not a condition: write path == 'value'"),
        ("a: {int: [1, 2], when: 3}", "is not a condition"),
        ("a: {int: [1, 2], when: 'b == window'}", "cannot compare with window: write path == 'value'"),
        ("a: {int: [1, 2], when: 'b in 3'}", "cannot compare with 3"),
        ("a: {int: [1, 2], when: 'b in [1, 2'}", "cannot compare with [1, 2"),
        ("a: {int: [1, 2], when: 'b == 1, 2'}", "cannot compare with 1, 2"),
        ("a: {int: [1, 2], when: '__import__(1) == 2'}", "is not a condition"),
        ("a: {int: [1, 2], when: 'a == 1'}", "space.a.when: its condition depends on itself"),
        (
            "a: {int: [1, 2], when: 'b == 1'}\nb: {int: [1, 2], when: 'a == 1'}",
            "space.b.when: its condition depends on itself",
        ),
        (
            "a: {int: [1, 2], when: \"b == 'windwo'\"}\nb: {choice: [causal, window]}",
            "'windwo' is not a choice of b; did you mean 'window'?",
        ),
        ("a: {int: [1, 2], when: 'b == 9'}\nb: {int: [1, 4]}", "b is never 9: it goes from 1 to 4"),
    ],
)
def test_a_wrong_space_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        space(text)
    assert message in str(caught.value)


def test_a_condition_compares_a_choice_of_primitives_by_its_type() -> None:
    axes = """
mixer: {choice: [{type: attention, heads: 4}, {type: gated_delta_net, heads: 4}, mlp]}
kv_heads: {choice: [1, 2], when: "mixer.type == 'attention'"}
width: {int: [1, 4], when: "mixer == 'mlp'"}
"""
    found = space(axes)
    assert found.needs == () and [path for path, _ in found.ordered()] == ["mixer", "kv_heads", "width"]
    attention, delta, mlp = found.axes["mixer"].values
    for path, holds in (("kv_heads", [True, False, False]), ("width", [False, False, True])):
        assert [found.active(path, {"mixer": value}, {}) for value in (attention, delta, mlp)] == holds
    tried = {path: settings[0].node.plain() for path, settings in probes(found, {})}
    assert tried["kv_heads"] == attention and tried["width"] == "mlp"
    either = space(axes + "both: {int: [1, 4], when: \"mixer.type in ['attention', 'mlp'] and mixer != 'mlp'\"}")
    assert {path: each[0].node.plain() for path, each in probes(either, {})}["both"] == attention
    untyped = "a: {choice: [{heads: 4}, {heads: 8}]}\nb: {int: [1, 2], when: \"a.type == 'attention'\"}"
    assert space(untyped).needs == ("a.type",)
    with pytest.raises(SpecError, match="'True' is not a choice of a"):
        space("a: {choice: [0, 1]}\nb: {int: [1, 2], when: 'a == true'}")
    with pytest.raises(SpecError, match="'gated_deltanet' is not a choice of mixer; did you mean 'gated_delta_net'"):
        space(axes.replace("== 'mlp'", "== 'gated_deltanet'"))


def test_all_problems_of_a_space_come_at_once_with_their_places() -> None:
    with pytest.raises(SpecError) as caught:
        space("a: {int: [1]}\nb: {choice: [1], wehn: x}\n")
    assert [(p.path, p.mark.line, p.mark.column) for p in caught.value.problems if p.mark] == [
        ("space.a.int", 1, 10),
        ("space.b.wehn", 2, 18),
    ]


def test_the_parser_of_specs_reads_a_space() -> None:
    problems: list[Problem] = []
    assert parse_value(Space, Node.of({"a": {"int": ["1k", "2k"]}}), "space", problems) == space(
        "a: {int: [1000, 2000]}"
    )
    assert parse_value(Space, Node.of([1]), "space", problems) is INVALID
    assert [problem.path for problem in problems] == ["space"]


def test_a_space_reads_what_it_writes() -> None:
    assert parse(Space, space().plain(), "space") == space()


@pytest.mark.parametrize(
    ("when", "value", "holds"),
    [
        ("m == 'a'", "a", True),
        ('m == "a"', "b", False),
        ("m != 'a'", "b", True),
        ("m != 'a'", "a", False),
        ("m in ['a', 2]", 2, True),
        ("m in ['a', 2]", "2", False),
        ("m in [true]", 1, False),
        ("m == 1e-3", 0.001, True),
        ("m == 2", 2.0, True),
        ("m == null", None, True),
        ("m == 'a, b]'", "a, b]", True),
        ("m == 'a and b'", "a and b", True),
        ("m != 'a' and m != \"b\"", "c", True),
        ("m != 'a' and m != \"b\"", "b", False),
        ("m in ['x and y', 2] and m != 2", "x and y", True),
    ],
)
def test_a_condition_compares_by_value_and_kind(when: str, value: Any, holds: bool) -> None:
    written = {"x": {"int": [1, 2], "when": when}}
    assert parse(Space, written, "space").active("x", {}, {"m": value}) is holds
    assert parse(Space, parse(Space, written, "space").plain(), "space").active("x", {}, {"m": value}) is holds


# proposals


@pytest.mark.parametrize("sampler", [TpeSampler(), RandomSampler()], ids=["tpe", "random"])
def test_proposals_lie_in_the_space_and_obey_conditions(root: Path, sampler: Any) -> None:
    proposed = search(fresh(root, sampler=sampler), 16)
    axes = space().axes
    for values in proposed:
        assert all(axes[path].holds(value) for path, value in values.items())
        assert ("window" in values) == (values["mask"] == "window")
        assert values.keys() >= {"mask", "kv_heads", "width", "lr", "gate"}
    assert {values["mask"] for values in proposed} == {"causal", "window"}
    assert len({str(values["gate"]) for values in proposed}) == 3


def test_a_search_that_is_killed_proposes_the_same(root: Path) -> None:
    trials, kills = 13, (0, 10, 11, 12)  # from the eleventh on, proposals depend on what was told
    (whole := root / "whole").mkdir()
    (whole / "optuna.db").write_bytes((root / "optuna.db").read_bytes())
    expected = search(fresh(whole), trials)
    known: dict[int, Known] = {}
    proposer = fresh(root)
    for number in range(trials):
        if number in kills:
            assert proposer.ask() == (number, expected[number])
            proposer = fresh(root, known=known)  # killed before the proposal was a row
        again, values = proposer.ask()
        assert (again, values) == (number, expected[number])
        if number in kills:
            proposer = fresh(root, known={**known, number: Known(values)})  # killed when it was one
        proposer.tell(number, done(goodness(values)))
        known[number] = Known(values, done(goodness(values)))
    states = [trial.state.name for trial in optuna.load_study(study_name="s", storage=open_optuna(root)).trials]
    assert states == ["COMPLETE"] * trials


def test_a_stored_proposal_is_waited_for_and_not_handed_out_again(root: Path) -> None:
    first, values = fresh(root).ask()
    proposer = fresh(root, known={first: Known(values)})
    assert proposer.waiting() == [first]
    assert proposer.proposals() == {first: values}
    assert proposer.ask()[0] == first + 1
    proposer.tell(first, done(1.0))
    assert proposer.waiting() == [first + 1]


@pytest.mark.parametrize(
    ("ending", "state", "value"),
    [
        (done(1.5), "COMPLETE", 1.5),
        (done(math.inf), "FAIL", None),
        (done(math.nan), "FAIL", None),
        (done(None), "FAIL", None),
        (Ending("diverged"), "FAIL", None),
        (Ending("failed", reason="crash"), "FAIL", None),
        (Ending("pruned", (None,), history=((1, 3.0), (2, 2.5))), "PRUNED", 2.5),
        (Ending("pruned", (None,)), "PRUNED", None),
        (Ending("refused", (None,), {"parameters": 0.5}, reason="too large"), "FAIL", None),
    ],
    ids=lambda value: f"{value.state}-{value.values}" if isinstance(value, Ending) else "",
)
def test_a_proposal_is_recorded_as_it_ended(root: Path, ending: Ending, state: str, value: float | None) -> None:
    proposer = fresh(root)
    number, values = proposer.ask()
    proposer.tell(number, ending)
    proposer.tell(number, done(99.0))
    (trial,) = optuna.load_study(study_name="s", storage=open_optuna(root)).trials
    assert (trial.state.name, trial.user_attrs["state"]) == (state, ending.state)
    assert trial.value == (value if state == "COMPLETE" else None)
    assert trial.intermediate_values == dict(ending.history)
    assert trial.constraints == ending.excess
    assert fresh(root, known={number: Known(values, ending)}).ask()[0] == 1
    (again,) = optuna.load_study(study_name="s", storage=open_optuna(root)).trials
    assert again._trial_id == trial._trial_id, "what is the same is not written anew"


def test_a_changed_space_is_refused_and_leaves_the_study_as_it_was(root: Path) -> None:
    search(fresh(root), 2)
    other = space("kv_heads: {choice: [1, 2]}")
    with pytest.raises(SpecError, match="began with another space"):
        fresh(root, space=other)
    assert len(optuna.load_study(study_name="s", storage=open_optuna(root)).trials) == 2


def test_a_condition_on_the_base_needs_its_value(root: Path) -> None:
    only = space("window: {int: [64, 512], when: \"mask == 'window'\"}\nk: {choice: [1, 2]}")
    assert only.needs == ("mask",)
    with pytest.raises(SpecError, match="'mask' has no value here and is no axis"):
        fresh(root, space=only)
    assert "window" not in fresh(root, space=only, given={"mask": "causal"}).ask()[1]
    assert "window" in Proposer(root, "other", only, given={"mask": "window"}).ask()[1]


def test_a_changed_base_is_refused_and_leaves_the_study_as_it_was(root: Path) -> None:
    search(fresh(root, base="one"), 2)
    with pytest.raises(SpecError, match="'s' began with another model or recipe; give the study a new name"):
        fresh(root, base="another")
    assert len(optuna.load_study(study_name="s", storage=open_optuna(root)).trials) == 2


def test_what_the_database_lacks_of_the_known_proposals_is_written_anew(root: Path) -> None:
    expected = search(fresh(root), 6)
    (root / "optuna.db").unlink()
    known = {number: Known(expected[number], done(goodness(expected[number]))) for number in (0, 1, 3, 4)}
    proposer = fresh(root, known=known)
    assert list(proposer.proposals().values()) == expected[:5], "the one that was no row is drawn again"
    assert proposer.waiting() == [2]
    assert proposer.ask() == (2, expected[2])
    recorded = optuna.load_study(study_name="s", storage=open_optuna(root))
    assert [trial.user_attrs["number"] for trial in recorded.trials] == [0, 1], "in the order of the numbers"
    proposer.tell(2, done(goodness(expected[2])))
    assert proposer.ask() == (5, expected[5])
    assert [trial.user_attrs["number"] for trial in recorded.trials] == [0, 1, 2, 3, 4]


def test_a_database_that_says_otherwise_than_the_trial_table_is_written_anew(root: Path) -> None:
    expected = search(fresh(root), 3)
    known = {number: Known(values, done(goodness(values))) for number, values in enumerate(expected)}
    known[1] = Known(expected[1], done(7.0))
    fresh(root, known=known)
    values = [trial.value for trial in optuna.load_study(study_name="s", storage=open_optuna(root)).trials]
    assert values == [goodness(expected[0]), 7.0, goodness(expected[2])]


def test_known_proposals_of_another_space_are_refused(root: Path) -> None:
    with pytest.raises(SpecError, match="began with another space; give"):
        fresh(root, known={0: Known({"kv_heads": 3})})
