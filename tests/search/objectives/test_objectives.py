"""What objectives make of a text: the published rates and lengths on counts, nothing lost, nothing seen too early."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.spec import fields_of
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data.batches import IGNORE, Batch
from archlab.search.data.documents.draws import Draw, span_counts, span_mask
from archlab.search.objectives import Objective, SpanCorruption, corrupted_lengths
from archlab.search.recipe.recipe import load_recipe

VOCAB = 257  # bytes and the end of a document
EOD = VOCAB - 1
PAIRED: list[Any] = ["prefix", {"type": "prefix", "share": 0.3}, "span_corruption", "denoisers", "ul2r"]
EVERY: list[tuple[Any, bool]] = [
    ("causal", False),
    ("masked", False),
    *((spec, encoder) for spec in PAIRED for encoder in (False, True)),
    ({"type": "denoisers", "mode_tokens": False}, True),
    ({"type": "span_corruption", "density": 0.5, "span": 2.5, "sentinels": 100}, False),
    ("masked_encoder", True),
    ({"type": "masked_encoder", "share": 0.5}, True),
]


def objective(spec: Any) -> Objective:
    """An objective from what a recipe would say."""
    return parse(Objective, spec, "objective")


def windows(count: int, context: int, seed: int = 0) -> np.ndarray:
    """Windows of random bytes, with an end of a document here and there."""
    rows = np.random.default_rng(seed).integers(0, 256, (count, context + 1))
    rows[:, ::19] = EOD
    return rows


def asked(spec: Any, encoder: bool = False, count: int = 8, context: int = 64, first: int = 0, seed: int = 3) -> Batch:
    """The batch of some windows."""
    return objective(spec).batch(windows(count, context), seed, first, VOCAB, encoder)


# Lengths


@pytest.mark.parametrize(
    ("inputs", "density", "span", "text", "targets"),
    [(512, 0.15, 3, 568, 114), (512, 0.15, 8, 588, 100), (512, 0.5, 3, 767, 513), (1024, 0.15, 3, 1137, 229)],
)
def test_lengths_are_those_of_t5s_random_spans_helper(
    inputs: int, density: float, span: float, text: int, targets: int
) -> None:
    """The longest text whose inputs fit; T5's 512 tokens are 568 of text and 114 targets (arXiv:1910.10683, 3.1.4)."""

    def rule(length: int) -> tuple[int, int]:
        noise = round(length * density)
        spans = round(noise / span)
        return length - noise + spans + 1, noise + spans + 1

    longest = next(length for length in itertools.count(inputs // 2) if rule(length + 1)[0] > inputs)
    assert longest == text
    assert corrupted_lengths(text, density, span) == rule(text) == (rule(text)[0], targets)
    found = objective({"type": "span_corruption", "density": density, "span": span}).lengths(text, encoder=True)
    assert (found.source, found.tokens) == rule(text)


@pytest.mark.parametrize("context", [2, 3, 17, 64])
@pytest.mark.parametrize(("spec", "encoder"), EVERY, ids=str)
def test_lengths_and_vocabulary_are_those_of_every_batch(spec: Any, encoder: bool, context: int) -> None:
    made, kind = asked(spec, encoder, 50, context), objective(spec)
    lengths = kind.lengths(context, encoder)
    assert made.tokens.shape == made.targets.shape == made.places.shape == (50, lengths.tokens)
    assert lengths.source == (0 if made.source_tokens is None else made.source_tokens.shape[1])
    for tokens in (made.tokens, made.targets[made.targets != IGNORE], made.source_tokens):
        if tokens is not None:
            assert tokens.min() >= 0 and tokens.max() < VOCAB + kind.extra(context)
    assert (made.targets != IGNORE).any(axis=1).all(), "every row has a target"
    assert made.places.min() >= 0 and made.places.max() < context
    if made.source_targets is not None:
        assert (made.source_targets != IGNORE).any(axis=1).all()


# What is given and what is asked for


@pytest.mark.parametrize(("spec", "encoder"), [each for each in EVERY if each[0] != "masked"], ids=str)
def test_a_target_is_what_is_read_next_and_nothing_before_it_shows_it(spec: Any, encoder: bool) -> None:
    made = asked(spec, encoder, 60)
    for row in range(len(made)):
        scored = np.flatnonzero(made.targets[row] != IGNORE)
        assert (np.diff(scored) == 1).all(), "targets are one stretch"
        assert (made.tokens[row, scored[1:]] == made.targets[row, scored[:-1]]).all()
        if made.prefix is not None:
            assert scored[0] == made.prefix[row] - 1, "the last of the prefix predicts the first target"
        elif encoder:
            assert scored[0] == 0 and made.tokens[row, 0] == EOD
        hidden = made.padding[row] if made.padding is not None else np.zeros(made.tokens.shape[1], dtype=bool)
        assert not hidden[: scored[-1] + 1].any() and hidden[scored[-1] + 1 :].all()


@pytest.mark.parametrize("encoder", [False, True], ids=["decoder", "encoder"])
@pytest.mark.parametrize("spec", [*PAIRED, {"type": "span_corruption", "density": 0.6, "span": 1}], ids=str)
def test_source_and_target_hold_the_whole_text_once(spec: Any, encoder: bool) -> None:
    kind, rows = objective(spec), windows(200, 64)
    made = kind.batch(rows, 3, 0, VOCAB, encoder)
    modes = getattr(kind, "modes", 0)
    sentinel = VOCAB + modes
    for row, text in enumerate(rows[:, 1:].tolist()):
        target = made.targets[row][made.targets[row] != IGNORE].tolist()
        if made.source_tokens is not None:
            shown = slice(None) if made.source_padding is None else ~made.source_padding[row]
            source = made.source_tokens[row][shown].tolist()
        else:
            assert made.prefix is not None
            source = made.tokens[row, : made.prefix[row]].tolist()
            if spec == "prefix" or (isinstance(spec, dict) and spec["type"] == "prefix"):
                assert source.pop(0) == rows[row, 0]
        if modes:
            assert VOCAB <= source.pop(0) < VOCAB + modes
        if not any(token >= sentinel for token in source):
            assert source + target == text
            continue
        assert source.pop() == target.pop() == EOD
        last = VOCAB + kind.extra(64) - 1
        assert [token for token in source if token >= sentinel] == [token for token in target if token >= sentinel]
        spans: dict[int, list[int]] = {}
        for token in target:
            if token >= sentinel:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        assert list(spans) == [last - number for number in range(len(spans))], "counted down from the end"
        assert [each for token in source for each in spans.get(token, [token])] == text


@pytest.mark.parametrize("spec", ["span_corruption", "denoisers", "prefix", "masked", "causal"])
def test_places_say_which_token_of_the_text_a_target_is(spec: str) -> None:
    rows = windows(40, 64)
    made = objective(spec).batch(rows, 3, 0, VOCAB, False)
    real = (made.targets >= 0) & (made.targets < EOD)
    assert (np.take_along_axis(rows[:, 1:], made.places, 1)[real] == made.targets[real]).all()
    assert all((np.diff(made.places[row][made.targets[row] != IGNORE]) >= 0).all() for row in range(40))


# Chance


def test_all_divisions_of_a_text_into_spans_are_equally_likely() -> None:
    counts = span_counts(8, 0.4, 1.5)
    assert counts == (3, 2)
    found = Counter(tuple(span_mask(Draw(5, row), 8, counts).tolist()) for row in range(4000))
    assert len(found) == math.comb(2, 1) * math.comb(4, 1), "cuts of 3 noise tokens times cuts of 5 others"
    assert sum((count - 500) ** 2 / 500 for count in found.values()) < 24.3, "chi-square of 7 degrees, p > 0.001"


@pytest.mark.parametrize(
    ("length", "density", "span", "noise", "spans"),
    [(568, 0.15, 3, 85, 28), (512, 0.15, 8, 77, 10), (512, 0.5, 64, 256, 4), (2, 0.15, 3, 1, 1), (10, 0.9, 1, 9, 1)],
)
def test_numbers_of_noise_tokens_and_spans_are_fixed(
    length: int, density: float, span: float, noise: int, spans: int
) -> None:
    counts = span_counts(length, density, span)
    assert counts == (noise, spans)
    for row in range(20):
        mask = span_mask(Draw(0, row), length, counts)
        assert mask.sum() == noise and not mask[0] and mask[-1]
        assert (np.diff(mask.astype(int)) == 1).sum() == spans


def test_denoisers_take_their_shares_and_corrupt_at_their_rates() -> None:
    kind, context, count = objective("denoisers"), 256, 3000
    made = kind.batch(windows(count, context), 11, 0, VOCAB, True)
    assert made.source_tokens is not None
    modes = Counter(made.source_tokens[:, 0].tolist())
    expected = {VOCAB: 2 / 7, VOCAB + 1: 1 / 7, VOCAB + 2: 4 / 7}  # R, S, X of the seven denoisers of UL2's table 1
    for mode, share in expected.items():
        assert abs(modes[mode] - share * count) < 4 * math.sqrt(count * share * (1 - share))
    sentinels = (made.targets >= VOCAB + 3).sum(1)
    noise = ((made.targets != IGNORE) & (made.targets < VOCAB)).sum(1) - (sentinels > 0)  # without the end
    pairs = Counter(zip(made.source_tokens[:, 0].tolist(), noise.tolist(), sentinels.tolist(), strict=True))
    r, s, x = VOCAB, VOCAB + 1, VOCAB + 2
    assert set(pairs) == {
        (r, 38, 13), (r, 38, 5), (s, 64, 0), (x, 128, 43), (x, 128, 16), (x, 38, 1), (x, 128, 2),
    }  # fmt: skip
    assert all(abs(each - count / 7) < 4 * math.sqrt(count * 6 / 49) for each in pairs.values())


def test_u_palms_mixture_is_half_sequential_a_quarter_regular_a_quarter_extreme() -> None:
    made = objective("ul2r").batch(windows(2000, 64), 1, 0, VOCAB, True)
    assert made.source_tokens is not None
    modes = Counter(made.source_tokens[:, 0].tolist())
    for mode, share in ((VOCAB, 0.25), (VOCAB + 1, 0.5), (VOCAB + 2, 0.25)):
        assert abs(modes[mode] - share * 2000) < 4 * math.sqrt(2000 * share * (1 - share))


def test_prefixes_have_every_length_equally_often_or_the_share_asked_for() -> None:
    made = asked("prefix", count=3000, context=11)
    assert made.prefix is not None
    found = Counter((made.prefix - 1).tolist())  # without the token before the text
    assert sorted(found) == list(range(1, 11))
    assert sum((count - 300) ** 2 / 300 for count in found.values()) < 27.9, "chi-square of 9 degrees, p > 0.001"
    assert {*(asked({"type": "prefix", "share": 0.5}, True).targets != IGNORE).sum(1)} == {32}


def test_masked_tokens_are_as_many_as_bert_says_and_meet_their_three_fates() -> None:
    rows = windows(400, 200)
    made = objective("masked").batch(rows, 9, 0, VOCAB, False)
    text, chosen = rows[:, 1:], made.targets != IGNORE
    assert {*chosen.sum(1)} == {30}, "0.15 of 200"
    assert (made.targets[chosen] == text[chosen]).all() and (made.tokens[~chosen] == text[~chosen]).all()
    assert not (made.targets == EOD).any(), "ends of documents are left alone"
    total, seen = chosen.sum(), made.tokens[chosen]
    masks, same = (seen == VOCAB).sum(), (seen == text[chosen]).sum()
    for count, share in ((masks, 0.8), (same, 0.1 + 0.1 / 256), (total - masks - same, 0.1 * 255 / 256)):
        assert abs(count - share * total) < 4 * math.sqrt(total * share * (1 - share))
    others = seen[(seen != VOCAB) & (seen != text[chosen])]
    assert others.max() < EOD and len(set(others.tolist())) > 200
    each = chosen.mean(0)[np.setdiff1d(np.arange(200), np.arange(18, 200, 19))]
    assert each.min() > 0.05 and each.max() < 0.3, "no place is preferred"


def test_masked_encoder_hides_tokens_of_the_source_alone() -> None:
    plain, made = asked("prefix", True, 100), asked("masked_encoder", True, 100)
    assert (made.targets == plain.targets).all() and (made.tokens == plain.tokens).all()
    assert made.source_tokens is not None and made.source_targets is not None and plain.source_tokens is not None
    chosen = made.source_targets != IGNORE
    assert (made.source_targets[chosen] == plain.source_tokens[chosen]).all()
    assert (made.source_tokens[~chosen] == plain.source_tokens[~chosen]).all()
    assert plain.source_padding is not None and not chosen[plain.source_padding].any()
    lengths = (~plain.source_padding).sum(1)
    assert [*chosen.sum(1)] == [max(round(0.15 * length), 1) for length in lengths]
    assert objective({"type": "masked_encoder", "weight": 0.5}).encoder_weight == 0.5


# Purity


@pytest.mark.parametrize(("spec", "encoder"), EVERY, ids=str)
def test_noise_is_that_of_the_row_whatever_the_batch(spec: Any, encoder: bool) -> None:
    kind, rows = objective(spec), windows(12, 32)
    whole = kind.batch(rows, 7, 100, VOCAB, encoder)
    other = kind.batch(rows, 8, 100, VOCAB, encoder)
    for start, stop in ((0, 5), (5, 12)):
        part = kind.batch(rows[start:stop], 7, 100 + start, VOCAB, encoder)
        for name, array in vars(part.rows(0, stop - start)).items():
            mine = getattr(whole.rows(start, stop), name)
            padded = mine is not None and name in ("padding", "source_padding") and array is None
            assert (not mine.any()) if padded else np.array_equal(array, mine), name
    if spec not in ("causal", {"type": "prefix", "share": 0.3}):
        names = ("tokens", "source_tokens", "targets")
        assert any(not np.array_equal(getattr(whole, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize(("spec", "encoder"), [*EVERY, ("targets", False), ("targets", True)], ids=str)
def test_the_end_of_a_document_may_be_any_token(spec: Any, encoder: bool) -> None:
    def renamed(array: np.ndarray) -> np.ndarray:  # the end is 0, all other tokens one more
        return np.where(array == EOD, 0, np.where((array >= 0) & (array < EOD), array + 1, array))

    kind, rows = objective(spec), windows(6, 40)
    other = renamed(rows)
    if spec == "targets":
        rows[:, 0] = other[:, 0] = 9  # how many tokens are given
    found = vars(kind.batch(other, 7, 0, VOCAB, encoder, eod=0))
    for name, array in vars(kind.batch(rows, 7, 0, VOCAB, encoder)).items():
        read = name in ("tokens", "targets", "source_tokens", "source_targets") and array is not None
        mine = renamed(array) if read else array
        hidden = {"tokens": "padding", "source_tokens": "source_padding"}.get(name)
        if hidden and found[hidden] is not None:
            mine = np.where(found[hidden], 0, mine)  # what padding holds is no token
        assert np.array_equal(found[name], mine), name


def test_noise_is_the_same_for_ever() -> None:
    weights = np.arange(64)
    made = {name: asked(name, False, 4) for name in ("masked", "span_corruption", "denoisers")}
    found = {name: int((each.tokens[:, :64] * weights).sum()) for name, each in made.items()}
    assert found == {"masked": 1254136, "span_corruption": 1256531, "denoisers": 1190311}
    prefix = asked("prefix", False, 4).prefix
    assert prefix is not None and prefix.tolist() == [57, 13, 8, 11]


# Specs


def test_causal_is_the_word_that_it_was_and_others_are_told_whole() -> None:
    assert canonical(objective("causal")) == canonical(objective({"type": "causal"})) == "causal"
    assert canonical(objective("span_corruption")) == {
        "type": "span_corruption", "sentinels": None, "density": 0.15, "span": 3.0
    }  # fmt: skip
    for spec, _ in EVERY:
        assert objective(canonical(objective(spec))) == objective(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"type": "masked", "mask": 0.8, "random": 0.3}, "objective.random: and mask are 1.1 of the masked tokens"),
        ({"type": "span_corruption", "sentinels": 9}, "objective.sentinels: must be at least 28 for a context of 568"),
        ({"type": "denoisers", "mixture": []}, "objective.mixture: needs at least one denoiser"),
        (
            {"type": "denoisers", "mixture": [{"mode": "S"}, {"mode": "R", "span": 3}]},
            "objective.mixture: denoiser 1: R needs a density and a span",
        ),
        (
            {"type": "denoisers", "mixture": [{"mode": "S", "span": 3}]},
            "objective.mixture: denoiser 0: S takes the last part of a text, which has no span",
        ),
        ({"type": "prefix", "share": 1}, "objective.share: must be less than 1, found 1"),
        ("t5", "'t5' is not an objective (causal, "),
    ],
    ids=str,
)
def test_objectives_refuse(spec: Any, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_recipe({"tokens": 1000, "lr": 1e-3, "context": 568, "objective": spec})
    assert message in str(refused.value)


def test_a_context_of_one_token_cannot_be_cut() -> None:
    for spec in ("prefix", "span_corruption", "denoisers", "masked_encoder"):
        with pytest.raises(SpecError, match=r"train\.objective: divides a text in two, and the context has one token"):
            load_recipe({"tokens": 1000, "lr": 1e-3, "context": 1, "objective": spec})


def test_extra_tokens_are_what_the_objective_needs() -> None:
    needs = {"causal": 0, "prefix": 0, "masked": 1, "masked_encoder": 1, "span_corruption": 28, "denoisers": 98}
    assert {name: objective(name).extra(568) for name in needs} == needs
    assert SpanCorruption(sentinels=100).extra(568) == 100


OTHER: dict[str, dict[str, Any]] = {
    "causal": {},
    "prefix": {"share": 0.5},
    "masked": {"density": 0.3, "mask": 0.5, "random": 0.2},
    "masked_encoder": {"share": 0.5, "density": 0.3, "mask": 0.5, "random": 0.2, "weight": 2.0},
    "span_corruption": {"density": 0.3, "span": 2.0, "sentinels": 50},
    "denoisers": {"mixture": [{"mode": "S"}], "mode_tokens": False, "sentinels": 50},
}


def test_every_field_changes_what_is_asked() -> None:
    assert {name: {*fields} for name, fields in OTHER.items()} == {
        name: {*fields_of(member)} for name, member in Objective.members.items() if not member.of_examples
    }
    for name, fields in OTHER.items():
        plain = asked(name, name == "masked_encoder")
        for field, value in fields.items():
            changed = {"type": name, field: value}
            other = asked(changed, name == "masked_encoder")
            same = all(np.array_equal(array, getattr(other, part)) for part, array in vars(plain).items())
            assert not same or objective(name).encoder_weight != objective(changed).encoder_weight, changed


def test_every_field_of_a_denoiser_changes_what_is_asked() -> None:
    base: list[dict[str, Any]] = [{"mode": "R", "density": 0.15, "span": 3}, {"mode": "S"}]
    plain = asked({"type": "denoisers", "mixture": base}, count=40)
    for field, value in {"mode": "X", "density": 0.3, "span": 2, "weight": 4}.items():
        other = asked({"type": "denoisers", "mixture": [{**base[0], field: value}, base[1]]}, count=40)
        assert not np.array_equal(plain.tokens, other.tokens), field
