"""Several corpora as one: each is a domain with held-out splits of its own, and has a share of the rows of training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError
from archlab.arch_dsl.language.parse import INVALID, parse_record, parse_value
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Positive, Spec
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data.documents.document import Document
from archlab.search.data.sources.family import Source

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class Domain(Spec):
    """A corpus of a mixture: a data source, and its `weight` beside the others'."""

    title: ClassVar[str] = "domain"

    source: Source
    weight: Positive | None = None

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """Reads `{jsonl: …, weight: 0.7}` as `{source: {jsonl: …}, weight: 0.7}`."""
        if isinstance(node.value, dict) and "source" in node.value:
            return parse_record(cls, node, path, problems)
        weight: Any = None
        if isinstance(node.value, dict) and "weight" in node.value:
            weight = parse_value(Positive | None, node.value["weight"], f"{path}.weight", problems)
            rest = {key: child for key, child in node.value.items() if key != "weight"}
            node = Node(rest, node.mark, node.key_marks)
        source = parse_value(Source, node, path, problems)
        return INVALID if INVALID in (source, weight) else cls(source=source, weight=weight)


@Source.register("mixture")
class Mixture(Source):
    """Domains by name, from which the rows of training are drawn in shares.

    The shares are the domains' weights over their sum; without weights p_i ∝ n_i^(1/T) with T = `temperature` and n_i
    the bytes of training text: 1 takes every domain as often as there is of it, a higher one evens them out
    (arXiv:1901.07291, section 3.1; arXiv:1910.10683, section 3.5.2). Written `{mixture: {wiki: …, code: …}}`,
    which are the `domains`.
    """

    domains: dict[str, Domain]
    temperature: Positive = 1.0

    def __hash__(self) -> int:
        return hash((frozenset(self.domains.items()), self.temperature, self.clean))

    def check(self, path: str) -> None:
        """Raises SpecError for domains that do not make a mixture together."""
        problems = [Problem(f"{path}.{field}", message, mark) for field, message, mark in self._mistakes()]
        if problems:
            raise SpecError(problems)

    def _mistakes(self) -> Iterator[tuple[str, str, Mark | None]]:
        """Where, what is wrong, and its mark."""
        mark, sources = self.mark(), [domain.source for domain in self.domains.values()]
        for name in self.domains:
            if not _NAME.fullmatch(name):
                message = f"'{name}' is no name of a domain: lower-case letters, digits, '_' and '-'"
                yield "domains", message, mark
        if len(sources) < 2:
            yield "domains", f"needs at least two, found {len(sources)}", mark
        if any(isinstance(source, Mixture) for source in sources):
            yield "domains", "a domain is a corpus, not a mixture", mark
        if len({source.alphabet() if source.holds_tokens else None for source in sources}) > 1:
            message = "the domains are not of one kind: all are text, or all are tokens with one vocab and eod"
            yield "domains", message, mark
        without = [name for name, domain in self.domains.items() if domain.weight is None]
        if 0 < len(without) < len(sources):
            yield "domains", f"'{without[0]}' has no weight, the others have: give all domains one, or none", mark
        if len(without) < len(sources) and self.temperature != 1:
            message = "the domains have weights, which say the shares; this would be ignored"
            yield "temperature", message, self.mark("temperature")

    @property
    def holds_tokens(self) -> bool:
        """Whether its domains do."""
        return any(domain.source.holds_tokens for domain in self.domains.values())

    def alphabet(self) -> tuple[int, int]:
        """Those of its domains, which are the same."""
        return next(domain.source.alphabet() for domain in self.domains.values())

    def shares(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """The share of each domain, given the size of its training split; together 1."""
        raw = {
            name: domain.weight if domain.weight is not None else sizes[name] ** (1 / self.temperature)
            for name, domain in self.domains.items()
        }
        total = sum(raw.values())
        return {name: value / total for name, value in raw.items()}

    def find(self, base: Path | None, path: str, root: Path | None = None) -> list[Path]:
        """The files of all domains."""
        self.check(path)
        found = (domain.source.find(base, f"{path}.domains.{name}", root) for name, domain in self.domains.items())
        return [file for files in found for file in files]

    def absent(self, root: Path) -> bool:
        """Whether one of its domains is."""
        return any(domain.source.absent(root) for domain in self.domains.values())

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """Not for a mixture: each of its domains is read by itself."""
        raise NotImplementedError

    def label(self) -> str:
        """`wiki (jsonl: wiki/*.jsonl) + code (text: src/**/*.py)`"""
        return " + ".join(f"{name} ({domain.source.label()})" for name, domain in self.domains.items())

    def held_out(self) -> Any:
        """The domains without their weights, which touch training alone."""
        clean = {"clean": canonical(self.clean)} if self.clean else {}
        return {"type": self.type, **{name: domain.source.held_out() for name, domain in self.domains.items()}, **clean}


def corpora_of(source: Source, path: str) -> dict[str, tuple[Source, str]]:
    """The corpora of a source by the names of their domains, each with its place in the study; one corpus is ''."""
    if not isinstance(source, Mixture):
        return {"": (source, path)}
    return {name: (domain.source, f"{path}.domains.{name}") for name, domain in source.domains.items()}
