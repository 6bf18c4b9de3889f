"""Every primitive keeps shapes, looks only back, costs what it says, is captured as one graph, and obeys its fields."""

from __future__ import annotations

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl.language.spec import Family, walk
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts.families import Norm, Primitive
from archlab.arch_dsl.primitives.norms import RMSNorm
from tests.arch_dsl.conformance import HOSTS, PROPERTIES, Case, cases, cases_of, gallery, one_graph, tried

CASES = list(cases())
every_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
every_family = pytest.mark.parametrize("family", [pytest.param(kind, id=kind.noun) for kind in HOSTS])


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
    }
    for case in CASES:
        there = {spec.type if isinstance(spec, Family) else path for path, spec in walk(case.model)}
        assert set(case.tried) <= {*there, "encoder", "decoder"}


@every_case
@pytest.mark.parametrize("name", PROPERTIES)
def test_holds(name: str, case: Case):
    assert PROPERTIES[name](case) == ""


@every_family
def test_is_captured_and_exported_as_one_graph(family: type[Primitive]):
    assert one_graph(gallery(family)) == ""


@pytest.mark.parametrize(
    "name",
    [
        "encoder_decoder",
        pytest.param("cross_attention", marks=pytest.mark.slow),
        pytest.param("positions_after_source", marks=pytest.mark.slow),
    ],
)
def test_is_captured_and_exported_as_one_graph_with_an_encoder(name: str):
    assert one_graph(next(case.model for case in CASES if case.id == name)) == ""


def test_a_field_that_is_ignored_is_found():
    @Norm.register("deaf")
    class Deaf(RMSNorm):
        """An RMSNorm with a field that is accepted and ignored."""

        loud: bool = False

    try:
        case = next(iter(cases_of(Deaf)))
        reached, ignored = tried(case)
        told = PROPERTIES["every field changes the result"](case)
    finally:
        del Norm.members["deaf"]
    assert reached == {"share", "eps", "weight", "unit_offset", "per_head", "over", "loud"}
    assert ignored and {where.rsplit(".", 1)[-1] for where in ignored} == {"loud"}
    assert told.startswith("accepted and ignored: ") and ".loud" in told


@pytest.fixture(scope="module")
def initial_values() -> dict[str, dict[str, torch.Tensor]]:
    """All cases' parameters as the seed 3 gives them."""
    return {case.id: dict(arch_dsl.compile(case.model, seed=3).named_parameters()) for case in CASES}


def depths(model: Model) -> dict[str, int]:
    """How many layers each stack has."""
    return {name: stack.n_layers for name, stack in model.stacks().items()}


@every_case
def test_initial_values_are_a_function_of_seed_and_path(case: Case, initial_values):
    first = dict(arch_dsl.compile(case.model, seed=3).named_parameters())
    torch.manual_seed(99)
    again = dict(arch_dsl.compile(case.model, seed=3).named_parameters())
    other = dict(arch_dsl.compile(case.model, seed=4).named_parameters())
    assert [name for name in first if not torch.equal(first[name], again[name])] == []
    assert not torch.equal(first["embedding"], other["embedding"])
    for sibling in (other for other in CASES if depths(other.model) == depths(case.model)):
        theirs = initial_values[sibling.id]
        shared = [name for name, value in theirs.items() if name in first and first[name].shape == value.shape]
        assert [name for name in shared if not _proportional(first[name], theirs[name])] == []


def _proportional(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for the standard deviation that a spec chooses; what starts at zero is proportional to everything."""
    return bool(torch.allclose(a * b.norm(), b * a.norm(), rtol=1e-4, atol=1e-6))
