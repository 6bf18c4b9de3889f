"""What kernels read, write and compute is counted, and none does more of it than it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archlab.kernels import OPS, Case, Device, bench
from archlab.kernels.counts import Launch, counted

HEADS = dict.fromkeys("qkv", (1, 1, 256, 16))
ROWS = {"x": (4096, 512)}
PLAIN = {"weight": (512,)}
# op -> a case, in which tensors of rows weigh more than those of columns
ROW_WISE = {
    "rms_norm": Case("rows", ROWS | PLAIN, {"eps": 1e-6}),
    "layer_norm": Case("rows", ROWS | PLAIN | {"bias": (512,)}, {"eps": 1e-5}),
    "add_norm": Case(
        "rows",
        {"stream": (4096, 512), "update": (4096, 512)} | PLAIN,
        {"bias": None, "eps": 1e-6, "kind": "rms", "scale": 1.0},
    ),
    "gate": Case("rows", {"y": (4096, 512), "g": (4096, 512)}, {"activation": "sigmoid", "combine": "multiply"}),
    "glu": Case("rows", {"a": (4096, 512), "b": (4096, 512)}, {"activation": "silu"}),
    "token_shift": Case("rows", {"x": (4, 1024, 512), "mix": (512,)}, {"starts": None}),
    "short_conv": Case("rows", {"x": (4, 1024, 512), "weight": (512, 4)}, {"activation": "silu"}),
}


def passes(name: str, case: Case, programs: int = 8) -> tuple[list[Launch], list[Launch], dict[str, Any]]:
    """The launches of a forward and of a backward pass in bfloat16, and the tensors of the case."""
    op = OPS[name]
    call = next(each for each in op.implementations.values() if each.family == "triton").load()
    tensors = bench.inputs(op, case, Device("cpu"), torch.bfloat16)
    with counted(programs) as forward:
        found = [x for x in bench.outputs(call, tensors, case.fixed()) if x.requires_grad]
    with counted(programs) as backward:
        torch.autograd.grad(found, [*tensors.values()], [torch.ones_like(x) for x in found], allow_unused=True)
    return forward, backward, tensors


def total(launches: list[Launch], name: str) -> float:
    return float(sum(getattr(each, name) for each in launches))


def products(launches: list[Launch]) -> float:
    return sum(sum(each.products.values()) for each in launches)


def test_a_norm_reads_its_rows_once_and_writes_them_once() -> None:
    forward, backward, _ = passes("rms_norm", ROW_WISE["rms_norm"])
    assert [(each.name, each.programs) for each in forward] == [("_forward", 1024)]
    rows, columns = 2 * 4096 * 512, 2 * 512
    assert forward[0].read_bytes == rows + 1024 * columns  # each program reads the weight, which is in the cache then
    assert forward[0].touched_bytes == 2 * rows + columns + 4 * 4096  # and keeps a number of each row in float32
    assert forward[0].products == {} and forward[0].functions == 0 and forward[0].elements >= 3 * 4096 * 512
    assert len(backward) == 1 and len(backward[0].read) == 4


@pytest.mark.parametrize("name", ROW_WISE)
def test_what_acts_on_rows_moves_little_more_than_the_least(name: str) -> None:
    case = ROW_WISE[name]
    forward, backward, tensors = passes(name, case)
    assert total(forward, "touched_bytes") <= 1.05 * OPS[name].bytes(**tensors, **case.fixed())
    given = sum(x.nbytes for x in bench.outputs(OPS[name].reference, tensors, case.fixed()))
    passes_of_input = 3.5 if name == "short_conv" else 2  # of whose weight a kernel of its own makes the gradient
    assert total(backward, "touched_bytes") <= 1.25 * (passes_of_input * total_bytes(tensors) + given)


def total_bytes(tensors: dict[str, Any]) -> int:
    return sum(x.nbytes for x in tensors.values())


@pytest.mark.parametrize("bias", [{"decay": (1, 1, 256)}, {"relative": (1, 511)}, {"sinks": (1,)}])
def test_a_bias_of_attention_costs_no_products_and_next_to_no_memory(bias: dict[str, tuple[int, ...]]) -> None:
    plain, biased = (passes("attention", Case("a", HEADS | more, {})) for more in ({}, bias))
    for without, with_it in zip(plain[:2], biased[:2], strict=True):
        assert products(with_it) <= 1.1 * products(without)
    assert total(biased[0], "touched_bytes") <= 1.1 * total(plain[0], "touched_bytes")


def test_a_mask_leaves_half_of_the_products_out_and_a_window_more() -> None:
    from archlab.kernels.attention import Pattern

    full, causal, window = (
        products(passes("attention", Case("a", HEADS, {"pattern": pattern}))[0])
        for pattern in (Pattern("full"), Pattern(), Pattern(window=32))
    )
    assert full == 4 * 256 * 256 * 16
    assert 0.5 * full < causal < 0.8 * full and window < 0.7 * causal  # tiles on the diagonal are whole


def test_some_programs_stand_for_all() -> None:
    case = Case("a", dict.fromkeys("qkv", (1, 4, 256, 16)), {})
    for some, every in zip(passes("attention", case)[:2], passes("attention", case, 10**6)[:2], strict=True):
        assert [each.programs for each in some] == [each.programs for each in every]
        assert products(some) == pytest.approx(products(every)) and some[0].programs > 8
        assert total(some, "read_bytes") == pytest.approx(total(every, "read_bytes"), rel=0.01)


def test_kernels_are_counted_in_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 is not set"), counted():
        pass
