"""What the Triton kernels of attention promise beyond the cases of the op: many tiles, pruning, whole models."""

from typing import Any

import pytest
import torch
from calls import DEVICES
from torch import Tensor

from archlab.kernels import OPS, Case, Device, bench, launch
from archlab.kernels.attention import CAUSAL, FULL, Blocks, Pattern, listed, torch_ops
from archlab.kernels.attention.pruning import reach

ATTENTION = OPS["attention"]
DEVICE = torch.device(DEVICES[-1].kind)
pytestmark = pytest.mark.skipif(launch.missing() is not None, reason="Triton is not installed")


def inputs(length: int, heads: int = 2, width: int = 16, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    every = {"q": (1, heads, length, width), "k": (1, 1, length, width), "v": (1, 1, length, width), **shapes}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in every.items()}
    if "decay" in drawn:
        drawn["decay"] = (drawn["decay"].sigmoid() * 0.9).log().cumsum(-1)
    return {name: x.to(DEVICE).requires_grad_() for name, x in drawn.items()}


def outcome(function: Any, tensors: dict[str, Tensor], **given: Any) -> list[Tensor]:
    out = function(**tensors, **given)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), list(tensors.values()))]


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for position, (a, b) in enumerate(zip(got, want, strict=True)):
        error = float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())
        assert error <= tolerance, f"result {position}: {error:.1e}"


DOCUMENTS = torch.tensor([[0] * 41 + [1] * 30 + [2] * 29])
LONG = [
    pytest.param(
        {"relative": (2, 199)}, {"pattern": Pattern("full", blocks=Blocks(8, random=1))}, id="blocks_relative"
    ),
    pytest.param(
        {"relative": (1, 199), "decay": (1, 2, 100), "sinks": (2,)}, {"pattern": Pattern(window=37)}, id="window"
    ),
    pytest.param({"decay": (1, 2, 100)}, {"pattern": CAUSAL, "documents": DOCUMENTS}, id="documents"),
    pytest.param({"relative": (2, 199)}, {"pattern": FULL, "documents": DOCUMENTS}, id="full_documents"),
    pytest.param({"relative": (2, 199)}, {"pattern": Pattern(window=9), "prefix": torch.tensor([50])}, id="prefix"),
    pytest.param({"bias": (2, 100, 100)}, {"pattern": Pattern("full", window=20), "softcap": 2.0}, id="around"),
    pytest.param({"q": (1, 2, 40, 16), "relative": (2, 199), "decay": (1, 2, 100)}, {"pattern": CAUSAL}, id="cached"),
]


@pytest.mark.parametrize(
    ("shapes", "given"),
    [LONG[0], LONG[1], *(pytest.param(*p.values, id=p.id, marks=pytest.mark.slow) for p in LONG[2:])],
)
def test_many_tiles_agree_with_float64(shapes: dict[str, tuple[int, ...]], given: dict[str, Any]) -> None:
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in given.items()}
    tensors = inputs(100, **shapes)
    wide = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    triton = ATTENTION.implementations["triton"].load()
    assert_close(outcome(triton, tensors, **given), outcome(ATTENTION.reference, wide, **given), 1e-5)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("lost", [0.5, 1e-2, 4.5e-5])
def test_keys_beyond_reach_have_together_less_weight_than_may_be_lost(lost: float, window: int | None) -> None:
    x = {name: value.detach().double() for name, value in inputs(96, decay=(1, 2, 96)).items()}
    q, k, decay = x["q"], x["k"].expand(-1, 2, -1, -1), x["decay"]
    open_ = decay[..., None, :] <= reach(q, x["k"], decay, 0.1, lost, window)[..., None]
    logits = 0.1 * q @ k.transpose(-1, -2) + decay[..., :, None] - decay[..., None, :]
    seen = Pattern(window=window).dense(96, 96, DEVICE)
    assert seen is not None
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    closed = (weights * ~open_).sum(-1)
    assert open_.diagonal(dim1=-2, dim2=-1).all(), "every query reads its own key"
    assert (~open_ & seen).any(-1)[..., -1].all(), "the last queries have forgotten some keys"
    assert 0 < closed.max() < lost


