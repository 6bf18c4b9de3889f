"""How small a chance each test of an endless stream may take, so that few of its discoveries are false.

e-LOND (Z. Xu and A. Ramdas, "Online multiple testing with e-values", AISTATS 2024): hypothesis t is rejected when its
e-value reaches 1 / alpha_t, with

    alpha_t = alpha * gamma_t * (R + 1),

R the rejections so far, and gamma_1 + gamma_2 + ... = 1. The expected share of false ones among all rejections is then
at most alpha at every t, however the tests depend on each other: a champion that all are held against, the same seeds,
and a proposer that has seen what came out.
"""

from __future__ import annotations

import math

_SUM = 3.387735532  # of 1 / (t log^2(t + 1)) over t = 1, 2, 3, ...: to 10^7 by hand, and 1 / log(10^7) for the rest


def share(number: int) -> float:
    """gamma_t of the `number`-th test, from 1 on: as 1 / (t log^2(t + 1)), so that late ones keep a chance."""
    if number < 1:
        raise ValueError(f"tests are numbered from 1 on; received {number}")
    return 1 / (_SUM * number * math.log(number + 1) ** 2)


def level(number: int, rejections: int, alpha: float) -> float:
    """alpha_t: 1 over the e-value that the `number`-th test needs after so many rejections."""
    return min(alpha * share(number) * (rejections + 1), alpha)
