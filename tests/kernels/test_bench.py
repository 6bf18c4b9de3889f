"""What is measured is right first; winners of tuning are looked up by card and key."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import OPS, Device, bench, launch, tune
from kernels.op import Implementation

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
    assert all(seconds >= 0 for seconds in took.values())


def _sizes(tiles: list[int]) -> launch.Tunable:
    def call() -> None:
        if (size := launch.tuned("k", {"D": 64}, {"BM": 1})["BM"]) > 64:
            raise RuntimeError("out of resource: shared memory")
        tiles.append(size)

    return launch.Tunable("k", {"D": 64}, [{"BM": 32}, {"BM": 64}, {"BM": 128}], call)


def test_tuning_keeps_the_fastest_tiles_that_fit_and_what_was_known_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles: list[int] = []

    def seconds(call: Callable[[], object]) -> float:
        call()
        return 1.0 / tiles[-1]

    winners = tune.tune([_sizes(tiles)], seconds, lambda line: None)
    assert winners == {"k": {"D=64": {"BM": 64}}}
    tune.write("some-card", {"other": {"D=1": {"BM": 1}}}, tmp_path)
    tune.write("some-card", winners, tmp_path)
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


def test_a_kernel_without_tiles_that_fit_is_said() -> None:
    tunable = dataclasses.replace(_sizes([]), candidates=[{"BM": 128}])

    def seconds(call: Callable[[], object]) -> float:
        call()
        return 0.0

    with pytest.raises(RuntimeError, match=r"no tiles of k \(D=64\) fit this card: out of resource"):
        tune.fastest(tunable, seconds)
