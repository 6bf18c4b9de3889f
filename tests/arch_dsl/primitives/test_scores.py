"""Score modifiers against transformers' models, and against formulas written out in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention
from transformers.models.t5.modeling_t5 import T5Attention

from archlab.arch_dsl import Call
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Branch, Score
from archlab.arch_dsl.primitives.scores import t5_bucket
from tests.arch_dsl import formulas
from tests.arch_dsl.conformance import TOKENS, build, load, randomize

D, T, HEADS, WIDTH = 12, 7, 4, 6


def made(data: Any, **place: Any) -> nn.Module:
    """A score modifier's module in float64 with random parameters."""
    module = parse(Score, data).build(context(**place)).double()
    randomize(module)
    return module


def context(**place: Any) -> BuildContext:
    facts: dict[str, Any] = {"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": None, "std": 0.1}
    facts |= {"residual_std": 0.1, "width": WIDTH, "hidden": D, "heads": HEADS, "logit_scale": 0.3} | place
    return BuildContext(**facts, backend="reference")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def q() -> Tensor:
    return drawn(1, 2, T, HEADS, WIDTH)


@pytest.fixture
def k() -> Tensor:
    return drawn(2, 2, T, 2, WIDTH)


def past(bias: Tensor) -> Tensor:
    """What causal attention can see of a bias, `[batch, heads, time, time]`."""
    return bias.expand(2, HEADS, T, T).tril()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 64), (8, 10), (7, 50), (2, 3)])
def test_buckets_are_those_of_t5(buckets, max_distance):
    distance = torch.arange(-5, 3000)
    theirs = T5Attention._relative_position_bucket(-distance, False, buckets, max_distance)
    assert torch.equal(t5_bucket(distance, buckets, max_distance), theirs)


def test_t5_adds_a_row_of_its_table_per_distance(q, k):
    module = made({"type": "t5_buckets", "buckets": 6, "max_distance": 5})
    expected = torch.zeros(HEADS, T, T, dtype=torch.float64)
    for i, j in itertools.product(range(T), range(T)):
        bucket = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}.get(i - j, 5 if i - j > 4 else 0)
        expected[:, i, j] = module.table[bucket]
    assert_close(past(module(q, k, Call())), past(expected))
    far = module(q, k, Call(3 * torch.arange(T)))
    assert_close(far[:, 2, 1], module.table[3])


@pytest.mark.parametrize("share", ["none", "stack"])
def test_t5s_table_is_one_for_all_layers_if_shared(share):
    scores = [{"type": "t5_buckets", "share": share}]
    module = build(load({"d_model": 16, "n_layers": 3, "block": {"attention": {"heads": 4, "scores": scores}}}))
    tables = [value for name, value in module.named_parameters() if name.endswith("t5_buckets.table")]
    assert [tuple(table.shape) for table in tables] == [(32, 4)] * (1 if share == "stack" else 3)
    assert module(TOKENS).isfinite().all()


