"""What is done to documents before they are split: stages in order, each of which says what it kept and removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from archlab.arch_dsl.language.errors import Problem, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_member, parse_record
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Family
from archlab.search.data.documents.document import Document
from archlab.search.data.documents.notation import plain

GROUPS = ("quality", "dedup", "pii")
_EXAMPLES = 3  # of what a stage removed or changed
_SHOWN = 160  # characters of an example


class Verdict(NamedTuple):
    """What a stage leaves of a document ("" for nothing), how often it had which reason, and an example of that.

    The example of a document that is dropped is its beginning, if no other is given.
    """

    text: str
    reasons: dict[str, int]
    example: str = ""


Step = Callable[[str], Verdict | None]


class CleaningStage(Family):
    """A cleaning stage. Written `{quality: gopher}`, `{dedup: minhash, threshold: 0.8}`, `{pii: mask}`."""

    noun: ClassVar[str] = "cleaning stage"
    group: ClassVar[str] = ""

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """Reads `{dedup: minhash, threshold: 0.8}` as `{type: minhash, threshold: 0.8}`, the rest like any family."""
        if cls.type:  # a member, whose `type` the parser has read and taken away
            return parse_record(cls, node, path, problems)
        group = next((key for key in GROUPS if isinstance(node.value, dict) and key in node.value), None)
        if group is None:
            return parse_member((cls,), node, path, problems)
        assert isinstance(node.value, dict)
        named = node.value[group]
        allowed = [name for name, member in cls.members.items() if member.group == group]
        if named.value not in allowed:
            found = named.value if isinstance(named.value, str) else named.kind
            problems.append(Problem(f"{path}.{group}", unknown(found, f"{group} stage", allowed), named.mark))
            return INVALID
        fields = {key: child for key, child in node.value.items() if key != group}
        return parse_member((cls,), Node({"type": named, **fields}, node.mark, node.key_marks), path, problems)

    def start(self) -> Step:
        """What is done to one document after the other; None where it is left as it is."""
        raise NotImplementedError


@dataclass
class Counts:
    """What a stage was given and what it left."""

    documents: list[int] = field(default_factory=lambda: [0, 0])
    bytes: list[int] = field(default_factory=lambda: [0, 0])
    changed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, str]] = field(default_factory=list)

    def note(self, before: str, verdict: Verdict | None) -> str:
        """Counts one document; returns what is left of it."""
        after = before if verdict is None else verdict.text
        if not after.strip():
            after = ""
        self.documents[0] += 1
        self.documents[1] += bool(after)
        self.bytes[0] += len(before.encode())
        self.bytes[1] += len(after.encode())
        if verdict is not None:
            self.changed += bool(after) and after != before
            self.reasons.update(verdict.reasons)
            if len(self.examples) < _EXAMPLES:
                shown = " ".join((verdict.example or before).split())
                cut = f"{shown[:_SHOWN]}…" if len(shown) > _SHOWN else shown
                self.examples.append({"reason": next(iter(verdict.reasons), ""), "text": cut})
        return after


class Cleaner:
    """The stages of a source at work. It remembers what it has seen: use one for all the documents, in order."""

    def __init__(self, stages: Sequence[CleaningStage]) -> None:
        self._steps = [(stage, stage.start(), Counts()) for stage in stages]

    def run(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents that are left, with what is left of them; each keeps the group that decides its split."""
        if not self._steps:
            yield from documents
            return
        for document in documents:
            if text := self._clean(document.data.decode()):
                yield document._replace(data=text.encode())

    def _clean(self, text: str) -> str:
        for _, step, counts in self._steps:
            if not text:
                break
            text = counts.note(text, step(text))
        return text

    def record(self) -> list[dict[str, Any]]:
        """Per stage: documents and bytes before and after, documents changed, reasons, and a few examples."""
        return [
            {
                "stage": plain(stage),
                "documents": counts.documents,
                "bytes": counts.bytes,
                "changed": counts.changed,
                "reasons": dict(counts.reasons.most_common()),
                "examples": counts.examples,
            }
            for stage, _, counts in self._steps
        ]
