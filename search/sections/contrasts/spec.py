"""The `report.contrasts` of a study: pairs of variants whose difference is asked for beside the table's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Problem, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_record
from archlab.arch_dsl.language.source import Node
from archlab.search.variants.asks import Planned, Question
from archlab.search.variants.section import Section


class Contrasts(Section):
    """A list of pairs of variants, [one, other]: the difference is that of the first less the second. In a study with
    cells two variants are held against each other in each of them; `variant [cell]` names one of one cell."""

    key = "contrasts"
    within = "report"
    title: ClassVar[str] = "contrasts"
    pairs: tuple[tuple[str, ...], ...]

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From the list of pairs."""
        if not isinstance(node.value, list):
            problems.append(Problem(path, f"must be a list of pairs, [[one, other]]; found {node.kind}", node.mark))
            return INVALID
        return parse_record(cls, Node({"pairs": node}, node.mark), path, problems)

    def problems(self, study: Question) -> Iterator[Problem]:
        yield from self.unknown([*study.variants, *study.cells])

    def unknown(self, known: list[str]) -> Iterator[Problem]:
        """What is wrong with the pairs, given the names of variants and cells."""
        for place, pair in enumerate(self.pairs):
            path, mark = f"report.contrasts.{place}", self.mark(f"pairs.{place}") or self.mark("pairs") or self.mark()
            if len(pair) != 2 or pair[0] == pair[-1]:
                yield Problem(path, f"must be two variants, found {', '.join(pair) or 'nothing'}", mark)
            for name in pair:
                if name not in known:
                    yield Problem(path, unknown(name, "variant", known), mark)

    def record(self, planned: Planned) -> list[list[str]]:
        return [list(pair) for pair in self.pairs]
