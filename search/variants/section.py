"""A section of a study file before anything is trained: what it asks of the study, and of the plan.

A section lives twice: what it leaves in the study's record is read again by its part of the report
(archlab.search.results.told).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Spec
from archlab.arch_dsl.patching.patch import Setting
from archlab.search.store.store import Row, Store
from archlab.search.variants.asked import Asked
from archlab.search.variants.asks import Builds, Events, NextRows, Planned, Question
from archlab.search.variants.variant import Variant

Made = Mapping[str, tuple[Asked, Variant | None]]


class Part:
    """A section at work in one plan: it trains variants of its own, or says which of the study's are trained.

    It says what concerns it, and inherits the rest, which changes nothing.
    """

    role: ClassVar[str] = ""  # of rows of its own; the trial table knows which there are
    variants: Mapping[str, Variant] = {}  # trained for it, each with one seed, by the variant that it stands for
    left_out: Collection[str] = ()  # variants that are not trained, once it has decided

    def look(self, record: dict[str, Any], trials: list[dict[str, Any]]) -> None:
        """Decides what the study's rows let it decide, as a function of these and of the record."""

    def wants(self, variant: str) -> bool:
        """Whether a variant of the study is to be trained by now."""
        return True

    def arranged(self, rows: list[Row]) -> list[Row]:
        """The study's rows in the order in which they are wanted."""
        return rows

    def record(self, variant: str) -> dict[str, Any]:
        """What the record of a variant says of it."""
        return {}


class Section(Spec):
    """A part of a study file with a key of its own. It says what concerns it; what it inherits does nothing.

    A subclass with a `key` is entered by being defined, and found as a file of archlab/search/sections.
    """

    key: ClassVar[str] = ""  # in the file and in the study's record
    within: ClassVar[str] = ""  # the section of the file that it stands in, if any
    known: ClassVar[dict[str, type[Section]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "key" in cls.__dict__:
            Section.known[cls.key] = cls

    def problems(self, study: Question) -> Iterable[Problem]:
        """What is wrong with it beside the other sections of the study."""
        return ()

    def crossing(self) -> Iterable[list[tuple[str, tuple[Setting, ...]]]]:
        """Lists of cells that every variant is crossed with: the name of each (`recipe=as is`), and what it sets."""
        return ()

    def part(self, builds: Builds, variants: list[Variant], made: Made) -> Part | None:
        """What it does in a plan, given the study's variants and what each was made of. Raises SpecError."""
        return None

    def proposed(self, seeds: int) -> int:
        """Trials that it asks for once others have ended, of variants that are not known yet."""
        return 0

    def worth(self, planned: Planned) -> float:
        """How many trials of a mean variant take as long to train as those that `proposed` counts."""
        return self.proposed(len(planned.seeds))

    def record(self, planned: Planned) -> Any:
        """What the study's record keeps under its key; nothing, if that is empty."""
        return {}

    def lines(self, planned: Planned) -> Iterable[str]:
        """What `archlab plan` says of it."""
        return ()

    @classmethod
    def edited(cls, before: Any, now: Any) -> Iterable[str]:
        """What `archlab plan` says where the study was run with another one: its two records, None without one."""
        return ()

    def run_rows(self, next_rows: NextRows, planned: Planned, store: Store, slots: int, tell: Events) -> NextRows:
        """What a run takes its rows from, while `slots` trials run at once; by default what the plan says.

        What it tells a run is an event of its key: `messages`, and where it decides `left_out` and all `trials`.
        """
        return next_rows
