"""When a micro-batch is replayed and what becomes of its gradients; `test_gpu.py` has graphs of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl.parts.context import Call
from archlab.search.training import passes
from archlab.search.training.passes import Found, Graph, Graphed

CPU, ONE = torch.device("cpu"), torch.ones(())


class Model(nn.Module):
    """A loss, a loss beside it and a measure, of two parameters, one of which no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1.0))

    def loss(self, tokens: Tensor, targets: Tensor, call: Call, z_loss: float) -> Tensor:
        call.losses["beside"] = self.scale * 3
        call.measures["seen"] = tokens.sum()
        return ((tokens * self.scale - targets) ** 2).mean()


RECIPE: Any = SimpleNamespace(precision="fp32", z_loss=0.0, objective=SimpleNamespace(encoder_weight=1.0))


class OnTheCpu(Graphed):
    """What a device would capture is computed on the same tensors again, and its results put where they lay."""

    def captured(self, given: dict[str, Tensor], call: Call) -> Graph | None:
        self.captures = getattr(self, "captures", 0) + 1
        self.make_room()
        own, before = {name: x.clone() for name, x in given.items()}, [x.grad for x in self.parameters]

        def compute() -> tuple[Found, list[Tensor | None]]:
            held = [x.grad for x in self.parameters]
            passes.put(self.parameters, [None] * len(held))
            found = self.passes(own["tokens"], own["targets"], Call(), own["times"], None)
            fresh = [x.grad for x in self.parameters]
            passes.put(self.parameters, held)
            return found, fresh

        found, fresh = compute()
        gradients = [(x, new) for x, new in zip(self.parameters, fresh, strict=True) if new is not None]
        passes.put(self.parameters, before)

        def replay() -> None:
            again, grads = compute()
            found.loss.copy_(again.loss)
            for old, new in ((found.added, again.added), (found.measures, again.measures)):
                for name, value in new.items():
                    old[name].copy_(value)
            for (_, place), new in zip(gradients, (x for x in grads if x is not None), strict=True):
                place.copy_(new)

        return Graph(SimpleNamespace(replay=replay), own, found, gradients, self.places())  # type: ignore[arg-type]


def batches(count: int, rows: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, 3, generator=generator), torch.randn(rows, 3, generator=generator)) for _ in range(count)
    ]


def run(step: Any, model: Model, given: list[tuple[Tensor, Tensor]], accumulate: int) -> list[tuple[float, ...]]:
    """Loss, what is beside it, measure and the step's gradient after each micro-batch; a step after `accumulate`."""
    found = []
    for number, (tokens, targets) in enumerate(given):
        loss, added, measures = step(tokens, targets, Call(), torch.tensor(2.0), None)
        assert model.scale.grad is not None and model.unused.grad is None
        found.append((float(loss), float(added["beside"]), float(measures["seen"]), float(model.scale.grad)))
        if (number + 1) % accumulate == 0:
            model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_replays_give_and_accumulate_what_eager_passes_do(accumulate: int) -> None:
    plain, other = Model(), Model()
    eagerly = run(passes.eager(plain, RECIPE, CPU), plain, batches(9), accumulate)
    graphed = OnTheCpu(passes.eager(other, RECIPE, CPU), other)
    assert run(graphed, other, batches(9), accumulate) == eagerly
    assert graphed.captures == 1


def test_results_outlive_the_next_replay() -> None:
    model = Model()
    graphed = OnTheCpu(passes.eager(model, RECIPE, CPU), model)
    found = [graphed(*batch, Call(), ONE, None) for batch in batches(4)]
    kept = [float(each.loss) for each in found]
    graphed(*batches(1)[0], Call(), ONE, None)
    assert [float(each.loss) for each in found] == kept
    assert len(set(kept)) == 4