@pytest.mark.parametrize("biases", [True, False], ids=["u-v", "plain"])
def test_transformer_xl_follows_the_formula(q, k, biases):
    module = made({"type": "transformer_xl", "biases": biases})
    w = module.positions.weight.view(HEADS, WIDTH, D)
    u, v = (module.content_bias, module.position_bias) if biases else torch.zeros(2, HEADS, WIDTH).double()
    for start in (0, 11):
        bias = module(q, k, Call(torch.arange(start, start + T)))
        for h, i in itertools.product(range(HEADS), range(T)):
            for j in range(i + 1):
                waves = [(i - j) * 10_000.0 ** (-2 * c / D) for c in range(D // 2)]
                r = torch.tensor([math.sin(a) for a in waves] + [math.cos(a) for a in waves], dtype=torch.float64)
                expected = (q[:, i, h] + v[h]) @ (w[h] @ r) + k[:, j, h // 2] @ u[h]
                assert_close(bias[:, h, i, j], 0.3 * expected, 1e-6)


def test_transformer_xl_adds_up_to_the_published_logits(q, k):
    """(q + u) k + (q + v) W r, scaled as a whole: what Transformer-XL's own code computes with its relative shift."""
    module = made("transformer_xl")
    waves = torch.arange(T - 1, -1, -1.0)[:, None] * 10_000.0 ** (-torch.arange(0, D, 2.0) / D)
    r = module.positions(torch.cat([waves.sin(), waves.cos()], -1).double()).view(T, HEADS, WIDTH)
    keys = k.repeat_interleave(2, 2)
    ac = torch.einsum("ibnd,jbnd->ijbn", (q + module.content_bias).transpose(0, 1), keys.transpose(0, 1))
    bd = torch.einsum("ibnd,jnd->ijbn", (q + module.position_bias).transpose(0, 1), r)
    padded = torch.cat([torch.zeros(T, 1, 2, HEADS).double(), bd], 1).view(T + 1, T, 2, HEADS)
    theirs = (ac + padded[1:].view_as(bd)) * 0.3
    ours = 0.3 * torch.einsum("bihd,bjhd->bhij", q, keys) + module(q, k, Call())
    assert_close(past(ours), past(theirs.permute(2, 3, 0, 1)), 1e-6)


def fox(gates: Tensor) -> Tensor:
    """D_ij = sum of log sigmoid(gate_l) over j < l <= i (arXiv:2503.02130, eq. 11-13); gates `[batch, time, heads]`."""
    found = torch.zeros(2, HEADS, T, T, dtype=torch.float64)
    for i, j in itertools.product(range(T), range(T)):
        for position in range(j + 1, i + 1):
            found[:, :, i, j] += formulas.sigmoid(gates[:, position]).log()
    return found


def test_forget_gate_sums_the_logarithms_of_its_gates(q, k):
    module, x = made("forget_gate"), drawn(3, 2, T, D)
    gates = torch.einsum("bti,hi->bth", x, module.projection.weight) + module.projection.bias
    assert_close(past(module(q, k, Call(), module.projection(x))), fox(gates))


@pytest.mark.parametrize("source", ["learned", "fixed"])
def test_forget_gate_without_input_is_one_per_head(q, k, source):
    module = made({"type": "forget_gate", "input": source, "t_min": 2.0, "t_max": 50.0})
    assert len(list(module.parameters())) == (source == "learned")
    assert_close(past(module(q, k, Call())), fox(module.bias.expand(2, T, -1)))


@pytest.mark.parametrize("window", [None, 3])
def test_forget_gate_hides_keys_whose_weight_is_bounded_below_what_may_be_lost(q, k, window):
    """D_ij < -2 U - log n + log(lost) as arXiv:2504.06949 has it, with U and n of what query i can see."""
    module, x = made({"type": "forget_gate", "prune": 0.5}, window=window), 3 * drawn(3, 2, T, D)
    gates = module.projection(x)
    discounts, closed = fox(gates), torch.zeros(2, HEADS, T, T, dtype=torch.bool)
    for b, h, i in itertools.product(range(2), range(HEADS), range(T)):
        seen = range(max(i + 1 - (window or T), 0), i + 1)
        most = max(0.3 * float(q[b, i, h].norm() * k[b, j, h // 2].norm()) for j in seen)
        for j in seen:
            closed[b, h, i, j] = discounts[b, h, i, j] < -2 * most - math.log(len(seen)) + math.log(0.5)
    assert closed.any() and not closed.diagonal(dim1=-2, dim2=-1).any()
    bias = module(q, k, Call(), gates)
    reached = torch.ones(T, T).tril().bool() & (torch.ones(T, T).triu(1 - (window or T)).bool())
    assert (bias.isneginf() == closed)[:, :, reached].all()
    assert_close(bias[~closed & reached], discounts[~closed & reached])


def test_forget_gate_starts_with_log_spaced_times():
    times = torch.tensor([2.0, 2 * 4.0, 2 * 16.0, 2 * 64.0])
    for source in ("hidden", "learned", "fixed"):
        spec = parse(Score, {"type": "forget_gate", "input": source, "t_min": 2.0, "t_max": 128.0})
        module = spec.build(context())
        bias = module.projection.bias if source == "hidden" else module.bias
        if source != "fixed":
            bias.initializer(bias.data, torch.Generator())
        assert_close(-1 / torch.nn.functional.logsigmoid(bias.detach()), times, 1e-4)
    zero = parse(Score, "forget_gate").build(context()).projection.bias
    assert zero.initializer(torch.empty(HEADS), torch.Generator()).tolist() == [0.0] * HEADS


def test_fixed_forget_gate_with_alibis_times_is_alibi(q, k):
    fixed = made({"type": "forget_gate", "input": "fixed", "t_min": 2.0, "t_max": 256.0}, heads=8)
    assert_close(fixed(q, k, Call()).tril(), made("alibi", heads=8)(q, k, Call()).expand(1, -1, -1, -1).tril(), 1e-5)


def test_forget_gate_sums_in_float32(q, k):
    module = made("forget_gate").float()
    gates = drawn(4, 1, 4096, HEADS).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        bias = module(q, k, Call(), gates)[:, :, -8:, -8:]
    assert bias.dtype == torch.float32
    exact = torch.nn.functional.logsigmoid(gates.double()).cumsum(1).transpose(1, 2)[..., -8:]
    assert_close(bias.double(), exact[..., :, None] - exact[..., None, :], 2e-3)


def attention(**fields: Any) -> nn.Module:
    """An attention branch in float64 with random parameters."""
    data = {"type": "attention", "heads": HEADS, "kv_heads": 2, "head_dim": WIDTH, **fields}
    module = parse(Branch, data).build(context(width=D, heads=None)).double()
    randomize(module)
    return module


class Published(nn.Module):
    """The attributes that transformers' eager attention reads."""

    num_key_value_groups = 2
    sinks: Tensor


def by_others(module: nn.Module, x: Tensor, function: Any, seen: Tensor, **fields: Any) -> Tensor:
    """x plus the update, with the attention of another library."""
    names = ("query", "key", "value")
    q, k, v = (getattr(module, f"{name}_projection")(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for name in names)
    mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -1e30)
    other = Published().eval()
    other.sinks = module.scores.sinks.logits if module.scores.sinks is not None else torch.zeros(HEADS)
    heads, _ = function(other, q, k, v, mask[None, None], scaling=WIDTH**-0.5, dropout=0.0, **fields)
    return x + module.output_projection(heads.flatten(-2))


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def test_sinks_are_those_of_gpt_oss():
    x = drawn(5, 2, T, D)
    for mask, seen in (("causal", CAUSAL), ({"type": "window", "size": 3}, CAUSAL.triu(-2))):
        module = attention(scores=["sinks"], mask=mask)
        expected = by_others(module, x, gpt_oss_attention, seen)
        assert_close(module(x, Call()), expected)
    assert module.scores.sinks.logits.shape == (HEADS,)
    module.scores.sinks.logits.data.fill_(-100.0)  # no share: as without sinks
    with torch.no_grad():
        assert_close(module(x, Call()), by_others(module, x, gemma2_attention, seen), 1e-6)


def test_softcap_is_that_of_gemma_2():
    x = drawn(6, 2, T, D)
    module = attention(scores=[{"type": "softcap", "cap": 0.7}])
    # Their softmax is in float32.
    assert_close(module(x, Call()), by_others(module, x, gemma2_attention, CAUSAL, softcap=0.7), 1e-6)
    assert (module(x, Call()) - by_others(module, x, gemma2_attention, CAUSAL)).abs().max() > 1e-2


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_documents_are_read_as_if_alone(mask):
    x = drawn(7, 1, T, D)
    fields = {"size": 3} if mask == "window" else {}
    sites = {"scores": ["sinks", "forget_gate"], "key": ["shift"], "value": ["shift"]}
    module = attention(mask={"type": mask, "documents": True, **fields}, **sites)
    apart = torch.cat([module(x[:, :3], Call()), module(x[:, 3:], Call())], 1)
    documents = torch.tensor([[4, 4, 4, 0, 0, 0, 0]])
    assert_close(module(x, Call(documents=documents)), apart)
    assert (module(x, Call()) - apart)[:, 3:].abs().max() > 1e-2
    deaf = attention(mask={"type": mask, **fields}, **sites)
    assert_close(deaf(x, Call(documents=documents)), module(x, Call()))


def test_biases_add_up_beside_a_cap():
    x = drawn(8, 2, T, D)
    module = attention(scores=[{"type": "softcap", "cap": 0.7}, "alibi", "transformer_xl", "forget_gate", "sinks"])
    names = ("query", "key", "value")
    q, k, v = (getattr(module, f"{name}_projection")(x).unflatten(-1, (-1, WIDTH)) for name in names)
    slopes = [2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)]
    gates = module.scores.biases.forget_gate.projection(x)
    bias = fox(gates) + module.scores.biases.transformer_xl(q, k, Call())
    out = torch.zeros(2, T, HEADS, WIDTH, dtype=torch.float64)
    for h, i in itertools.product(range(HEADS), range(T)):
        logits = []
        for j in range(i + 1):
            dot = (q[:, i, h] * k[:, j, h // 2]).sum(-1) * WIDTH**-0.5
            logits.append(0.7 * torch.tanh(dot / 0.7) - slopes[h] * (i - j) + bias[:, h, i, j])
        logits.append(module.scores.sinks.logits[h].expand(2))
        weights = torch.stack(logits, -1).softmax(-1)[:, :-1]
        out[:, i, h] = (weights[..., None] * v[:, : i + 1, h // 2]).sum(1)
    assert_close(module(x, Call()), x + module.output_projection(out.flatten(-2)), 1e-6)
