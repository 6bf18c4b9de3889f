"""Small models as files would say them, in the short form and with sites; what holds of each; messages that name
families."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl import Model
from archlab.arch_dsl.catalogue.describe import FAMILIES
from archlab.arch_dsl.conformance.properties import holds_what_its_cost_says, reads_in_pieces
from archlab.arch_dsl.language.errors import in_lines
from archlab.arch_dsl.language.spec import aliases_of, members_of
from archlab.arch_dsl.patching.knobs import encodings
from archlab.arch_dsl.plain import to_python
from tests.arch_dsl.compiler.test_costs import kept
from tests.arch_dsl.conformance import TOKENS, Case, load, randomize

KNOBS: dict[str, Any] = {
    "d_model": 64,
    "n_layers": 2,
    "vocab": 19,
    "block": {
        "norm": {"type": "rmsnorm", "placement": "pre"},
        "attention": {
            "heads": 8,
            "kv_heads": 2,
            "positional": "rope",
            "gate": {"position": "sdpa", "granularity": "headwise"},
        },
        "ffn": {"type": "glu"},
    },
}
SITES: dict[str, Any] = {
    "d_model": 64,
    "n_layers": 2,
    "vocab": 19,
    "block": {
        "attention": {
            "type": "attention",
            "pre": ["rmsnorm"],
            "heads": 8,
            "kv_heads": 2,
            "query": ["rope"],
            "key": ["rope"],
            "mask": "causal",
            "sdpa": [{"type": "gate", "granularity": "headwise", "activation": "sigmoid"}],
        },
        "ffn": {"type": "glu", "pre": ["rmsnorm"], "activation": "silu"},
    },
    "final": ["rmsnorm"],
}


def site(model: Model, path: str) -> Any:
    """What stands at a path, as people read it."""
    return arch_dsl.canonical(arch_dsl.tree.paths.get(model, tuple(path.split("."))), brief=True)


def with_branch(name: str, **fields: Any) -> dict[str, Any]:
    """KNOBS with fields of one branch added or replaced."""
    return {**KNOBS, "block": {**KNOBS["block"], name: {**KNOBS["block"][name], **fields}}}


def told(message: str) -> str:
    """An expected message in which `(<norm or gate>)` stands for the names in these families, which grow."""

    def names(found: re.Match[str]) -> str:
        if found[1] == "positional":
            return f"({', '.join(encodings())})"
        kinds = tuple(kind for noun in found[1].split(" or ") for kind in FAMILIES if kind.noun == noun)
        return f"({', '.join([*members_of(kinds), *aliases_of(kinds)])}{found[2] or ''})"

    return in_lines(re.sub(r"\(<([a-z ]+)>((?:, [a-z]+)*)\)", names, message))


def assert_plain_agrees(model: Model) -> None:
    """What a model is written as in plain PyTorch computes what the model does, with random parameters."""
    found: dict[str, type[torch.nn.Module]] = {}
    exec(to_python(model), found)
    ours, plain = arch_dsl.compile(model, backend="reference").eval(), found["Model"]().eval()
    randomize(ours)
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(plain(TOKENS), ours(TOKENS))


def attention_case(name: str, **fields: Any) -> Case:
    """Two layers of attention with these fields, four heads, and a norm before."""
    attention = {"type": "attention", "heads": 4, "pre": ["rmsnorm"], **fields}
    model = {"d_model": 16, "n_layers": 2, "vocab": 19, "max_positions": 12, "block": {"attention": attention}}
    return Case(name, load(model), (), plain=False)


def assert_decodes(case: Case) -> None:
    """A model reads in pieces as at once, and holds what its cost says."""
    assert (reads_in_pieces(case), holds_what_its_cost_says(case)) == ("", "")


def assert_computes(module: nn.Module, tokens: Tensor, expected: Tensor) -> None:
    """The logits of a module in float64 are the expected ones, which were computed from its parameters, and so are the
    gradients."""
    parameters = dict(module.named_parameters())
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    theirs = torch.autograd.grad((expected * weights).sum(), list(parameters.values()))
    logits = module(tokens)
    ours = torch.autograd.grad((logits * weights).sum(), list(parameters.values()))
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    for path, a, b in zip(parameters, ours, theirs, strict=True):
        assert float((a - b).abs().max()) <= 1e-9 * max(1.0, float(b.abs().max())), path


def assert_keeps(model: Model, rel: float = 0.02) -> None:
    """Autograd keeps as many activations as a model's cost says."""
    assert arch_dsl.cost(model, 12).activations == pytest.approx(kept(model, 12), rel=rel)
