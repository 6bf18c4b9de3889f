"""Matching: the width found is the nearest of all, in few measures, whatever the curve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.model.model import cost, resolve
from archlab.arch_dsl.patching.patch import patch
from archlab.search.planning.plan import Plan, plan
from archlab.search.sections.match.spec import LARGEST, SCALE, Match, solve, solve_time
from archlab.search.study.load import load_study
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
    with pytest.raises(
        SpecError, match=rf"no width up to {LARGEST:,} reaches the 9 to match; whatever it is, there are 5"
    ):
        solve(lambda width: 5, 9)
    with pytest.raises(
        SpecError, match=r"even a width of 1 has 10, more than the 9 to match; whatever it is, there are 10"
    ):
        solve(lambda width: 10, 9)


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


KINDS_STUDY = """
study: kinds
model:
  d_model: 32
  n_layers: 2
  block: {norm: rmsnorm, attention: {heads: 4, kv_heads: 2, positional: rope}, ffn: {type: glu, width: 96}}
variants:
  baseline: {}
  gated: {block.attention.gate: {position: sdpa}}
  deep: {n_layers: 3}
match: %s
train: {data: stdlib, tokenizer: bytes, tokens: 20k, context: 32, batch: 4, lr: 1e-3}
"""


def planned(folder: Path, match: str) -> Plan:
    path = folder / "kinds.yaml"
    path.write_text(KINDS_STUDY % match)
    return plan(load_study(path), folder / "store" / "data")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


def test_flops_are_matched_as_near_as_a_width_allows(place: Path) -> None:
    found = {v.name: v for v in planned(place, "{flops_per_token: baseline, by: block.ffn.width}").variants}
    target = found["baseline"].flops_per_token
    for name in ("gated", "deep"):
        width = found[name].matched["block.ffn.width"]
        sizes = {}
        for near in (width - 1, width, width + 1):
            model = patch(found[name].model, {"block.ffn.width": near})
            sizes[near] = cost(model, 32).figures(32)["flops_per_token"]
        assert min(sizes, key=lambda near: abs(sizes[near] - target)) == width
        assert found[name].mismatch == pytest.approx(sizes[width] / target - 1)
        assert found[name].parameters != found["baseline"].parameters


def test_what_decoding_keeps_is_matched_in_bytes_of_a_context(place: Path) -> None:
    found = planned(place, "{cache_bytes: baseline, by: block.attention.head_dim, multiple: 2}").variants
    assert [v.size for v in found[:2]] == [4 * 2 * 2 * 2 * 8 * 32] * 2
    deep = found[2]
    assert deep.matched == {"block.attention.head_dim": 6}, "2/3 of 8 is 5.33: 6 is the nearest even one"
    assert deep.mismatch == pytest.approx(3 * 6 / (2 * 8) - 1)


def test_a_width_that_changes_nothing_of_what_is_matched_stays(place: Path) -> None:
    match = "{cache_bytes: baseline, by: block.ffn.width}"
    with pytest.raises(
        SpecError, match=r"more than the [0-9,]+ to match; whatever it is, there are .*\(variant deep\)"
    ):
        planned(place, match)
    path = place / "alike.yaml"
    path.write_text((KINDS_STUDY % match).replace("  deep: {n_layers: 3}\n", ""))
    _, gated = plan(load_study(path), place / "store" / "data").variants
    assert gated.mismatch == 0 and gated.matched == {"block.ffn.width": 96}
    assert gated.model.block["ffn"].width == 96
    with pytest.raises(SpecError, match="'widht' is not a name; did you mean 'width'"):
        planned(place, "{parameters: baseline, by: block.ffn.widht}")


def test_several_fields_keep_their_proportions(place: Path) -> None:
    match = "{parameters: baseline, by: [block.ffn.width, block.attention.head_dim], multiple: 2}"
    found = {v.name: v for v in planned(place, match).variants}
    width, head = found["deep"].matched.values()
    assert width % 2 == head % 2 == 0
    assert abs(width / 96 - head / 8) <= 1 / 8, "both to about the same share of what they were, 96 and 8"
    assert abs(found["deep"].mismatch) < 0.1 < abs(1 - width / 96)


def test_the_unmatched_form_of_a_variant_is_a_row_of_its_own(place: Path) -> None:
    match = "{parameters: baseline, by: block.ffn.width, report_unmatched: true}"
    found = planned(place, match).variants
    assert [v.name for v in found] == ["baseline", "gated", "gated unmatched", "deep", "deep unmatched"]
    by_name = {v.name: v for v in found}
    written = by_name["deep unmatched"]
    assert not written.matched and "n_layers: 2 → 3" in map(str, written.changes)
    assert written.mismatch == pytest.approx(written.parameters / by_name["baseline"].parameters - 1)
    assert written.mismatch > 0.2 > 0.01 > abs(by_name["deep"].mismatch)


GRID = "grid:\n  block.attention.kv_heads: [4, 1]"


@pytest.mark.parametrize("all_cells", [False, True])
def test_cells_of_a_grid_are_matched_to_their_own_target_or_all_to_one(place: Path, all_cells: bool) -> None:
    match = f"{{parameters: baseline, by: block.ffn.width, all_cells: {str(all_cells).lower()}}}"
    found = plan(load_study(write_study(place, match=f"match: {match}", grid=GRID)), place / "store" / "data")
    sizes = {variant.name: variant.parameters for variant in found.variants}
    assert len(sizes) == 4
    first, other = (size for name, size in sizes.items() if name.startswith("baseline"))
    assert (abs(other / first - 1) < 0.01) is all_cells
    assert all(abs(variant.mismatch) < 0.01 for variant in found.variants)
    kept = next(variant for variant in found.variants if variant.name.startswith("baseline"))
    assert not kept.matched, "the first cell's target stays as it is written"


def test_the_rungs_of_a_ladder_are_not_made_alike(place: Path) -> None:
    match = "match: {parameters: baseline, by: block.ffn.width, all_cells: true}"
    ladder = "ladder: {sizes: {d_model: [32, 64]}}"
    with pytest.raises(SpecError, match=r"match\.all_cells: the rungs of a ladder are to differ in size"):
        load_study(write_study(place, match=match, ladder=ladder))


def test_step_times_are_measured_once_and_stay_as_decided(place: Path) -> None:
    match = "{step_time: baseline, by: block.ffn.width, multiple: 8}"
    first = planned(place, match)
    folder = place / "store" / "timings"
    files = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert files and not [name for name in files if name.startswith(".")]
    again = planned(place, match)
    assert [v.trial(0).key for v in first.variants] == [v.trial(0).key for v in again.variants]
    assert [v.mismatch for v in first.variants] == [v.mismatch for v in again.variants]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == files, "nothing was measured again"
    kept = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert all(each["seconds"] > 0 and each["of"] > 0 and each["fingerprint"] for each in kept)
    for variant in first.variants[1:]:
        assert variant.matched["block.ffn.width"] % 8 == 0
        assert variant.mismatch in [each["ratio"] - 1 for each in kept]


@pytest.mark.parametrize("fixed", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("guess", [10, 100, 1000])
def test_a_time_with_a_fixed_part_is_solved_in_few_measures(fixed: float, guess: int) -> None:
    calls = []

    def ratio(width: int) -> float:
        calls.append(width)
        return fixed + (1 - fixed) * width / 137

    assert abs(ratio(solve_time(ratio, guess)) - 1) <= 0.02 or len(set(calls)) == 6
    assert len(set(calls)) <= 6


def test_a_scale_keeps_multiples() -> None:
    match = Match(parameters="a", by=("x", "y"), multiple=8)
    assert match.values(SCALE, [96, 40]) == [96, 40]
    assert match.values(SCALE // 2, [96, 40]) == [48, 16]
    assert match.values(1, [96, 40]) == [8, 8]
