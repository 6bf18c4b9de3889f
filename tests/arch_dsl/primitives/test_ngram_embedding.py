"""Embeddings of n-grams against the paper's formula (arXiv:2412.09871, section 3.2.1), token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import Call, SpecError
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.context import State
from archlab.arch_dsl.plain import to_python

D, VOCAB, LENGTH = 16, 900, 14
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9, [0] * 2 + [1] * 3 + [2] * 9])
PADDING = torch.tensor([[False] * LENGTH, [True] * 3 + [False] * 11])


def built(mask: Any = "causal", **fields: Any) -> arch_dsl.Decoder:
    item = {"type": "ngram_embedding", "rows": 997, **fields}
    block = {"attention": {"heads": 4, "mask": mask}}
    sizes = {"d_model": D, "n_layers": 1, "vocab": VOCAB, "max_positions": LENGTH}
    module = arch_dsl.compile(arch_dsl.resolve(arch_dsl.load({**sizes, "block": block, "embed": [item]}))).double()
    randomize(module)
    return module


def entered(module: arch_dsl.Decoder, call: Call) -> Tensor:
    """What enters the first layer."""
    seen: list[Tensor] = []
    handle = module.embed.register_forward_hook(lambda site, args, out: seen.append(out))
    module(TOKENS, call)
    handle.remove()
    return seen[0]


def reading(module: arch_dsl.Decoder, rows: int, sizes: range, seen: Any) -> Tensor:
    """e_i = (x_i + sum of E_n[RollPolyHash(g_(i,n)) mod rows]) / (count + 1) in integers without a bound; `seen` says
    whether token i sees token k."""
    tables = module.embed.ngram_embedding.table.view(len(sizes), rows, D)
    out = []
    for b, row in enumerate(TOKENS.tolist()):
        for i in range(LENGTH):
            total = module.embedding[row[i]]
            for table, n in zip(tables, sizes, strict=True):
                back = [row[i - j] if i - j >= 0 and seen(b, i, i - j) else 0 for j in range(n)]
                total = total + table[sum(token * 1_000_000_007**j for j, token in enumerate(back)) % rows]
            out.append(total / (len(sizes) + 1))
    return torch.stack(out).view(2, LENGTH, D)


CASES = {
    "published": ({}, Call(), lambda b, i, k: True),
    "bigrams": ({"shortest": 2, "longest": 2, "rows": 11}, Call(), lambda b, i, k: True),
    "documents": (
        {"mask": {"type": "causal", "documents": True}},
        Call(documents=DOCUMENTS),
        lambda b, i, k: bool(DOCUMENTS[b, i] == DOCUMENTS[b, k]),
    ),
    "padding": ({}, Call(padding=PADDING), lambda b, i, k: not PADDING[b, k]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_the_sum_of_the_rows_that_hashes_of_n_grams_name(case: tuple[dict[str, Any], Call, Any]):
    fields, call, seen = case
    module = built(**fields)
    sizes = range(fields.get("shortest", 3), fields.get("longest", 8) + 1)
    found, wanted = entered(module, call), reading(module, fields.get("rows", 997), sizes, seen)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    values = [module.embedding, module.embed.ngram_embedding.table]
    theirs = torch.autograd.grad((wanted * weights).sum(), values)
    for a, b in zip(torch.autograd.grad((found * weights).sum(), values), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "sites",
    [
        {"embed": [{"type": "ngram_embedding", "rows": 50, "longest": 5}]},
        {"embed": ["token_shift"]},
        {"embed": ["canon", {"type": "short_conv", "width": 3}]},  # two of a type hold what is their own
        {"final": ["short_conv", "rmsnorm"]},
    ],
)
def test_decoding_step_by_step_gives_the_same_logits(sites: Any):
    sizes = {"d_model": D, "n_layers": 2, "vocab": 31, "max_positions": LENGTH}
    spec = arch_dsl.resolve(arch_dsl.load({**sizes, "block": {"attention": {"heads": 4}}, **sites}))
    module, tokens, state = arch_dsl.compile(spec).double(), TOKENS % 31, State()
    randomize(module)
    with torch.no_grad():
        steps = [module(tokens[:, t : t + 1], Call(state=state)) for t in range(LENGTH)]
        torch.testing.assert_close(torch.cat(steps, 1), module(tokens), rtol=1e-9, atol=1e-9)


def test_it_is_written_down_in_plain_pytorch():
    module = built(rows=11, longest=4)
    namespace: dict[str, Any] = {}
    exec(to_python(module.spec), namespace)
    plain = namespace["Model"]().double()
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(plain(TOKENS), module(TOKENS), rtol=1e-12, atol=1e-12)


def test_tables_are_parameters_without_flops():
    spec = built(rows=11).spec
    own, without = arch_dsl.cost(spec, 8), arch_dsl.cost(spec.replace(embed=()), 8)
    assert own.parameters - without.parameters == own.embeddings - without.embeddings == 6 * 11 * D
    assert own.flops_model == without.flops_model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": 2}, "prompt: is no token, and a ngram_embedding looks tokens up"),
        (
            {"embed": [{"type": "ngram_embedding", "rows": 9, "longest": 2}]},
            "longest: must be at least shortest 3, found 2",
        ),
        ({"final": [{"type": "ngram_embedding", "rows": 9}]}, "it stands at embed, not at final"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], message: str):
    sizes = {"d_model": D, "n_layers": 1, "vocab": 31, "max_positions": LENGTH, "block": {"attention": {"heads": 4}}}
    with pytest.raises(SpecError, match=message):
        arch_dsl.resolve(arch_dsl.load({**sizes, "embed": [{"type": "ngram_embedding", "rows": 9}], **fields}))
