"""Native sparse attention against the paper's equations, a query at a time, and in decoding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import BuildContext, Call
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.primitives.native_sparse import NativeSparse
from tests.arch_dsl.conformance import Case, load, randomize
from tests.arch_dsl.specs import assert_decodes, assert_keeps, assert_plain_agrees

D, T, HEADS = 12, 14, 4
NSA: dict[str, Any] = {"block": 4, "stride": 2, "selected_block": 2, "top": 4, "window": 3}
FORMS: dict[str, dict[str, Any]] = {
    "all": {**NSA, "kv_heads": 2},
    "far blocks": {**NSA, "kv_heads": 1, "selected_block": 4, "top": 3, "block": 2, "stride": 1},
    "no window": {**NSA, "window": None, "width": 7},
    "no selection": {"block": 4, "stride": 4, "top": None, "window": 5, "kv_heads": 2},
    "no gates": {**NSA, "mix": "sum", "head_dim": 5},
}


def branch(fields: dict[str, Any]) -> Any:
    """A branch in float64 with random parameters."""
    facts: dict[str, Any] = {"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": 20, "std": 0.1}
    ctx = BuildContext(**facts, residual_std=0.1, width=D, hidden=D, path="block.0.attention", backend="reference")
    module = parse(Branch, {"type": "native_sparse", "heads": HEADS, **fields}).build(ctx).double()
    randomize(module, std=0.5)
    return module


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def compressed(mlp: Any, vectors: Tensor, start: int) -> Tensor:
    """phi of the block of vectors `[T, D]` that begins at `start` (eq. 7)."""
    block = torch.cat([vectors[start + m] + place for m, place in enumerate(mlp.places)])
    return mlp.output_projection.weight @ (mlp.input_projection.weight @ block).relu()


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What a query `[D]` reads, and by which probabilities; nothing of nothing."""
    if not keys:
        return torch.zeros_like(q), q.new_zeros(0)
    p = (torch.stack(keys) @ q / math.sqrt(len(q))).softmax(0)
    return p @ torch.stack(values), p


def chosen(p: Tensor, t: int, block: int, stride: int, size: int, top: int) -> list[int]:
    """The stretches that query t reads, by eq. 9 with indices from 1, of p summed over heads (eq. 10)."""
    here = t // size
    scores = {}
    for j in range(1, here + 2):
        scores[j - 1] = 0.0
        for m, n in itertools.product(range(size // stride), range(block // stride)):
            at = size // stride * j - m - n
            if 1 <= at <= len(p):
                scores[j - 1] += p[at - 1].item()
    fixed = {0, max(here - 1, 0), here}
    others = sorted(set(scores) - fixed, key=lambda j: (-scores[j], j))
    return sorted(fixed) + others[: top - len(fixed)] if here >= 2 else sorted(scores)


def by_hand(module: Any, x: Tensor, block: int, stride: int, size: int, top: int | None, window: int | None) -> Tensor:
    """arXiv:2502.11089, eq. 5 to 11: x plus the update."""
    head_dim, group = module.head_dim, HEADS // module.kv_heads
    names = module.branches
    out = torch.zeros(2, T, HEADS, head_dim, dtype=x.dtype)
    q = module.query_projection(x).unflatten(-1, (-1, head_dim))
    k = {name: module.keys[name](x).unflatten(-1, (-1, head_dim)) for name in names}
    v = {name: module.values[name](x).unflatten(-1, (-1, head_dim)) for name in names}
    for row, kv, t in itertools.product(range(2), range(module.kv_heads), range(T)):
        starts = range(0, t + 1 - block + 1, stride)
        ks = [compressed(module.compress_keys, k["compressed"][row, :, kv], start) for start in starts]
        vs = [compressed(module.compress_values, v["compressed"][row, :, kv], start) for start in starts]
        heads = range(kv * group, kv * group + group)
        found = {head: attend(q[row, t, head], ks, vs) for head in heads}
        read: dict[str, list[int]] = {}
        if top is not None:
            total = torch.stack([p for _, p in found.values()]).sum(0).detach()
            stretches = chosen(total, t, block, stride, size, top)
            read["selected"] = [s for j in stretches for s in range(j * size, j * size + size) if s <= t]
        if window is not None:
            read["window"] = list(range(max(t - window + 1, 0), t + 1))
        for head in heads:
            outputs = [found[head][0]]
            for name, at in read.items():
                outputs.append(attend(q[row, t, head], [*k[name][row, at, kv]], [*v[name][row, at, kv]])[0])
            for number, output in enumerate(outputs):
                gate = torch.ones((), dtype=x.dtype)
                if module.gate_projection is not None:
                    gate = (module.gate_projection.weight[number * HEADS + head] @ x[row, t]).sigmoid()
                out[row, t, head] = out[row, t, head] + gate * output
    return x + module.output_projection(out.flatten(2))


@pytest.mark.parametrize("name", FORMS)
def test_follows_the_equations_and_their_gradients(x: Tensor, name: str):
    fields = {"block": 4, "stride": 2, "selected_block": 64, **FORMS[name]}
    module = branch(FORMS[name])
    given, again = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours = module(given, Call())
    sizes = (fields[key] for key in ("block", "stride", "selected_block", "top", "window"))
    expected = by_hand(module, again, *sizes)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)
    parameters = list(module.parameters())
    mine = torch.autograd.grad(ours.square().sum(), [given, *parameters])
    theirs = torch.autograd.grad(expected.square().sum(), [again, *parameters])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_a_row_that_is_filled_up_at_its_end_reads_as_if_alone(x: Tensor):
    module = branch(FORMS["all"])
    padding = torch.arange(T) >= torch.tensor([[T], [9]])
    found = module(x, Call(padding=padding))
    torch.testing.assert_close(found[0], module(x[:1], Call())[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found[1, :9], module(x[1:, :9], Call())[0], atol=1e-12, rtol=1e-12)


def case(name: str) -> Case:
    attention = {"type": "native_sparse", "heads": HEADS, "pre": ["rmsnorm"], **FORMS[name]}
    model = {"d_model": 16, "n_layers": 2, "vocab": 19, "max_positions": 12, "block": {"attention": attention}}
    return Case(name, load(model), (), plain=False)


@pytest.mark.parametrize("name", FORMS)
def test_decoding_reads_in_pieces_as_at_once_and_holds_what_its_cost_says(name: str):
    assert_decodes(case(name))


@pytest.mark.parametrize("name", FORMS)
def test_activations_are_what_autograd_keeps(name: str):
    assert_keeps(case(name).model, rel=0.04)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "all" else [pytest.mark.slow]) for name in FORMS]
)
def test_is_written_as_plain_pytorch(name: str):
    assert_plain_agrees(case(name).model)


