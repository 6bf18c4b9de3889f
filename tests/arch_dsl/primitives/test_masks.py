"""Masks: what each reads, how many pairs it counts, prefixes and padding, and what it cannot stand beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import Call, SpecError
from archlab.arch_dsl.conformance.hosts import ATTENTION
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import State
from archlab.arch_dsl.parts.families import Mask
from tests.arch_dsl.conformance import LENGTH, TOKENS, build, load, whole_model

BIGBIRD = {"type": "bigbird", "block": 1, "random": 1}
MASKS: dict[str, Any] = {
    "causal": "causal",
    "full": "full",
    "prefix": "prefix",
    "window": {"type": "window", "size": 3},
    "window_first": {"type": "window", "size": 3, "first": 2},
    "window_first_many": {"type": "window", "size": 2, "first": 9},
    "local": {"type": "local", "each_side": 2},
    "strided": {"type": "strided", "stride": 3},
    "strided_size": {"type": "strided", "stride": 5, "size": 2},
    "fixed": {"type": "fixed", "stride": 4, "columns": 2},
    "chunked": {"type": "chunked", "stride": 4},
    "bigbird": BIGBIRD,
    "bigbird_coarse": {"type": "bigbird", "block": 3, "window_blocks": 1, "globals": 1, "random": 1},
    "bigbird_short": {"type": "bigbird"},
}
every_mask = pytest.mark.parametrize("name", MASKS)


def model(mask: Any, **attention: Any) -> arch_dsl.Model:
    """One layer of attention, in which a logit depends on what its position reads and on nothing else."""
    data = whole_model()
    return load(
        {**data, "n_layers": 1, "block": {"attention": {**data["block"]["attention"], "mask": mask, **attention}}}
    )


def reads(mask: Any, **call: Any) -> Tensor:
    """Which positions change which logits of the first row `[query, key]`, by changing one token at a time."""
    module = build(model(mask))
    before = module(TOKENS, Call(**call))
    found = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for j in range(LENGTH):
        other = TOKENS.clone()
        other[0, j] = 17
        found[:, j] = (module(other, Call(**call)) - before)[0].abs().amax(-1) > 1e-9
    return found


def pattern_of(mask: Any) -> Tensor:
    """The pairs of the mask that any of its four heads has."""
    seen = (
        parse(Mask, mask if isinstance(mask, dict) else {"type": mask})
        .pattern(heads=4)
        .dense(LENGTH, LENGTH, torch.device("cpu"))
    )
    if seen is None:
        return torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return seen.any(0) if seen.ndim == 3 else seen


@every_mask
def test_a_model_reads_what_its_mask_shows(name: str):
    assert torch.equal(reads(MASKS[name]), pattern_of(MASKS[name]))


def test_a_local_mask_reads_as_far_ahead_as_back():
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    assert torch.equal(reads(MASKS["local"]), (i - j).abs() < 3)


@every_mask
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 45, 100])
def test_pairs_are_those_of_every_head(name: str, tokens: int):
    mask = parse(Mask, MASKS[name] if isinstance(MASKS[name], dict) else {"type": MASKS[name]})
    seen = mask.pattern(heads=4, depth=2).dense(tokens, tokens, torch.device("cpu"))
    counts = [tokens**2] if seen is None else seen.reshape(-1, tokens, tokens).sum((1, 2)).tolist()
    assert set(counts) == {mask.pairs(tokens)}


def test_a_prefix_is_read_both_ways_and_the_rest_causally():
    for lengths, first in (((4, 0), 4), ((0, 5), 0), ((12, 12), 12)):
        i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        expected = (j <= i) | ((i < first) & (j < first))
        assert torch.equal(reads("prefix", prefix=torch.tensor(lengths)), expected)
    assert torch.equal(reads("causal", prefix=torch.tensor([4, 4])), pattern_of("causal"))


def test_a_prefix_that_was_read_at_once_decodes():
    module, prefix, state = build(model("prefix")), torch.tensor([3, 5]), State()
    whole = module(TOKENS, Call(prefix=prefix))
    parts = [module(piece, Call(prefix=prefix, state=state)) for piece in TOKENS.split([5, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-10, rtol=1e-10)
    with pytest.raises(ValueError, match=r"attention: a prefix is read at once, and here its end was not read yet"):
        module(TOKENS[:, :4], Call(prefix=prefix, state=State()))


@every_mask
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_nothing_reads_padding_and_its_gradients_are_finite(name: str, backend: str):
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0, :3] = padding[1, 9:] = True
    module = build(model(MASKS[name]), backend=backend)
    other = torch.where(padding, 17, TOKENS)
    before, after = (module(tokens, Call(padding=padding)) for tokens in (TOKENS, other))
    torch.testing.assert_close(after[~padding], before[~padding], atol=1e-12, rtol=0)
    assert (after - before)[padding].abs().amax(-1).min() > 1e-6
    assert before.isfinite().all()
    before[~padding].sum().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in module.parameters())


@pytest.mark.parametrize(
    "fields",
    [{"key": ["shift"]}, {"key": ["token_shift"]}, {"value": ["short_conv"]}, {"scores": ["forget_gate"]}],
    ids=str,
)
def test_nothing_that_looks_back_sees_padding(fields: dict[str, Any]):
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0, :3] = padding[1, 4:6] = True  # behind a prompt, and between tokens
    module = build(load({**whole_model(), "prompt": 2, "block": {"attention": {**ATTENTION, **fields}}}))
    before, after = (module(tokens, Call(padding=padding)) for tokens in (TOKENS, torch.where(padding, 17, TOKENS)))
    torch.testing.assert_close(after[~padding], before[~padding], atol=1e-12, rtol=0)


def test_padding_stays_hidden_while_decoding():
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0, :3] = padding[1, 4:6] = True
    for mask in ("causal", {"type": "window", "size": 4}, {"type": "window", "size": 2, "first": 2}):
        module, state = build(model(mask)), State()
        whole = module(TOKENS, Call(padding=padding))
        pieces = zip(TOKENS.split([5, 1, 6], 1), (padding[:, :5], padding[:, 5:6], None), strict=True)
        parts = [module(piece, Call(padding=hidden, state=state)) for piece, hidden in pieces]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-10, rtol=1e-10)
        module, state = build(model(mask)), State()  # padding that comes later, as after a longer source
        parts = [
            module(TOKENS[:, :4], Call(state=state)),
            module(TOKENS[:, 4:], Call(padding=padding[:, 4:], state=state)),
        ]
        own = padding.clone()
        own[:, :4] = False
        torch.testing.assert_close(torch.cat(parts, 1), module(TOKENS, Call(padding=own)), atol=1e-10, rtol=1e-10)


def test_each_layer_and_head_draws_its_random_blocks():
    mask = parse(Mask, {**BIGBIRD, "block": 4})
    seen = [mask.pattern(heads=2, depth=depth).dense(200, 200, torch.device("cpu")) for depth in (0, 1)]
    tables = [seen[0][0], seen[0][1], seen[1][0], seen[1][1]]
    assert all(not torch.equal(a, b) for n, a in enumerate(tables) for b in tables[:n])
    assert torch.equal(seen[0], mask.pattern(heads=2, depth=0).dense(200, 200, torch.device("cpu")))


def test_banded_is_a_window():
    banded = model({"type": "banded", "size": 3})
    assert arch_dsl.identity(banded) == arch_dsl.identity(model({"type": "window", "size": 3}))


@pytest.mark.parametrize("name", ["full", "local", "bigbird"])
def test_what_looks_ahead_does_not_decode(name: str):
    module = build(model(MASKS[name]))
    with pytest.raises(ValueError, match=r"block\.0\.attention: a mask that looks ahead reads all tokens at once"):
        module(TOKENS, Call(state=State()))
    assert {each for each in MASKS if parse(Mask, MASKS[each]).looks_ahead} == {"full", "local"} | {
        each for each in MASKS if each.startswith("bigbird")
    }


def test_documents_that_are_kept_apart_do_not_decode():
    module = build(model({"type": "causal", "documents": True}))
    with pytest.raises(ValueError, match="documents are kept apart by all tokens at once"):
        module(TOKENS, Call(documents=torch.zeros_like(TOKENS), state=State()))


REFUSED = {
    "each_side": ({"type": "local", "each_side": 0}, [], "each_side: must be at least 1, found 0"),
    "even": ({"type": "bigbird", "window_blocks": 2}, [], "mask.window_blocks: must be odd, as many blocks before as"),
    "columns": (
        {"type": "fixed", "stride": 2, "columns": 3},
        [],
        "mask.columns: must be at most the stride 2, found 3",
    ),
    "first_of_documents": (
        {"type": "window", "size": 3, "first": 2, "documents": True},
        [],
        "mask.first: are of the first document of a sequence alone, and documents are kept apart; leave one out",
    ),
    "first_and_places": (
        {"type": "window", "size": 3, "first": 2},
        ["alibi"],
        "scores.0: alibi numbers keys by their places, and decoding drops those between the first and the window",
    ),
    "no_first": ({"type": "window", "size": 3, "first": 0}, [], "mask.first: must be at least 1, found 0"),
    "xl": ("full", ["transformer_xl"], "scores.0: knows distances into the past alone, and the mask reads ahead"),
    "forget": ("prefix", ["forget_gate"], "scores.0: discounts the past alone, and the mask reads ahead"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(name: str):
    mask, scores, message = REFUSED[name]
    with pytest.raises(SpecError) as error:
        model(mask, scores=scores)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "change", [{"block.attention.mask.size": 4}, {"block.attention.mask": {"type": "full", "size": 4}}]
)
def test_a_size_that_a_mask_has_not_points_to_those_that_have_it(change: dict[str, Any]):
    with pytest.raises(SpecError) as error:
        arch_dsl.patch(model("causal"), change)
    assert "; window and strided have it" in str(error.value)


def test_distances_count_both_ways_where_a_mask_looks_ahead():
    for score in ("alibi", "kerple", {"type": "t5_buckets", "buckets": 8, "max_distance": 10, "bidirectional": True}):
        bias = build(model("full", scores=[score])).block[0].attention.scores
        q = torch.zeros(1, LENGTH, 4, 4, dtype=torch.float64)
        found = bias(q, q[:, :, :2], Call(), iter(())).expand(4, LENGTH, LENGTH)
        symmetric = torch.equal(found, found.transpose(1, 2))
        assert symmetric != isinstance(score, dict)
        if symmetric:
            assert (found[:, 3, 5:].diff() < 0).all()
