"""Patterns against their definitions pair by pair; lists of blocks that cover them exactly; draws of random blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from archlab.kernels.attention import CAUSAL, CROSS, FULL, Blocks, Pattern
from archlab.kernels.attention.pattern import Lists

CPU = torch.device("cpu")
Rule = Callable[[int, int, int], bool]  # query, key, number of keys


def near(block: int) -> Rule:
    """What BigBird's blocks read without random ones, three around and one at each end, for sizes that divide."""

    def allowed(i: int, j: int, keys: int) -> bool:
        row, column, last = i // block, j // block, (keys - 1) // block
        return abs(row - column) <= 1 or row in (0, last) or column in (0, last)

    return allowed


RULES: dict[str, tuple[Pattern, Rule]] = {
    "causal": (CAUSAL, lambda i, j, n: j <= i),
    "full": (FULL, lambda i, j, n: True),
    "cross": (CROSS, lambda i, j, n: True),
    "window": (Pattern(window=5), lambda i, j, n: i - 5 < j <= i),
    "first": (Pattern(window=5, first=3), lambda i, j, n: i - 5 < j <= i or (j <= i and j < 3)),
    "first_many": (Pattern(window=2, first=26), lambda i, j, n: i - 2 < j <= i or (j <= i and j < 26)),
    "around": (Pattern("full", window=4), lambda i, j, n: abs(i - j) < 4),
    "strided": (Pattern(window=3, stride=5), lambda i, j, n: i - 3 < j <= i or (j <= i and (i - j) % 5 == 0)),
    "strided_wide": (Pattern(window=9, stride=4), lambda i, j, n: i - 9 < j <= i or (j <= i and (i - j) % 4 == 0)),
    "chunked": (Pattern(stride=6, columns=0), lambda i, j, n: j <= i and i // 6 == j // 6),
    "fixed": (Pattern(stride=6, columns=2), lambda i, j, n: j <= i and (i // 6 == j // 6 or j % 6 >= 4)),
    "blocks": (Pattern("full", blocks=Blocks(3, random=0)), near(3)),
}
SIZES = [(1, 1), (23, 23), (24, 24), (37, 37), (4, 23), (1, 30)]
every_rule = pytest.mark.parametrize("name", RULES)


def matrix(pattern: Pattern, queries: int, keys: int) -> torch.Tensor:
    seen = pattern.dense(queries, keys, CPU)
    return torch.ones(queries, keys, dtype=torch.bool) if seen is None else seen


@every_rule
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_is_what_its_rule_says_pair_by_pair(name: str, queries: int, keys: int):
    pattern, rule = RULES[name]
    first = keys - queries  # the last query stands at the last key
    expected = [[rule(first + i, j, keys) for j in range(keys)] for i in range(queries)]
    if pattern.blocks is not None and pattern.blocks.cover(keys):
        expected = [[True] * keys] * queries
    assert matrix(pattern, queries, keys).view(queries, keys).tolist() == expected
    assert pattern.pairs(queries, keys) == sum(map(sum, expected))


DRAWN = {
    "bigbird": Blocks(2, random=2, seed=5, heads=3),
    "one_global": Blocks(2, globals=1, random=2, heads=2),
    "odd_globals": Blocks(2, globals=3, random=1, heads=2),
    "no_globals": Blocks(1, window=1, globals=0, random=3, heads=2),
    "more_than_there_are": Blocks(1, window=7, globals=0, random=2, heads=2),
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("tokens", [11, 24, 37, 60])
def test_every_head_has_the_pairs_that_are_counted(name: str, tokens: int):
    pattern = Pattern("full", blocks=DRAWN[name])
    seen = matrix(pattern, tokens, tokens).expand(DRAWN[name].heads, tokens, tokens)
    assert seen.sum((1, 2)).tolist() == [pattern.pairs(tokens, tokens)] * DRAWN[name].heads


def test_random_blocks_are_drawn_anew_for_each_seed_head_and_row_and_evenly():
    blocks = Blocks(4, random=3, heads=64)
    table = blocks.table(32, CPU)
    drawn = table & ~Blocks(4, random=0, heads=64).table(32, CPU)
    inner = drawn[:, 2:-2]
    assert (inner.sum(-1) == 3).all()
    assert not drawn[:, :, -1].any() and torch.equal(table, blocks.table(32, CPU))
    assert len({tuple(row) for row in inner.flatten(0, 1).int().tolist()}) > 0.7 * inner[..., 0].numel()
    other = Blocks(4, random=3, heads=64, seed=1).table(32, CPU)
    assert (other == table).float().mean() < 0.9
    share = inner[:, 14:16, 3:12].float().mean()  # such a row has 32 - 3 - 2 candidates
    assert abs(share - 3 / 27) < 0.03


def test_short_sequences_are_read_whole():
    blocks = Blocks(4, random=3)
    assert Pattern("full", blocks=blocks).dense(44, 44, CPU) is None  # (3 + 2 + 2 * 3) * 4
    assert not Pattern("full", blocks=blocks).dense(45, 45, CPU).all()


def rebuilt(lists: Lists, rows: int, columns: int) -> torch.Tensor:
    """The table of visited blocks that lists say, each block once and in order."""
    seen = torch.zeros(lists.blocks.shape[0], rows, columns, dtype=torch.bool)
    for head, row in torch.cartesian_prod(torch.arange(lists.blocks.shape[0]), torch.arange(rows)).tolist():
        count = int(lists.counts[head, row])
        listed = lists.blocks[head, row, :count]
        assert (listed[1:] > listed[:-1]).all()
        assert not lists.blocks[head, row, count:].any()
        seen[head, row, listed] = True
    return seen


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize(("queries", "keys"), [(37, 37), (5, 37), (32, 32)])
@pytest.mark.parametrize("name", [*RULES, *DRAWN])
def test_block_lists_cover_the_pairs_exactly(name: str, queries: int, keys: int, block: int):
    pattern = RULES[name][0] if name in RULES else Pattern("full", blocks=DRAWN[name])
    seen = matrix(pattern, queries, keys)
    seen = seen if seen.ndim == 3 else seen[None]
    rows, columns = -(-queries // block), -(-keys // block)
    any_ = torch.zeros(len(seen), rows, columns, dtype=torch.bool)
    for row, column in torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).tolist():
        part = seen[:, row * block : (row + 1) * block, column * block : (column + 1) * block]
        any_[:, row, column] = part.flatten(1).any(1)
    by_query, by_key = pattern.block_lists(queries, keys, block)
    for lists, wanted in ((by_query, any_), (by_key, any_.transpose(1, 2))):
        assert torch.equal(rebuilt(lists, *wanted.shape[1:]), wanted)


def test_what_a_call_adds_and_hides():
    prefix, padding = torch.tensor([3, 0]), torch.tensor([[False] * 4, [True, True, False, False]])
    seen = CAUSAL.dense(4, 4, CPU, prefix=prefix)
    assert seen[:, 0].int().tolist() == [
        [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    ]
    alone = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]  # padding reads itself, so that it reads something
    assert CAUSAL.dense(4, 4, CPU, padding=padding)[1, 0].int().tolist() == alone
    assert CROSS.dense(2, 4, CPU, padding=padding)[:, 0].int().tolist() == [[[1] * 4], [[0, 0, 1, 1]]]
    apart = CAUSAL.dense(4, 4, CPU, prefix=prefix, documents=torch.tensor([[0, 1, 1, 1]] * 2))
    assert apart[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 1]]


REFUSED = {
    "a window of 0": lambda: Pattern(window=0),
    "columns without a stride": lambda: Pattern(columns=2),
    "more columns than a stride has": lambda: Pattern(stride=2, columns=3),
    "a stride alone": lambda: Pattern(stride=2),
    "cross-attention with a window": lambda: Pattern("cross", window=2),
    "no first keys": lambda: Pattern(window=2, first=0),
    "first keys without a window": lambda: Pattern(first=2),
    "first keys beside a stride": lambda: Pattern(window=2, stride=3, first=2),
    "first keys where all is read": lambda: Pattern("full", window=2, first=2),
    "causal blocks": lambda: Pattern(blocks=Blocks(2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pattern_without_a_meaning_is_refused(name: str):
    with pytest.raises(ValueError, match="received"):
        REFUSED[name]()