@pytest.mark.parametrize("window", [None, 5, 50])
def test_reach_depends_on_no_later_token_and_is_that_of_reading_one_by_one(window: int | None) -> None:
    x = {name: value.detach().double() for name, value in inputs(12, decay=(1, 2, 12)).items()}
    q, k, decay = x["q"], x["k"], x["decay"]
    whole = reach(q, k, decay, 0.25, 1e-3, window)
    for t in range(1, 13):
        held = max(t - (window or t), 0)
        one = reach(q[:, :, t - 1 : t], k[:, :, held:t], decay[:, :, held:t], 0.25, 1e-3, window)
        torch.testing.assert_close(one, whole[:, :, t - 1 : t])


@pytest.mark.parametrize("more", [{}, {"documents": torch.tensor([[0] * 41 + [1] * 55])}], ids=["causal", "documents"])
def test_tiles_beyond_reach_are_not_visited(more: dict[str, Tensor]) -> None:
    from archlab.kernels.attention.inputs import Inputs
    from archlab.kernels.attention.plan import Plan

    more = {name: x.to(DEVICE) for name, x in more.items()}
    tensors = inputs(96, heads=1, decay=(1, 1, 96))
    q, k, v, decay = tensors.values()
    near = reach(q, k, decay, 0.1, 1e-6)
    plan = Plan(Inputs(q, k, v, decay=decay, reach=near, **more, scale=0.1))
    by_query, by_key = (plan.task({"QUERIES": 32, "KEYS": 32}, by_key=kind).visits.bounds for kind in (False, True))
    assert (by_query[0, :, -1, 0] > 0).all(), "the last queries start after keys that are forgotten"
    assert (by_key[0, :, 0, 1] < 96).all(), "the first keys end before queries that forgot them"
    wide = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    pruned = outcome(ATTENTION.implementations["triton"].load(), tensors, scale=0.1, reach=near, **more)
    assert_close(pruned, outcome(ATTENTION.reference, wide, scale=0.1, reach=near, **more), 1e-5)
    assert_close(pruned, outcome(ATTENTION.reference, wide, scale=0.1, **more), 1e-5)


def test_more_sequences_and_heads_than_an_axis_has_are_launched_on_the_first() -> None:
    from archlab.kernels.attention.inputs import Inputs
    from archlab.kernels.attention.plan import Plan, delta_launch, forward_launch, keys_launch, queries_launch

    x = torch.empty(1, 1, 1, 16, device=DEVICE).expand(17_000, 4, 300, 16)
    lse = torch.empty(1, 1, 1, device=DEVICE).expand(17_000, 4, 300)
    plan = Plan(Inputs(x, x, x, scale=0.1))
    launches = (
        (forward_launch(plan, x, lse), "QUERIES"),
        (delta_launch(plan, x, x, lse, None, None), "ROWS"),
        (keys_launch(plan, x, lse, lse, x, x, None), "KEYS"),
        (queries_launch(plan, x, lse, lse, x, None, False)[0], "QUERIES"),
    )
    for launched, own in launches:
        assert launched.programs == 68_000 * -(-300 // launched.meta[own]), "beyond 65,535, the end of other axes"


RULES = {
    "decay_gate": {"decay": (1, 2, 20), "gate": (1, 2, 20, 16)},
    "relative_bias_sinks_headgate": {"relative": (2, 39), "bias": (2, 20, 20), "sinks": (2,), "gate": (1, 2, 20, 1)},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "permuted"), [("decay_gate", True), ("relative_bias_sinks_headgate", False)])
