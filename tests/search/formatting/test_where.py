"""Filters: what they find, and what is said of one that finds nothing because it is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest

from archlab.search.formatting.filters import BadFilter, parse_filter

ROW: dict[str, Any] = {
    "variant": "G1 [placement=sandwich]",
    "state": "complete",
    "lr": 0.004,
    "n": 3,
    "params": 1_500_000,
    "qk_norm": True,
    "block.ffn.width": 64,
    "block.attention.sdpa": "[gate(headwise, sigmoid)]",
    "delta": math.nan,
    "reason": None,
    "role": ("tune+repeat", "tune", "repeat"),
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", True),
        ("state=complete", True),
        ("role=repeat", True),
        ("role=tune+repeat", True),
        ("role!=tune", False),
        ("role!=search", True),
        ("-role=search,tune", False),
        ("role~peat", True),
        ("state=COMPLETE", True),
        ("state!=failed", True),
        ("state=failed,complete", True),
        ("state!=failed,complete", False),
        ("lr=4e-3 n>=3", True),
        ("lr>=0.004 lr<0.005", True),
        ("lr>4e-3", False),
        ("params=1.5M", True),
        ("qk_norm=yes", True),
        ("qk_norm=no", False),
        ("width=64", True),
        ("sdpa~headwise", True),
        ("sdpa=headwise", False),
        ('variant="G1 [placement=sandwich]"', True),
        ("headwise", True),
        ("-headwise", False),
        ("-state=failed", True),
        ("'[gate('", True),
        ("delta<0", False),
        ("delta>=0", False),
        ("reason=none", True),
        ("reason~disk", False),
        ("state=complete nothing-like-it", False),
    ],
)
def test_a_filter_holds_of_a_row(text: str, holds: bool) -> None:
    assert parse_filter(text, ROW).holds(ROW) is holds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stat=x", "column 1: there is no 'stat' here; did you mean 'state'?"),
        ("state=complete  widht>3", "column 17: there is no 'widht' here; did you mean 'width'?"),
        ("lr>=abc", "column 5: 'abc' is no number"),
        ("lr==4", "column 1: 'lr==4' is no condition"),
        ("lr>=", "column 1: 'lr>=' is no condition"),
        ('state="complete', "column 1:"),
    ],
)
def test_a_wrong_filter_says_where_and_what_it_may_be(text: str, says: str) -> None:
    with pytest.raises(BadFilter) as caught:
        parse_filter(text, ROW)
    assert says in str(caught.value)


def test_a_name_that_may_be_two_is_refused() -> None:
    with pytest.raises(BadFilter, match=r"'width' may be block\.ffn\.width or block\.ffn_2\.width"):
        parse_filter("width=1", ["block.ffn.width", "block.ffn_2.width"])
