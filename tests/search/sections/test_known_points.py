"""Points of a space: all, neighbours, what is known of it before a search; and proposals by the effects of its axes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from archlab.arch_dsl import resolve
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import read_text
from archlab.search.sections.search.by_effects import Told, propose
from archlab.search.sections.search.known_points import known_points
from archlab.search.sections.search.points import Points
from archlab.search.sections.search.space import Space
from archlab.search.study.changes import value_at
from archlab.search.study.load import load_study
from archlab.search.utils.canonical import canonical_json

STUDIES = Path(__file__).resolve().parents[3] / "studies"
TEXT = """\
kind: {choice: [a, b]}
width: {int: [16, 64], step: 16, when: "kind == 'b'"}
rate: {float: [1e-4, 1e-2], log: true}
"""


def space(text: str = TEXT) -> Space:
    found: Space = parse(Space, read_text(text, "s.yaml"), "space")
    return found


def test_a_point_has_a_place_on_each_axis_on_which_it_has_a_value() -> None:
    points = Points(space(), {})
    places = points.places([{"kind": "a", "rate": 1e-3}, {"kind": "b", "width": 64, "rate": 1e-4}])
    assert places.tolist() == [[0, -1, 0.5], [1, 1, 0]]
    assert points.numeric.tolist() == [False, True, True]


def test_all_points_of_a_space_keep_to_its_conditions() -> None:
    finite = Points(space(TEXT.replace("{float: [1e-4, 1e-2], log: true}", "{float: [0.25, 1], step: 0.25}")), {})
    whole = finite.all(100)
    assert whole is not None and len(whole) == 4 + 4 * 4
    assert {"kind": "a", "rate": 0.75} in whole and {"kind": "b", "width": 48, "rate": 0.25} in whole
    assert finite.all(19) is None and Points(space(), {}).all(10**6) is None, "too many, and without end"


def test_random_points_and_neighbours_lie_in_the_space() -> None:
    said, draw = space(), np.random.default_rng(0)
    points = Points(said, {})
    point, seen = points.random(draw), set()
    for _ in range(300):
        after = points.near(point, draw)
        assert ("width" in after) == (after["kind"] == "b")
        assert all(said.axes[path].holds(value) for path, value in after.items())
        seen.add((after["kind"], after.get("width")))
        point = after
    assert seen == {("a", None), *(("b", width) for width in (16, 32, 48, 64))}


def test_a_search_begins_with_the_base_and_with_published_models() -> None:
    study = load_study(STUDIES / "search" / "blocks.yaml")
    assert isinstance(study.space, Space)
    given = study.components, partial(value_at, study), []
    found = known_points(study.space, resolve(study.model, vocab=257, max_positions=256), *given, 99)

    def point(**changes: Any) -> dict[str, Any]:
        base = dict.fromkeys(("gate", "qk_norm", *(f"layer {index}" for index in range(4))), "off")
        norm = {"block.norm.type": "rmsnorm", "block.norm.placement": "pre", "block.attention.positional": "rope"}
        return {**base, **norm, "train.lr": 4e-3, **changes}

    windows = {f"layer {index}": f"window {index}" for index in range(4)}
    deltas = {f"layer {index}": f"delta {index}" for index in range(4)}
    assert found[0] == point() and found[1:3] == [point(**windows), point(**deltas)]
    for published in (
        point(**{"gate": "G1", "qk_norm": "qk_norm"}),  # Gated Attention
        point(**{"block.attention.positional": "alibi", "block.norm.type": "layernorm"}),  # BLOOM
        point(**{"block.norm.placement": "sandwich"} | {k: windows[k] for k in ("layer 0", "layer 2")}),  # Gemma 2
        point(**{"block.norm.placement": "res_post"} | {k: v for k, v in windows.items() if k != "layer 3"}),  # OLMo 3
    ):
        assert published in found
    assert len({canonical_json(each) for each in found}) == len(found)
    assert found[:5] == known_points(study.space, resolve(study.model, vocab=257, max_positions=256), *given, 5)


def test_proposals_begin_with_what_is_known_and_never_repeat() -> None:
    points = Points(space("a: {choice: [0, 1, 2]}\nb: {choice: [0, 1, 2]}\nc: {choice: [0, 1]}"), {})
    starts = [{"a": 0, "b": 0, "c": 0}, {"a": 2, "b": 0, "c": 0}]
    history: list[Told] = []
    for number in range(18):
        values = propose(points, history, starts, 1, np.random.default_rng(number))
        if values is None:
            values = points.random(np.random.default_rng(number))
        loss = abs(values["a"] - 1) + 0.5 * abs(values["b"] - 2) + 0.1 * values["c"]
        history.append(Told(values, (loss,), {}, ended=True))
    assert [told.values for told in history[:2]] == starts
    assert len({canonical_json(told.values) for told in history}) == 18, "all of the space, each once"
    assert {"a": 1, "b": 2, "c": 0} in [told.values for told in history[:8]]
    assert propose(points, history, starts, 1, np.random.default_rng(0)) is None