def test_the_shapes_that_ran_last_have_graphs() -> None:
    model = Model()
    graphed = OnTheCpu(passes.eager(model, RECIPE, CPU), model)
    for rows in (2, 1, 3):
        run(graphed, model, batches(3, rows), 1)
    assert graphed.captures == 3
    assert [dict(key)["tokens"][0] for key in graphed.graphs] == [1, 3]
    run(graphed, model, batches(2, 1), 1)
    assert graphed.captures == 3


def test_a_shape_that_comes_back_late_is_not_captured() -> None:
    model = Model()
    graphed = OnTheCpu(passes.eager(model, RECIPE, CPU), model)
    for rows in [*range(1, passes.RECENT + 2)] * 3:
        run(graphed, model, batches(1, rows), 1)
    assert not graphed.graphs


def test_one_graph_serves_whatever_number_of_targets_a_micro_batch_has() -> None:
    plain, other = Model(), Model()
    graphed = OnTheCpu(passes.eager(other, RECIPE, CPU), other)
    for (tokens, targets), times in zip(batches(6), (2.0, 3.0, 1.5, 4.0, 2.5, 1.0), strict=True):
        given = tokens, targets, Call(), torch.tensor(times), None
        assert float(graphed(*given).loss) == float(passes.eager(plain, RECIPE, CPU)(*given).loss)
    assert torch.equal(other.scale.grad, plain.scale.grad)  # type: ignore[arg-type]
    assert graphed.captures == 1


def test_released_graphs_are_captured_again() -> None:
    model = Model()
    graphed = OnTheCpu(passes.eager(model, RECIPE, CPU), model)
    first = run(graphed, model, batches(3), 1)
    graphed.release()
    assert not graphed.graphs
    assert run(graphed, model, batches(3), 1) == first
    assert graphed.captures == 2


def test_a_parameter_that_lies_elsewhere_is_captured_again() -> None:
    model = Model()
    graphed = OnTheCpu(passes.eager(model, RECIPE, CPU), model)
    run(graphed, model, batches(3), 1)
    model.scale.data = model.scale.data.clone() + 1
    plain = Model()
    plain.scale.data += 1
    assert run(graphed, model, batches(2), 1) == run(passes.eager(plain, RECIPE, CPU), plain, batches(2), 1)
    assert graphed.captures == 2


@pytest.mark.parametrize("reads", [True, False])
def test_what_reads_earlier_micro_batches_is_eager_after_the_first(reads: bool) -> None:
    model = Model()
    graphed = OnTheCpu(passes.eager(model, RECIPE, CPU), model)
    assert graphed.looks_back, "as it may be a plug-in's"
    graphed.looks_back = reads
    for tokens, targets in batches(3):
        graphed(tokens, targets, Call(earlier={"seen": torch.ones(())}), ONE, None)
    assert len(graphed.graphs) == (not reads)


@pytest.mark.parametrize(("over", "reads"), [("batch", False), ("sequence", False), ("global_batch", True)])
def test_of_our_own_parts_balance_over_a_global_batch_reads_them(over: str, reads: bool) -> None:
    experts = {"type": "moe", "experts": 4, "top_k": 2, "width": 8, "balance": {"type": "switch", "over": over}}
    spec = arch_dsl.load({"d_model": 16, "n_layers": 1, "vocab": 19, "max_positions": 8, "block": {"ffn": experts}})
    model = arch_dsl.compile(arch_dsl.resolve(spec))
    assert Graphed(passes.eager(model, RECIPE, CPU), model).looks_back == reads


def test_one_process_on_a_gpu_has_graphs_unless_it_is_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setenv(passes.EAGER, "1")
    assert not isinstance(passes.passes_of(model, RECIPE, torch.device("cuda"), alone=True), Graphed)
    monkeypatch.delenv(passes.EAGER)
    assert isinstance(passes.passes_of(model, RECIPE, torch.device("cuda"), alone=True), Graphed)
    assert not isinstance(passes.passes_of(model, RECIPE, torch.device("cuda"), alone=False), Graphed)
    assert not isinstance(passes.passes_of(model, RECIPE, CPU, alone=True), Graphed)
