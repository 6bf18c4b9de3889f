"""What the fuzz tests share: how many inputs they try, and the work that one input may take.

They hold one promise: an answer, or an error that names the place. Never another exception, never work without an end.

`make test` tries the same few inputs each time. A long run tries other ones each time, here 3000 for each test:

    ARCHLAB_FUZZ=3000 python -m pytest tests/fuzz --timeout 0

An input that breaks the promise is printed, made as small as possible. Its cause is mended, and it stays as an
`@example` above its test.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from archlab.arch_dsl.language.errors import SpecError

LONG = "ARCHLAB_FUZZ"
TRIED: Counter[str] = Counter()
"""How many inputs of the test that runs were answered, and how many refused."""
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]


def examples(few: int) -> settings:
    """The settings of a test: `few` inputs that are always the same, or as many new ones as ARCHLAB_FUZZ says."""
    long = long_run()
    return settings(
        max_examples=long or few,
        derandomize=not long,
        deadline=None,  # a clock says nothing on a busy machine; `bounded_work` counts instead
        database=None,  # no test writes into the checkout
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        print_blob=bool(long),
        suppress_health_check=_SLOW,
    )


def long_run() -> int:
    """How many new inputs each test tries in a run that somebody asked for; 0 in any other."""
    return int(os.environ.get(LONG, "0"))


def tried(*, refused: bool) -> None:
    """Counts an input that kept the promise."""
    TRIED["refused" if refused else "answered"] += 1


class TooMuchWork(BaseException):
    """An input made more calls than it may; no `except Exception` stops it."""


@contextmanager
def bounded_work(most_calls: int) -> Iterator[None]:
    """Ends with TooMuchWork once more functions were called than that: the same on every machine, as no clock is."""
    calls = 0

    def count(_: FrameType, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"
        if calls > most_calls:
            sys.setprofile(before)
            raise TooMuchWork(f"more than {most_calls:,} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def says_where(error: SpecError) -> None:
    """Each problem has its place: a line of a file, a path in the study, or the file that can't be read at all."""
    assert error.problems
    for problem in error.problems:
        assert problem.message
        named = "study.yaml" in problem.message or "''" in problem.message  # the whole file, or a key without a name
        assert problem.path or problem.mark or named, str(error)


EXTREMES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**399, 0.0, -0.0, 0.1, -1.5, 1e-320, 1e308,
    "", " ", "x", "none", "null", "../../x", "nan", ".nan", ".inf", "1e999", "-1e400", "0x10", "1_000", "2k", "0k",
    "999999T", "2x", "1e3x", "0.5 B", "auto", "true", "~", "<<", "*", "**", "a.b", "..", ".", "block.*", "/dev/zero",
    "\x00", "\x1b[31m", "\ufeff", "\u202e", "\ud7ff", "ß𝔘🙂", "e\u0301", "\r", "a\nb", "\t", "\x85", "\u2028", "٣", "²",
    "a" * 5000, "9" * 600, "(" * 300, "[", "{", "{{0}}", "%s", "%(a)s", "${HOME}", "!!python/object", "&a", "<b>",
    [], {}, [[]], [None], [{}], {"": None}, {"type": None}, {"type": []}, {"type": "x"}, {"zoo": "x"}, {"zoo": None},
    [1, [2, [3, [4]]]], {"a": {"b": {"c": {}}}}, {"choice": []}, {"choice": [1, "x"]}, {"from": 0, "to": 0},
    {"min": 1, "max": 0}, [0.1, 0.1], [1, "a", None, True], ["a", "a"], {"value": 1, "when": {}},
]  # fmt: skip
"""What stands where something else is expected."""

# no lone halves of surrogate pairs: no UTF-8 text holds one
texts = st.text(st.characters(codec="utf-8"), max_size=20)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts)
values = st.one_of(
    st.sampled_from(EXTREMES),
    scalars,
    st.recursive(scalars, lambda each: st.lists(each, max_size=3) | st.dictionaries(texts, each, max_size=3)),
)
"""Anything that YAML or JSON could hold."""
