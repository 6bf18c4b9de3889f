"""The catalogue: every primitive and knob is listed, found by its name, and says what each of its fields may hold."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest

from archlab.arch_dsl.catalogue.describe import FAMILIES, allowed, describe, families, find, first_line
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import INVALID, parse_value
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, Fraction, Positive, Range, Spec, fields_of
from archlab.arch_dsl.parts.families import Gate, Norm
from archlab.arch_dsl.patching.knobs import KNOBS
from archlab.arch_dsl.tree.knob import Knob

MEMBERS = [(kind.noun, name, member) for kind in FAMILIES for name, member in kind.members.items()]


def test_every_family_is_listed_with_all_of_its_members() -> None:
    listing = families()
    assert [*listing][:-1] == [kind.noun for kind in FAMILIES]
    for kind in FAMILIES:
        assert list(listing[kind.noun]) == list(kind.members)
    assert list(listing[[*listing][-1]]) == [knob.name for knob in KNOBS]
    json.dumps(listing)


@pytest.mark.parametrize(("noun", "name", "member"), MEMBERS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_primitive_says_its_formula_and_its_fields(noun: str, name: str, member: type[Any]) -> None:
    assert member in find(name)
    facts = describe(member)
    assert facts["type"] == name and noun in facts["family"].split(" or ")
    assert facts["doc"] and "\n" not in first_line(member)
    assert [field["name"] for field in facts["fields"]] == list(fields_of(member))
    assert all(field["allowed"] and field["default"] for field in facts["fields"])
    assert not any("[" in field["allowed"] or "typing" in field["allowed"] for field in facts["fields"]), "no Python"
    json.dumps(facts)


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_every_knob_is_found_and_described(knob: Knob) -> None:
    assert knob in find(knob.name)
    facts = describe(knob)
    assert facts["family"].startswith("knob at block") and facts["doc"].startswith("Sets ")
    assert facts["fields"][0]["name"] in ("type", "position")


def test_name_of_a_primitive_and_a_knob_finds_both() -> None:
    assert [type(each) is Knob for each in find("gate")] == [False, True]


@pytest.mark.parametrize(
    ("name", "message"),
    [("rmsnrom", "did you mean 'rmsnorm'?"), ("gaet", "did you mean 'gate'?"), ("", "'' is not a primitive\n    (")],
)
def test_unknown_name_has_the_nearest_one(name: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        find(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "an integer"),
        (bool, "true | false"),
        (str, "a word"),
        (float | None, "a number, or null"),
        (Count, "an integer >= 1"),
        (Count | None, "an integer >= 1, or null"),
        (Positive, "a number > 0"),
        (Fraction, "a number >= 0 and <= 1"),
        (Annotated[float, Range(min=0, below=1)], "a number >= 0 and < 1"),
        (Literal["silu", "gelu"], "silu | gelu"),
        (Norm, "norm"),
        (tuple[Norm | Gate, ...], "a list of norm or gate"),
        (tuple[float, ...], "a list, each a number"),
        (tuple[str, ...], "a list, each a word"),
    ],
    ids=str,
)
def test_annotations_are_said_in_words(annotation: Any, text: str) -> None:
    assert allowed(annotation) == text


def test_words_that_a_field_allows_are_accepted() -> None:
    for _, _, member in MEMBERS:
        for field in describe(member)["fields"]:
            annotation = fields_of(member)[field["name"]].annotation
            for word in field["allowed"].removesuffix(", or null").split(" | "):
                if " " in word or len(field["allowed"].split(" | ")) == 1:
                    continue
                problems: list[Any] = []
                value: Any = {"true": True, "false": False}.get(word, word)
                assert parse_value(annotation, Node(value), field["name"], problems) is not INVALID, problems


def test_specs_that_are_no_family_say_their_first_line() -> None:
    class Plain(Spec):
        """One line
        broken in two.

        And more.
        """

    assert first_line(Plain) == "One line broken in two."
