"""Matching: the width found is the nearest of all, in few measures, whatever the curve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from arch_dsl.errors import SpecError
from arch_dsl.model import cost, resolve
from arch_dsl.patch import patch
from search.match import LARGEST, solve
from search.planning import plan
from search.study import load_study
from tests.search.study_files import write_study

CURVES: dict[str, Callable[[int], int]] = {
    "line": lambda width: 192 * width + 5_000,
    "steps": lambda width: 640 * (width // 16) + 7,
    "parabola": lambda width: width * width + 3 * width,
    "long flat start": lambda width: max(0, width - 900),
    "kink": lambda width: width if width < 300 else 300 + 50 * (width - 300),
    "root": lambda width: int(1000 * width**0.5),
}


@pytest.mark.parametrize("target", [5_192, 5_193, 20_000, 20_095, 123_456])
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES.keys())
def test_no_other_width_is_nearer(curve: Callable[[int], int], target: int) -> None:
    calls = []

    def measure(width: int) -> int:
        calls.append(width)
        return curve(width)

    width, found = solve(measure, target)
    assert found == curve(width)
    best = min(abs(curve(each) - target) for each in range(1, 130_000))
    assert abs(found - target) == best
    assert len(calls) == len(set(calls)) < 60, "no width is measured twice"


def test_a_line_takes_five_measures() -> None:
    calls: list[int] = []

    def line(width: int) -> int:
        calls.append(width)
        return 193 * width + 5

    assert solve(line, 193 * 700 + 70) == (700, 193 * 700 + 5)
    assert len(calls) <= 5


@pytest.mark.parametrize(("target", "width"), [(10, 1), (20, 2), (14, 1), (15, 1), (16, 2)])
def test_ends_and_ties(target: int, width: int) -> None:
    assert solve(lambda each: 10 * each, target)[0] == width


def test_what_no_width_reaches_is_told() -> None:
    with pytest.raises(SpecError, match=r"even a width of 1 has 10, more than the 9 to match"):
        solve(lambda width: 10 * width, 9)
    with pytest.raises(SpecError, match=rf"no width up to {LARGEST:,} reaches the 9 to match"):
        solve(lambda width: 5, 9)


@pytest.mark.parametrize("by", ["block.ffn.width", "d_model"])
def test_matched_variants_are_as_near_as_brute_force(by: str, tmp_path: Path) -> None:
    variants = """\
variants:
  baseline: {}
  gated: [gate]
  sandwich: {block.norm.placement: sandwich}
  headwise: [gate, {block.attention.gate.granularity: headwise}]
  mlp: {block.ffn.type: mlp}"""
    model = """\
model:
  d_model: 48
  n_layers: 2
  block:
    norm: rmsnorm
    attention: {heads: 2, head_dim: 8, positional: rope}
    ffn: {type: glu, width: 100}"""
    match = f"match: {{parameters: baseline, by: {by}}}"
    planned = plan(load_study(write_study(tmp_path, variants=variants, model=model, match=match)), tmp_path / "data")
    target = planned.variants[0].parameters
    assert planned.variants[0].matched == {} and planned.variants[0].mismatch == 0
    for variant in planned.variants[1:]:
        (width,) = variant.matched.values()
        counts = {each: cost(resolve(patch(variant.model, {by: each})), 32).parameters for each in range(1, 3 * width)}
        nearest = min(abs(count - target) for count in counts.values())
        assert abs(counts[width] - target) == nearest
        assert variant.parameters == counts[width]
        assert variant.mismatch == variant.parameters / target - 1
        assert variant.matched == {by: width}
