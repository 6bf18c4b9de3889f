"""The committed study of a paper's table counts the parameters that the paper prints, without building its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from archlab.cli.main import main

STUDY = Path(__file__).parents[3] / "studies" / "gated-attention-table1.yaml"
# arXiv:2505.06708, table 1, "added param" in millions. G5 adds 100.66, which the paper cuts off; the others it rounds.
ADDED = {
    "baseline": "0",
    "twice the kv heads": "50",
    "half more query heads": "201",
    "sdpa_elementwise_g1": "201",
    "v_elementwise_g2": "25",
    "k_elementwise_g3": "25",
    "q_elementwise_g4": "201",
    "dense_output_g5": "100",
    "sdpa_headwise_g1": "1.6",
    "v_headwise_g2": "0.2",
    "sdpa_headshared_g1": "201",
    "v_headshared_g2": "25",
    "sdpa_additive_silu_g1": "201",
    "sdpa_elementwise_silu_g1": "201",
    "add_4_experts": "453",  # 400 as printed
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `archlab plan --json` says of each variant."""
    store = tmp_path_factory.mktemp("store")
    small = "train.data={type: stdlib, bytes: 200k, validation_bytes: 10k, test_bytes: 10k}"
    short = [argument for setting in ("scale=published", small, "train.batch=8") for argument in ("--set", setting)]
    result = CliRunner().invoke(main, ["plan", str(STUDY), "--store", str(store), *short, "--json"])
    assert result.exit_code == 0, result.output
    return {variant["name"]: variant for variant in json.loads(result.stdout)["variants"]}


def test_the_study_has_the_rows_of_the_table(planned: dict[str, Any]) -> None:
    assert list(planned) == list(ADDED)


@pytest.mark.parametrize("name", ADDED)
def test_added_parameters_are_the_printed_ones(name: str, planned: dict[str, Any]) -> None:
    printed, added = ADDED[name], planned[name]["added"] / 1e6
    if name == "dense_output_g5":
        assert (int(added), round(added, 1)) == (int(printed), 100.7)
    else:
        assert f"{added:.{1 if '.' in printed else 0}f}" == printed


def test_a_plan_tells_all_figures(planned: dict[str, Any]) -> None:
    baseline = planned["baseline"]
    assert baseline["non_embedding"] == baseline["parameters"] - 151936 * 2048
    assert baseline["training_flops_per_token"] == pytest.approx(3 * baseline["flops_per_token"], abs=3)
    assert baseline["cache_bytes_per_token"] == 4 * 24 * 2 * 4 * 128
    assert planned["twice the kv heads"]["cache_bytes_per_token"] == 2 * baseline["cache_bytes_per_token"]
    assert planned["sdpa_elementwise_g1"]["activation_bytes"] > baseline["activation_bytes"]
