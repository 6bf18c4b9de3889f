"""Cross-attention against loops over positions of both sequences; what it holds, and what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import Call, SpecError
from archlab.arch_dsl.parts.context import State
from tests.arch_dsl import formulas
from tests.arch_dsl.conformance import TOKENS, build, load

SOURCE = torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(1))
PADDING = torch.arange(9) >= torch.tensor([[9], [5]])
FFN = {"type": "mlp", "width": 24}


def model(**cross: Any) -> arch_dsl.Model:
    """An encoder of one layer, and a decoder that has cross-attention alone."""
    return load(
        {
            "d_model": 16,
            "vocab": 19,
            "max_positions": 12,
            "encoder": {"n_layers": 1, "block": {"attention": {"heads": 2, "mask": "full"}, "ffn": FFN}},
            "decoder": {"n_layers": 1, "block": {"cross_attention": {"heads": 4, "kv_heads": 2, **cross}}},
        }
    )


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_source_of_padding_alone_spoils_nothing(backend: str):
    module, padding = build(model(), backend=backend), PADDING.clone()
    padding[1] = True
    logits = module(TOKENS, Call(source_tokens=SOURCE, source_padding=padding))
    torch.testing.assert_close(logits[0], module(TOKENS[:1], Call(source_tokens=SOURCE[:1]))[0])
    logits[0].sum().backward()
    assert logits.isfinite().all()
    assert all(value.grad is None or value.grad.isfinite().all() for value in module.parameters())


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rope"])
def test_every_query_reads_the_whole_source_but_its_padding(rotated: bool):
    sites = {"query": ["rope"], "key": ["rope"]} if rotated else {}
    module = build(model(bias=True, **sites))
    branch, x = module.decoder.block[0].cross_attention, torch.randn(2, 4, 16, dtype=torch.float64)
    source = torch.randn(2, 9, 16, dtype=torch.float64)
    positions = torch.tensor([9, 10, 11, 12])  # as they go on after a source
    got = branch(x, Call(positions, source=source, source_padding=PADDING))

    def heads(name: str, read: torch.Tensor) -> torch.Tensor:
        return getattr(branch, f"{name}_projection")(read).unflatten(-1, (-1, 4))

    q, k, v = heads("query", x), heads("key", source), heads("value", source)
    if rotated:  # formulas.rope counts from 0: queries stand behind nine others
        q = formulas.rope(torch.cat([torch.zeros(2, 9, 4, 4, dtype=torch.float64), q], 1), 10_000.0, 4)[:, 9:]
        k = formulas.rope(k, 10_000.0, 4)
    out = torch.zeros(2, 4, 4, 4, dtype=torch.float64)
    for b, i, h in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(4)).tolist():
        seen = [j for j in range(9) if not PADDING[b, j]]
        logits = torch.stack([(q[b, i, h] * k[b, j, h // 2]).sum() / 2 for j in seen])
        out[b, i, h] = (logits.softmax(0)[:, None] * v[b, seen, h // 2]).sum(0)
    torch.testing.assert_close(got, x + branch.output_projection(out.flatten(-2)), atol=1e-6, rtol=1e-6)


def test_decoding_computes_keys_and_values_once():
    module, state = build(model(key=["rmsnorm"], value=["gate"])), State()
    whole = module(TOKENS, Call(source_tokens=SOURCE, source_padding=PADDING))
    seen: list[int] = []
    module.decoder.block[0].cross_attention.key_projection.register_forward_hook(lambda *_: seen.append(1))
    call = Call(source_tokens=SOURCE, source_padding=PADDING, state=state)
    parts = [module(piece, call) for piece in TOKENS.split([3, 1, 1, 7], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-10, rtol=1e-10)
    assert seen == [1]
    held = state.layers["decoder.block.0"]
    assert [tuple(value.shape) for value in held.values()] == [(2, 9, 2, 4), (2, 9, 2, 4)]


def test_its_cost_counts_the_source():
    spec = model()
    attend, more = (arch_dsl.cost(spec, 6, source) for source in (9, 18))
    maps = 2 * 2 * 16 * 8  # keys and values of one more token of the source
    encoder = arch_dsl.cost(spec, 6, 18).children["encoder"].flops_matmul - attend.children["encoder"].flops_matmul
    assert more.flops_matmul - attend.flops_matmul - encoder == 9 * (maps + 4 * 16 * 6)
    assert more.cache - attend.cache == 9 * 2 * 8
    carried = model(key=["short_conv"], value=["token_shift"])  # which have nothing to hold of what is read once
    assert arch_dsl.cost(carried, 6, 9).cache == 9 * 2 * 8


REFUSED = {
    "a positional score": ({"scores": ["alibi"]}, "scores.0: alibi sees positions within one sequence"),
    "heads": ({"kv_heads": 3}, "cross_attention.kv_heads: 3 key/value heads do not divide 4 query heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(name: str):
    fields, message = REFUSED[name]
    with pytest.raises(SpecError) as error:
        model(**fields)
    assert message in str(error.value)


def test_it_stands_beside_an_encoder_alone():
    with pytest.raises(SpecError, match=r"block\.cross_attention: reads the source of an encoder, and here is none"):
        load({"d_model": 16, "n_layers": 1, "vocab": 19, "block": {"cross_attention": {"heads": 4}}})


@pytest.mark.slow
def test_is_captured_as_one_graph():
    torch._dynamo.reset()
    module = arch_dsl.compile(model(query=["rope"], key=["rope"], scores=["sinks"]))
    call = Call(source_tokens=SOURCE, source_padding=PADDING)
    captured = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(captured(TOKENS, call), module(TOKENS, call), atol=1e-5, rtol=1e-5)
