"""Domains have their shares of every stretch of rows, their own held-out splits, and their own epochs."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data import Bytes, Mixture, Source, Text, batch, prepare, require, rows
from archlab.search.data.mixing import _STEP, _TURN, _bounds, _floors, drawn

NAMES = ("train", "validation", "test")


def stream(first: int, length: int) -> Any:
    """Distinct tokens from `first`, closed by the one it starts with."""
    return np.append(np.arange(first, first + length - 1), first).astype(np.uint32)


def test_points_of_a_stretch_are_counted_without_looking_at_them() -> None:
    chance = random.Random(0)
    for _ in range(200):
        low, high = sorted((chance.randrange(_TURN), chance.randrange(_TURN)))
        offset, count = chance.randrange(_TURN), chance.randrange(300)
        points = [(place * _STEP + offset) % _TURN for place in range(count)]
        assert drawn(low, high, offset, count) == sum(low <= point < high for point in points)
        assert _floors(count, offset - high) == sum((i * _STEP + offset - high) // _TURN for i in range(count))
    assert drawn(0, _TURN, 5, 10**15) == 10**15


SHARES = {"two": (0.7, 0.3), "many": (0.4, 0.25, 0.2, 0.1, 0.04, 0.01), "nearly none": (0.999, 0.001)}


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_every_stretch_of_rows_holds_the_shares(shares: tuple[float, ...]) -> None:
    streams = [(share, stream(10_000 * place, 500)) for place, share in enumerate(shares)]
    owner = rows(streams, 3, 0, 4000, 8)[:, 0] // 10_000
    for start in range(0, 4000, 333):
        for length in (10, 100, 667):
            counts = np.bincount(owner[start : start + length], minlength=len(shares))
            taken = min(length, 4000 - start)
            assert np.abs(counts - taken * np.array(shares)).max() <= 4
    assert (np.abs(np.bincount(owner, minlength=len(shares)) - 4000 * np.array(shares)) <= 4).all()


def test_the_same_rows_flow_through_any_batch_size_and_depend_on_the_seed() -> None:
    streams = [(0.6, stream(0, 200)), (0.4, stream(1000, 90))]
    whole = rows(streams, 1, 0, 240, 9)
    assert (np.concatenate([rows(streams, 1, first, 24, 9) for first in range(0, 240, 24)]) == whole).all()
    assert (rows(streams, 1, 100, 7, 9) == whole[100:107]).all()
    assert (rows(streams, 2, 0, 240, 9) != whole).any()
    assert rows(streams, 1, 10**15, 4, 9).shape == (4, 10), "rows far ahead cost no more than near ones"
    assert int((whole[::10] * np.arange(10)).sum()) == 542_621, "and are the same for ever"


def test_every_domain_goes_through_its_own_epochs() -> None:
    streams = [(0.6, stream(0, 201)), (0.4, stream(1000, 91))]
    found = rows(streams, 1, 0, 500, 10)
    for domain, ring in enumerate((200, 90)):
        mine = found[(found[:, 0] // 1000) == domain]
        per_epoch = ring // 10
        for start in range(0, len(mine) - per_epoch, per_epoch):
            targets = mine[start : start + per_epoch, 1:].ravel().tolist()
            assert len(set(targets)) == len(targets) == ring


def test_one_stream_is_read_as_it_always_was() -> None:
    tokens = stream(0, 999)
    assert (rows([(1.0, tokens)], 5, 30, 10, 7) == batch(tokens, 5, 30, 10, 7)).all()


def test_the_circle_is_divided_without_a_gap() -> None:
    bounds = _bounds([1 / 3] * 3)
    assert (bounds[0], bounds[-1]) == (0, _TURN) and all(low < high for low, high in pairwise(bounds))


@pytest.fixture
def mixture(tmp_path: Path) -> dict[str, Any]:
    """300 documents of prose and 100 of numbers, and a mixture of them."""
    prose = [f"a piece of prose, number {number} of many" for number in range(300)]
    (tmp_path / "prose.txt").write_text("\n==\n".join(prose))
    (tmp_path / "numbers.txt").write_text("\n==\n".join([f"{n} {n * n} {n**3} {n**7}" for n in range(100)] + prose[:9]))
    files = {
        name: {"text": {"files": str(tmp_path / f"{name}.txt"), "separator": "\n==\n"}} for name in ("prose", "numbers")
    }
    return {"mixture": files}


def test_a_mixture_is_spelt_by_names_and_survives_its_canonical_form(mixture: dict[str, Any]) -> None:
    mixture["mixture"]["prose"] = {**mixture["mixture"]["prose"], "weight": 3}
    mixture["mixture"]["numbers"] = {**mixture["mixture"]["numbers"], "weight": 1}
    source = parse(Source, mixture)
    assert isinstance(source, Mixture) and list(source.domains) == ["prose", "numbers"]
    assert isinstance(source.domains["prose"].source, Text) and source.domains["prose"].weight == 3
    assert (
        parse(Source, canonical(source)) == source == parse(Source, {"type": "mixture", "domains": mixture["mixture"]})
    )
    assert source.shares({"prose": 1, "numbers": 99}) == {"prose": 0.75, "numbers": 0.25}


def test_domains_keep_their_documents_apart_in_every_split(mixture: dict[str, Any], tmp_path: Path) -> None:
    data = prepare(parse(Source, mixture), Bytes(), tmp_path / "data")
    assert [domain.name for domain in data.domains] == ["prose", "numbers"]
    seen = 0
    for name in NAMES:
        for domain in data.domains:
            first, last = domain.documents[name]
            texts = [data.document(name, place) for place in range(first, last)]
            assert texts and all(text.startswith(b"a piece") == (domain.name == "prose") for text in texts)
            seen += len(texts)
    assert seen == 400, "what two domains have is only in the first"
    assert data.header["duplicate_bytes"] > 0
    for (_, stream), domain in zip(data.streams(), data.domains, strict=True):
        tokens = stream[:]
        assert tokens[0] == tokens[-1] == data.eod
        assert (tokens == data.eod).sum() == domain.documents["train"][1] - domain.documents["train"][0] + 1
    sizes = [
        sum(len(data.document("train", place)) for place in range(*domain.documents["train"]))
        for domain in data.domains
    ]
    assert [domain.share for domain in data.domains] == pytest.approx([size / sum(sizes) for size in sizes])
    assert [row["name"] for row in data.record()["domains"]] == ["prose", "numbers"]


def test_a_temperature_evens_the_shares_out(mixture: dict[str, Any], tmp_path: Path) -> None:
    shares = {}
    for temperature in (1.0, 3.0, 1e9):
        source = parse(Source, mixture | {"temperature": temperature})
        shares[temperature] = prepare(source, Bytes(), tmp_path / "data").domains[0].share
        assert source.held_out() == parse(Source, mixture).held_out(), "the held-out text is the same"
    (one, three, many) = shares.values()
    assert three / (1 - three) == pytest.approx((one / (1 - one)) ** (1 / 3))
    assert many == pytest.approx(0.5, abs=1e-6)
    assert len(list((tmp_path / "data").glob("*/data.json"))) == 3, "shares are part of the identity"


def test_a_mixture_that_cannot_be_meant_is_refused(mixture: dict[str, Any], tmp_path: Path) -> None:
    domains = mixture["mixture"]
    tokens = {"tokens": "a.bin", "vocab": 9, "eod": 1}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"mixture": {"prose": domains["prose"]}}, "data.domains: needs at least two, found 1"),
        ({"mixture": {**domains, "A b": "stdlib"}}, "data.domains: 'A b' is no name of a domain"),
        ({"mixture": {**domains, "tokens": tokens}}, "data.domains: the domains are not of one kind"),
        ({"mixture": {**domains, "both": mixture}}, "data.domains: a domain is a corpus, not a mixture"),
        (
            {"mixture": {**domains, "lib": {"type": "stdlib", "weight": 1}}},
            "data.domains: 'prose' has no weight, the others have: give all domains one, or none",
        ),
        (
            {"mixture": {name: {**domain, "weight": 2} for name, domain in domains.items()}, "temperature": 2},
            "data.temperature: the domains have weights, which say the shares; this would be ignored",
        ),
    ]
    for written, message in cases:
        with pytest.raises(SpecError) as refused:
            prepare(parse(Source, written), Bytes(), tmp_path / "data", path="x")
        assert f"x.{message}" in str(refused.value), written
    with pytest.raises(SpecError, match=r"x\.domains\.prose\.weight: must be greater than 0, found 0"):
        parse(Source, {"mixture": {**domains, "prose": {**domains["prose"], "weight": 0}}}, "x")
    with pytest.raises(SpecError, match=r"t\.data\.domains\.prose\.files: '.*nowhere' matches no file"):
        prepare(
            parse(Source, {"mixture": {**domains, "prose": {"text": str(tmp_path / "nowhere")}}}),
            Bytes(),
            tmp_path,
            path="t",
        )


def test_a_domain_shorter_than_a_window_is_refused(mixture: dict[str, Any], tmp_path: Path) -> None:
    data = prepare(parse(Source, mixture), Bytes(), tmp_path / "data")
    require(data, 1000, 2)
    with pytest.raises(
        SpecError, match=r"train\.data: the domain 'numbers' has [\d,]+ training tokens, fewer than one"
    ):
        require(data, 5000, 1)
