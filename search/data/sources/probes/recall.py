"""Probes of recall: what value a key was given, in the sequence or in all of training."""

from __future__ import annotations

import numpy as np

from archlab.arch_dsl.language.spec import Count, Positive
from archlab.search.data.documents.draws import Bools, Draw, Ints
from archlab.search.data.sources.family import Source
from archlab.search.data.sources.probes.family import Number, Probe, chance_of, in_turns


class _KeysAndValues(Probe):
    """`keys` and `values` count the tokens that may be one: first come the keys, then the values."""

    keys: Count = 64
    values: Count = 64

    @property
    def kinds(self) -> int:
        return self.keys + self.values

    def too_few(self, keys: int, values: int) -> tuple[str, str] | None:
        """What is wrong where a sequence has so many distinct keys and values, or None."""
        for name, needed in (("keys", keys), ("values", values)):
            if (found := getattr(self, name)) < needed:
                return name, f"must be at least {needed}, as many as a sequence has, found {found}"
        return None

    def some_keys(self, draw: Draw, count: int) -> Ints:
        """Distinct keys."""
        return draw.some(self.keys, count)

    def some_values(self, draw: Draw, count: int) -> Ints:
        """Distinct values."""
        return self.keys + draw.some(self.values, count)


@Source.register("associative_recall")
class AssociativeRecall(_KeysAndValues):
    """Multi-query associative recall (Zoology, arXiv:2312.04927): `pairs` of a key and its
    value, then every key once more in random order, each followed by its value, the answer.

    A `length` beyond 4 `pairs` leaves room between the questions, filled with values that follow no key: question i
    stands in the j-th place for two tokens with a chance in proportion to j^(`power` - 1), as in the paper, where most
    come early. Chance is one of the sequence's values that were not answered yet.
    """

    pairs: Count = 16
    length: Count | None = None
    power: Positive = 0.01

    @property
    def chance(self) -> float:
        return chance_of(self.pairs, self.pairs)

    def complaint(self) -> tuple[str, str] | None:
        if self.length is not None and (self.length < 4 * self.pairs or self.length % 2):
            least = 4 * self.pairs
            return "length", f"must be even and at least 4 pairs, which is {least}, found {self.length}"
        return self.too_few(self.pairs, self.pairs)

    def sequence(self, draw: Draw) -> tuple[Ints, Bools]:
        keys, values = self.some_keys(draw, self.pairs), self.some_values(draw, self.pairs)
        length = self.length or 4 * self.pairs
        slots = length // 2 - self.pairs
        weights = np.arange(1, slots + 1) ** (self.power - 1.0)
        # A clock for each slot that rings after an exponential time: the first ones are a weighted choice.
        chosen = np.argsort(-np.log1p(-draw.uniforms(slots)) / weights, kind="stable")[: self.pairs]
        places = 2 * (self.pairs + chosen)
        tokens = np.concatenate([in_turns(keys, values), self.keys + draw.integers(self.values, 2 * slots)])
        tokens[places], tokens[places + 1] = keys, values
        asked = np.zeros(length, dtype=bool)
        asked[places + 1] = True
        return tokens, asked


@Source.register("forgetting_recall")
class ForgettingRecall(_KeysAndValues):
    """Associative recall where the last value counts: `pairs` keys are given values, and `overwrites` more times one
    of them another, all in random order; then every key once, followed by the value that it was given last.

    Chance is one of the sequence's values that were not answered yet.
    """

    pairs: Count = 8
    overwrites: Number = 8

    @property
    def writes(self) -> int:
        """Values that a sequence gives."""
        return self.pairs + self.overwrites

    @property
    def chance(self) -> float:
        return chance_of(self.writes, self.pairs)

    def complaint(self) -> tuple[str, str] | None:
        return self.too_few(self.pairs, self.writes)

    def sequence(self, draw: Draw) -> tuple[Ints, Bools]:
        keys, values = self.some_keys(draw, self.pairs), self.some_values(draw, self.writes)
        which = np.concatenate([np.arange(self.pairs), draw.integers(self.pairs, self.overwrites)])
        which = which[draw.order(self.writes)]
        last = np.empty(self.pairs, dtype=np.int64)
        last[which] = values  # of several writes to a place NumPy keeps the last
        order = draw.order(self.pairs)
        tokens = np.concatenate([in_turns(keys[which], values), in_turns(keys[order], last[order])])
        places = np.arange(len(tokens))
        return tokens, (places > 2 * self.writes) & (places % 2 == 1)


@Source.register("key_value_needle")
class KeyValueNeedle(_KeysAndValues):
    """Needles in a haystack: `needles` keys with their values at random places of `length` tokens, all others being one
    of `fillers`; at the end one of the keys, and its value, the answer.

    Chance is the value of any needle: 1 / needles.
    """

    needles: Count = 4
    fillers: Count = 64
    length: Count = 128

    @property
    def kinds(self) -> int:
        return self.keys + self.values + self.fillers

    @property
    def chance(self) -> float:
        return 1 / self.needles

    def complaint(self) -> tuple[str, str] | None:
        if self.length < 2 * self.needles + 2:
            least = 2 * self.needles + 2
            return "length", f"must be at least {least} for the needles and the question, found {self.length}"
        return self.too_few(self.needles, self.needles)

    def sequence(self, draw: Draw) -> tuple[Ints, Bools]:
        keys, values = self.some_keys(draw, self.needles), self.some_values(draw, self.needles)
        hay = self.length - 2 - 2 * self.needles
        tokens = self.keys + self.values + draw.integers(self.fillers, self.length)
        places = np.flatnonzero(draw.chosen(hay + self.needles, self.needles)) + np.arange(self.needles)
        tokens[places], tokens[places + 1] = keys, values
        asked = draw.below(self.needles)
        tokens[-2], tokens[-1] = keys[asked], values[asked]
        return tokens, np.arange(self.length) == self.length - 1


@Source.register("memorisation")
class Memorisation(_KeysAndValues):
    """Facts that only the weights can hold (mechanistic architecture design, arXiv:2403.17844): every key
    has one value in all sequences, drawn once; a sequence asks for those of `pairs` keys.

    Chance is any value: 1 / values.
    """

    keys: Count = 256
    values: Count = 256
    pairs: Count = 16

    @property
    def chance(self) -> float:
        return 1 / self.values

    def complaint(self) -> tuple[str, str] | None:
        return self.too_few(self.pairs, 1)

    def sequence(self, draw: Draw) -> tuple[Ints, Bools]:
        keys = self.some_keys(draw, self.pairs)
        facts = self.keys + Draw(self.own_seed("facts"), 0).integers(self.values, self.keys)
        return in_turns(keys, facts[keys]), np.arange(2 * self.pairs) % 2 == 1