def test_operators_keep_the_rules_of_torch_library(name: str, permuted: bool) -> None:
    from archlab.kernels.attention import triton
    from archlab.kernels.attention.inputs import Inputs, handed

    def turned(x: Tensor) -> Tensor:
        return x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()

    tensors = {key: turned(x) if permuted else x for key, x in inputs(20, **RULES[name]).items()}
    documents = torch.tensor([[0] * 9 + [1] * 11], device=DEVICE)
    given = handed(Inputs(**tensors, documents=documents, pattern=Pattern(window=15), scale=0.25, softcap=5.0))
    torch.library.opcheck(triton._attention.op, given)
    out, lse = triton._attention(*given)
    saved = [x.detach() if isinstance(x, Tensor) else x for x in (torch.randn_like(out), out, lse, True, True, *given)]
    torch.library.opcheck(triton._attention_backward.op, tuple(saved))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reach": (1, 2, 8)}, "bounds a decay of a causal pattern"),
        ({"reach": (1, 2, 7), "decay": (1, 2, 8)}, "2 heads and 8 positions"),
        ({"gate": (1, 2, 8, 3)}, r"gate must be \[1, 2, 8, 16\], or 1 wide"),
        ({"relative": (2, 14)}, "15 distances; received 14"),
        ({"relative": (3, 15)}, r"\[1 or 2 heads, 15\]"),
        ({"decay": (1, 2, 7)}, "2 heads and 8 positions"),
        ({"decay": (2, 2, 8)}, r"\[1 or 1, 2, 8\]"),
    ],
)
@pytest.mark.parametrize("implementation", ["reference", "torch", "torch_plain", "triton"])
def test_pieces_of_another_shape_are_refused(implementation: str, given: dict[str, Any], message: str) -> None:
    shapes = {name: value for name, value in given.items() if isinstance(value, tuple)}
    rest = {name: value for name, value in given.items() if name not in shapes}
    op = ATTENTION.implementations
    function = ATTENTION.reference if implementation == "reference" else op[implementation].load()
    with pytest.raises(ValueError, match=message):
        function(**inputs(8, **shapes), **rest)


@pytest.mark.parametrize("implementation", ["torch_rows", "triton"])
def test_first_keys_are_refused_where_keys_are_read_side_by_side(implementation: str) -> None:
    function = ATTENTION.implementations[implementation].load()
    with pytest.raises(ValueError, match=r"without first .*received Pattern\(.*first=2"):
        function(**inputs(8), pattern=Pattern(window=3, first=2))


MODEL = {
    "d_model": 32, "n_layers": 2, "vocab": 17,
    "block": {
        "attention": {
            "pre": ["rmsnorm"], "heads": 2, "kv_heads": 1, "scores": ["forget_gate", "sinks"], "sdpa": ["gate"]
        },
        "ffn": {"type": "glu", "pre": ["rmsnorm"], "width": 32},
    },
    "overrides": {
        "1": {
            "block.attention.scores": [{"type": "t5_buckets", "buckets": 8, "max_distance": 20}, "sinks"],
            "block.attention.mask": {"type": "window", "size": 20},
        }
    },
    "final": ["rmsnorm"],
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name)
        for c in OPS["attention"].cases
        if c.arguments["pattern"].order == "causal" and not c.arguments["pattern"].first
    ],
)
def test_some_queries_at_a_time_are_all_at_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients in float64, of stretches of 3 queries."""
    if {"prefix", "documents"} & case.integers.keys():
        pytest.skip("reads ahead, or documents apart")
    monkeypatch.setattr(torch_ops, "LEAST_ROWS", 3)
    monkeypatch.setattr(torch_ops, "MOST_ROWS", 3)
    op, cpu = OPS["attention"], Device("cpu")
    tensors = {
        name: x.detach().double().requires_grad_() for name, x in bench.inputs(op, case, cpu, torch.float32).items()
    }
    got = bench.with_gradients(torch_ops.by_rows, tensors, case.fixed())
    for a, b in zip(got, bench.with_gradients(op.reference, tensors, case.fixed()), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("more", [0, 3], ids=["as_many_keys", "more_keys"])
def test_sdpa_is_compiled_for_lengths_that_are_symbols(more: int) -> None:
    """One graph for all lengths, forward and backward: what is causal is decided by how lengths compare."""
    compiled = torch.compile(torch_ops.sdpa, backend="aot_eager", fullgraph=True)
    for length in (8, 12, 21):
        tensors = inputs(length, k=(1, 1, length + more, 16), v=(1, 1, length + more, 16))
        for x in tensors.values():
            torch._dynamo.mark_dynamic(x, 2)
        with torch._dynamo.config.patch(error_on_recompile=length > 8):
            got = outcome(compiled, tensors, pattern=CAUSAL)
        assert_close(got, outcome(ATTENTION.reference, tensors, pattern=CAUSAL), 1e-6)


@pytest.mark.parametrize(
    ("blocks", "length", "padded"),
    [
        pytest.param(Blocks(4, heads=4), 64, False, id="lists"),
        pytest.param(Blocks(2, window=1, globals=1, random=1, heads=4), 24, False, id="one_global_block"),
        pytest.param(Blocks(2, globals=0, random=2, heads=4), 24, False, id="no_global_block"),
        pytest.param(Blocks(4, heads=4), 63, False, id="ragged"),
        pytest.param(Blocks(4, heads=4), 64, True, id="padding"),
    ],
)
def test_blocks_by_their_lists_are_the_formula(blocks: Blocks, length: int, padded: bool) -> None:
    """Outputs and gradients in float64, with a key head for two query heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, length, 8), "k": (2, 2, length, 8), "v": (2, 2, length, 6), "gate": (2, 4, length, 6)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    tensors = {name: x.requires_grad_() for name, x in drawn.items()}
    padding = (torch.arange(length) >= length - 5).expand(2, -1)
    fixed = {"pattern": Pattern("full", blocks=blocks), "padding": padding if padded else None}
    got = bench.with_gradients(listed.by_blocks, tensors, fixed)
    for a, b in zip(got, bench.with_gradients(OPS["attention"].reference, tensors, fixed), strict=True):
        torch.testing.assert_close(a, b)