@pytest.mark.parametrize("name", FORMS)
def test_counts_the_pairs_that_are_read(name: str):
    spec = NativeSparse(heads=HEADS, **FORMS[name])
    read = {"compressed": 0, "selected": 0, "window": 0}
    for t in range(T):
        read["compressed"] += len(range(0, t + 2 - spec.block, spec.stride))
        if spec.top is not None:
            stretches = chosen(torch.zeros(0), t, spec.block, spec.stride, spec.selected_block, spec.top)
            read["selected"] += sum(
                s <= t for j in stretches for s in range(j * spec.selected_block, (j + 1) * spec.selected_block)
            )
        read["window"] += len(range(max(t + 1 - (spec.window or 0), 0), t + 1)) if spec.window else 0
    assert spec.pairs(T) == {part: read[part] for part in spec.branches}


def test_decoding_holds_compressed_blocks_and_the_tokens_of_the_next():
    held = [arch_dsl.cost(case("all").model, tokens).cache for tokens in (3, 4, 12)]
    a_key = 2 * 2 * 2 * 4  # keys and values of two heads of four channels in two layers
    assert held == [a_key * count for count in (3 + 3 + 3, 1 + 2 + 4 + 3, 5 + 2 + 12 + 3)]


def test_a_module_has_no_branch_that_was_left_out(x: Tensor):
    modules: list[nn.Module] = [branch(FORMS[name]) for name in ("no window", "no selection")]
    assert not any(".window." in f".{path}" for path, _ in modules[0].named_parameters())
    assert not any(".selected." in f".{path}" for path, _ in modules[1].named_parameters())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "groups": ({"kv_heads": 3}, "kv_heads: 3 key/value heads do not divide 4 query heads"),
    "heads": ({"heads": 3}, "heads: 3 heads do not divide d_model 16; give head_dim or other heads"),
    "stride": ({"stride": 3}, "stride: must divide block 4, found 3"),
    "nothing near": ({"top": None, "window": None, "selected_block": 64}, "top: without it and window"),
    "size of nothing": ({"top": None}, "selected_block: is the size of what top selects, and there is no top"),
    "size between": ({"selected_block": 3}, "selected_block: must be a multiple of stride 2, found 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_makes_no_sense(name: str):
    fields, message = REFUSED[name]
    attention = {"type": "native_sparse", "heads": 4, **NSA, **fields}
    with pytest.raises(SpecError, match=message):
        load({"d_model": 16, "n_layers": 2, "vocab": 19, "max_positions": 12, "block": {"attention": attention}})
