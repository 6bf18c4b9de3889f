"""What is measured is right first; winners of tuning are looked up by card and key."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from archlab.kernels import OPS, Device, bench, launch, tune
from archlab.kernels.op import Implementation

CPU = Device("cpu")


def test_an_implementation_that_is_wrong_is_named_with_its_case() -> None:
    op = OPS["rms_norm"]
    wrong = Implementation("torch", lambda: lambda x, weight, eps: 1.01 * op.reference(x, weight, eps), "wrong")
    planted = dataclasses.replace(op, implementations={"wrong": wrong, **op.implementations})
    assert bench.trusted(planted, "torch", CPU, torch.float32) is None
    assert "relative error 1.0e-02" in (bench.trusted(planted, "wrong", CPU, torch.float32) or "")


def test_workloads_are_calls_that_their_ops_take() -> None:
    seen = set()
    for op, case in bench.workloads(CPU):
        meta = {name: torch.empty(shape, device="meta") for name, shape in case.shapes.items()}
        assert op.flops(**meta, **case.fixed()) > 0
        assert op.bytes(**meta, **case.fixed()) > 0
        assert bench.chosen(op, case, CPU, torch.float32) in {"reference", *op.implementations}
        seen.add(op.name)
    assert seen >= {"attention", "rms_norm", "linear_recurrence", "linear_cross_entropy"}


def test_calls_take_turns_and_have_a_time_each() -> None:
    order: list[str] = []
    took = bench.in_turns({name: lambda name=name: order.append(name) for name in "ab"}, CPU, rounds=3)  # type: ignore[misc]
    assert order == list("ab" * 4)
    assert list(took) == ["a", "b"]


def _launches(scale: float = 1.0) -> torch.Tensor:
    """A call whose kernel does not fit with 128 rows, and is wrong with 16 columns."""
    tiles = launch.tuned("k", {"D": 64}, {"BM": 32, "BN": 32, "num_warps": 4})
    if tiles["BM"] > 64:
        raise RuntimeError("out of resource: shared memory")
    return torch.full((3,), scale * (2.0 if tiles["BN"] == 16 else 1.0))


def _seconds(call: Callable[[], list[torch.Tensor]]) -> float:
    """Fast with many rows and few columns, and with 4 warps."""
    call()
    tiles = launch.tuned("k", {"D": 64}, {"BM": 32, "BN": 32, "num_warps": 4})
    return float(tiles["BN"] / tiles["BM"] + abs(tiles["num_warps"] - 4))


def test_tuning_goes_step_by_step_to_the_fastest_tiles_that_fit_and_are_right(tmp_path: Path) -> None:
    said: list[str] = []
    winners = tune.tune(lambda: [_launches()], _seconds, 1e-3, said.append)
    assert winners == {"k": {"D=64": {"BM": 64, "BN": 32, "num_warps": 4}}}
    assert said == ["k D=64: {'BM': 64, 'BN': 32, 'num_warps': 4}, the call takes 500000.0 us"]


def test_winners_are_looked_up_by_card_and_key_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune.write("some-card", {"other": {"D=1": {"BM": 1}}}, tmp_path)
    tune.write("some-card", {"k": {"D=64": {"BM": 64}}}, tmp_path)
    monkeypatch.setattr(launch, "WINNERS", tmp_path)
    monkeypatch.setattr(launch, "card", lambda: "some-card")
    launch._winners.cache_clear()
    assert launch.tuned("k", {"D": 64}, {"BM": 16})["BM"] == 64
    assert launch.tuned("k", {"D": 128}, {"BM": 16})["BM"] == 16
    assert launch.tuned("other", {"D": True}, {"BM": 16})["BM"] == 1
    with launch.compiling_for(80):
        assert launch.tuned("k", {"D": 64}, {"BM": 16})["BM"] == 16
        assert launch.capability() == 80
    launch._winners.cache_clear()


def test_every_kernel_with_tiles_of_a_workload_is_found_and_keeps_its_results() -> None:
    op = OPS["linear_cross_entropy"]
    case = op.cases[0]
    call = bench.call(op, "triton", case, CPU, torch.float32, gradients=True)
    winners = tune.tune(call, lambda timed: float(len(timed())), 1e-4, lambda line: None)
    assert list(winners) == ["linear_cross_entropy"]