def test_stretches_hold_every_pair_of_a_window_and_little_else() -> None:
    for pattern, queries, keys in ((CAUSAL, 700, 700), (Pattern(window=200), 700, 700), (Pattern(window=9), 300, 450)):
        seen = pattern.dense(queries, keys, torch.device("cpu"))
        assert seen is not None
        held = torch.zeros_like(seen)
        for part in torch_ops.stretches(queries, keys, pattern):
            held[part.start : part.stop, part.first : part.last] = True
        assert bool((held | ~seen).all())
        assert int(held.sum()) <= int(seen.sum()) + queries * torch_ops.MOST_ROWS


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="compares the interpreter with the CPU")
def test_models_train_alike_on_triton_and_torch() -> None:
    from archlab import arch_dsl

    after, curves = [], []
    for backend in ("torch", "triton"):
        module = arch_dsl.compile(arch_dsl.load(MODEL), backend=backend, seed=1)
        start = {name: x.detach().clone() for name, x in module.named_parameters()}
        optimizer, generator, losses = torch.optim.SGD(module.parameters(), lr=0.5), torch.Generator(), []
        generator.manual_seed(0)
        for _ in range(3):
            tokens = torch.randint(17, (2, 41), generator=generator)
            loss = module.loss(tokens[:, :-1], tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        curves.append(losses)
        after.append({name: x.detach() - start[name] for name, x in module.named_parameters()})
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)
    for name, moved in after[0].items():
        assert moved.norm() > 0, name
        assert (after[1][name] - moved).norm() <= 1e-3 * moved.norm(), name


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="compares the interpreter with the CPU")
def test_models_prune_alike_on_triton_and_torch() -> None:
    from archlab import arch_dsl

    found = {}
    for backend, prune in (("torch", None), ("torch", 0.5), ("triton", 0.5)):
        scores = [{"type": "forget_gate", "prune": prune}]
        spec = arch_dsl.patch(arch_dsl.load({**MODEL, "overrides": {}}), {"block.attention.scores": scores})
        module = arch_dsl.compile(spec, backend=backend, seed=1)
        found[backend, prune] = module(torch.arange(40)[None] % 17).detach()
    torch.testing.assert_close(found["triton", 0.5], found["torch", 0.5], atol=1e-5, rtol=1e-5)
    assert (found["torch", None] - found["torch", 0.5]).abs().max() > 1e-3
