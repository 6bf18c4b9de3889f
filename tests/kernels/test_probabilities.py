"""The probabilities of attention, block of queries by block, against the op that they belong to."""

import pytest
import torch

from archlab.kernels import OPS
from archlab.kernels.attention import probabilities
from archlab.kernels.op import Case

ATTENTION = OPS["attention"]


def arguments(case: Case) -> dict:
    generator = torch.Generator().manual_seed(len(case.name))
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in case.shapes.items()}
    drawn |= {name: valid(drawn[name]) for name, valid in ATTENTION.domains.items() if name in drawn}
    return {**drawn, **case.fixed()}


@pytest.mark.parametrize("elements", [1, 200, 10**6])
@pytest.mark.parametrize("case", ATTENTION.cases, ids=lambda case: case.name)
def test_weights_of_values_are_the_output_of_the_formula(case: Case, elements: int) -> None:
    given = arguments(case)
    given.pop("gate", None)  # of what comes after
    expected = ATTENTION.reference(**given)
    v = given.pop("v")
    values = v.repeat_interleave(expected.shape[1] // v.shape[1], 1)
    parts = list(probabilities(**given, elements=elements))
    assert [part.start for part in parts] == sorted({part.start for part in parts})
    assert len(parts) == (1 if elements == 10**6 else min(len(parts), expected.shape[2]))
    assert elements > 1 or len(parts) == expected.shape[2]
    weights = torch.cat([part.probabilities for part in parts], 2)
    torch.testing.assert_close(weights @ values, expected, rtol=1e-12, atol=1e-12)
    seen = torch.cat([part.seen for part in parts], 2)
    assert ((weights > 0) == seen).all()
    left = torch.cat([part.sink for part in parts], 2) if "sinks" in given else torch.zeros(())
    torch.testing.assert_close(weights.sum(-1) + left, torch.ones_like(expected[..., 0]), rtol=1e-12, atol=1e-12)


def test_what_a_bias_hides_is_not_seen() -> None:
    q = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    hidden = torch.zeros(3, 3).index_fill(1, torch.tensor([0]), float("-inf"))
    hidden[0, 0] = 0
    (part,) = probabilities(q, q, bias=hidden)
    assert part.seen[0, 0].tolist() == [[True, False, False], [False, True, False], [False, True, True]]
