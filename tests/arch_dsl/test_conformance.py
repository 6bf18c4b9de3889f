"""Every primitive keeps shapes, looks only back, costs what it says, is captured as one graph, and obeys its fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl.conformance.fields import accepted, choices
from archlab.arch_dsl.conformance.properties import every_field_counts
from archlab.arch_dsl.language.spec import Family, walk
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.parts.families import Gate, Position, Primitive, Score
from archlab.arch_dsl.primitives.positions import Sinusoidal
from archlab.arch_dsl.tree.identity import identity
from tests.arch_dsl.conformance import (
    HOSTS,
    PROPERTIES,
    TOKENS,
    Case,
    alterations,
    build,
    cases,
    cases_of,
    differ,
    effect,
    gallery,
    one_graph,
    tried,
)
from tests.slow_tests import ALL

CASES = list(cases())
every_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])


def test_every_family_and_every_member_is_on_trial():
    assert set(HOSTS) == set(Primitive.__subclasses__())
    names = {name for family in HOSTS for name in family.members}
    assert {name for case in CASES for name in case.tried} == names | {
        "",
        "init",
        "embedding",
        "unembedding",
        "encoder",
        "decoder",
        "loop",
        "depths",
    }
    for case in CASES:
        there = {spec.type if isinstance(spec, Family) else path for path, spec in walk(case.model)}
        assert set(case.tried) <= {*there, "encoder", "decoder"}


FIELDS = "every field changes the result"


@every_case
def test_holds(case: Case):
    names = [name for name in PROPERTIES if name != FIELDS]
    assert {name: told for name in names if (told := PROPERTIES[name](case)) != ""} == {}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=[] if case.id in ("glu", "forget_gate") else [pytest.mark.slow])
        for case in CASES
    ],
)
def test_every_field_changes_the_result_at_every_place(case: Case):
    """One value of each, or with ARCHLAB_ALL all values."""
    assert every_field_counts(case, seed=None if ALL else case.id) == ""


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES if case.plain])
def test_every_field_changes_the_result_at_the_first_place_that_takes_it(case: Case):
    """With another value of each field, from the defaults; from other values the test before tries them, slowly."""
    before, known = effect(case.model), identity(case.model)
    values: Counter[str] = Counter()  # how many other values a field took at a place
    changed: dict[tuple[str, int], bool] = {}
    for where, model in alterations(case):
        values[where] += 1
        other = (where if case.member is None else where.rsplit(".", 1)[-1], values[where])
        if values[where] == 1 and other not in changed and model != case.model:
            changed[other] = identity(model) != known and differ(before, effect(model))
    assert [other for other, differs in changed.items() if not differs] == []
    missing = choices(case) - {field for field, _ in changed}  # what matters only beside others, as another case has
    assert not missing or missing <= {field for other in case.others() for field in accepted(other)}


def pair() -> Model:
    """An encoder and a decoder."""
    return next(case.model for case in CASES if case.id == "encoder_decoder")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(partial(gallery, Score), id=Score.noun),
        pytest.param(pair, id="encoder_decoder"),
    ],
)
def test_is_captured_without_a_break(model: Callable[[], Model]):
    """What the next test, a slow one, holds of all families."""
    module = build(model(), backend="auto", dtype=torch.float32)
    torch._dynamo.reset()
    captured = torch.compile(module, fullgraph=True, backend="eager")
    calls = [Call(source_tokens=TOKENS.flip(1)) for _ in range(2)]
    torch.testing.assert_close(captured(TOKENS, calls[0]), module(TOKENS, calls[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "family",
    [pytest.param(kind, id=kind.noun, marks=[] if kind is Gate else [pytest.mark.slow]) for kind in HOSTS],
)
def test_is_captured_and_exported_as_one_graph(family: type[Primitive]):
    assert one_graph(gallery(family)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder_decoder", "cross_attention", "positions_after_source"])
def test_is_captured_and_exported_as_one_graph_with_an_encoder(name: str):
    assert one_graph(next(case.model for case in CASES if case.id == name)) == ""


def test_a_field_that_is_ignored_is_found():
    @Position.register("deaf")
    class Deaf(Sinusoidal):
        """Sinusoids with a field that is accepted and ignored."""

        loud: bool = False

    try:
        case = next(iter(cases_of(Deaf)))
        reached, ignored = tried(case)
        told = PROPERTIES[FIELDS](case)
    finally:
        del Position.members["deaf"]
    assert reached == {"theta", "loud"}
    assert ignored == ["embed.0.loud"]
    assert told == "accepted and ignored: embed.0.loud"


Key = tuple[str, torch.Size, str]


@pytest.fixture(scope="module")
def initial_values() -> dict[Key, torch.Tensor]:
    """Of parameters that seed 3 does not start at zero, those of the first case that has them."""
    found: dict[Key, torch.Tensor] = {}
    for case in CASES:
        for name, value in arch_dsl.compile(case.model, seed=3).named_parameters():
            if value.any():
                found.setdefault(key(case, name, value), value)
    return found


def key(case: Case, name: str, value: torch.Tensor) -> Key:
    """What says which parameters of two models start equal: name, shape, and the depth of the stacks."""
    return name, value.shape, str({stack: spec.n_layers for stack, spec in case.model.stacks().items()})


@every_case
def test_initial_values_are_a_function_of_seed_and_path(case: Case, initial_values: dict[Key, torch.Tensor]):
    first = dict(arch_dsl.compile(case.model, seed=3).named_parameters())
    torch.manual_seed(99)
    again = dict(arch_dsl.compile(case.model, seed=3).named_parameters())
    other = dict(arch_dsl.compile(case.model, seed=4).named_parameters())
    assert [name for name in first if not torch.equal(first[name], again[name])] == []
    assert not torch.equal(first["embedding"], other["embedding"])
    theirs = {name: initial_values.get(key(case, name, value), value) for name, value in first.items()}
    assert [name for name, value in first.items() if not _proportional(value, theirs[name])] == []


def _proportional(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for the standard deviation that a spec chooses; what starts at zero is proportional to everything."""
    return bool(torch.allclose(a * b.norm(), b * a.norm(), rtol=1e-4, atol=1e-6))
