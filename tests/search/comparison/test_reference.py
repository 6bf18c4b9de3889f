"""A table against another variant than the study's baseline."""

from __future__ import annotations

import json
from typing import Any

import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.search.comparison.compare import compare, with_reference
from tests.cli.test_cli import archlab, trained
from tests.search.compare_kit import make_study

__all__ = ["trained"]


def test_the_same_trials_are_compared_with_another_variant() -> None:
    record, trials = make_study({"baseline": 0.0, "alibi": -0.05, "none": 0.2})
    usual = compare(record, trials).table.set_index("variant")
    found = compare(with_reference(record, "none"), trials).table.set_index("variant")
    assert list(found["baseline"]) == ["none"] * 3 and found["verdict"]["none"] == "baseline"
    assert found["delta"]["baseline"] == pytest.approx(-usual["delta"]["none"])
    assert found["delta"]["alibi"] == pytest.approx(usual["delta"]["alibi"] - usual["delta"]["none"])
    assert found["loss_mean"].equals(usual["loss_mean"])
    assert set(found["verdict"]) == {"baseline", "better"}


def test_in_a_grid_each_row_is_compared_within_its_cell() -> None:
    names = [f"{variant} [heads={heads}]" for heads in (2, 4) for variant in ("baseline", "alibi")]
    record, trials = make_study(dict.fromkeys(names, 0.0))
    for variant in record["variants"]:
        _, cell = variant["name"].split(" ", 1)
        variant |= {"axes": {"heads": cell}, "baseline": f"baseline {cell}"}
    found = compare(with_reference(record, "alibi"), trials).table
    assert list(found["baseline"]) == [names[1], names[1], names[3], names[3]]
    whole = compare(with_reference(record, names[3]), trials).table
    assert set(whole["baseline"]) == {names[3]}
    with pytest.raises(
        SpecError, match=r"'alibis' is not a variant; did you mean 'alibi'\? \(baseline, alibi, baseline"
    ):
        with_reference(record, "alibis")


def test_in_a_ladder_each_row_is_compared_at_its_rung() -> None:
    names = [f"{variant} [size={size}]" for size in (1, 2) for variant in ("baseline", "alibi")]
    record, trials = make_study(dict.fromkeys(names, 0.0))
    for variant in record["variants"]:
        _, rung = variant["name"].split(" ", 1)
        variant |= {"axes": {}, "rung": rung, "baseline": f"baseline {rung}"}
    found = compare(with_reference(record, "alibi"), trials).table
    assert list(found["baseline"]) == [names[1], names[1], names[3], names[3]]


def test_the_command_says_with_what_it_compared(trained: Any) -> None:
    found = json.loads(archlab("report", "gates", "--against", "gated", "--json").stdout)
    assert [row["verdict"] for row in found["table"]][1] == "baseline"
    assert found["notes"][0].startswith("compared with gated, not with the study's baseline")
    wrong = archlab("report", "gates", "--against", "gate")
    assert wrong.exit_code == 2 and "did you mean 'gated'?" in wrong.stderr
    assert archlab("report", "gates", "--against", "gated", "--html", "x.html").exit_code == 2
