"""What a section of a study may ask of the study, of the builder of variants and of the plan: as little as it needs.

A section is handed its own part of the file. These protocols are for all else, which is built above the sections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from archlab.search.store.store import Row

if TYPE_CHECKING:
    from pathlib import Path

    from archlab.arch_dsl.inspection.slots import Slot
    from archlab.arch_dsl.language.errors import Mark
    from archlab.arch_dsl.model.model import Model
    from archlab.arch_dsl.patching.patch import Setting
    from archlab.search.data.dataset import Dataset
    from archlab.search.executors.resources import Resources
    from archlab.search.recipe.recipe import Recipe
    from archlab.search.store.store import Store
    from archlab.search.trial.kept_weights import Keep
    from archlab.search.variants.asked import Asked, Rung
    from archlab.search.variants.patches import Patch
    from archlab.search.variants.variant import Built, Variant


Events = Callable[[dict[str, Any]], None]
NextRows = Callable[[list[dict[str, Any]]], Sequence[Row]]


class Baseline(Protocol):
    """The section `report`, as the others see it."""

    @property
    def baseline(self) -> str: ...  # the variant that the others are compared with


class Target(Protocol):
    """The section `match`, as the others see it."""

    @property
    def to(self) -> str: ...  # the variant that the others are matched to

    def goal(self, size: int, key: str) -> list[Any]:
        """What is asked of every variant, given the size and the trial key of the one that they are matched to."""


class Tuned(Protocol):
    """The section `tune`, as the others see it."""

    @property
    def axes(self) -> Mapping[str, object]: ...  # what is tuned, by path


class Slots(Protocol):
    """The section `ablate`, as the others see it."""

    @property
    def slots(self) -> Sequence[Slot]: ...  # the places in which its models differ


class Question(Protocol):
    """What a section sees of its study: the fields beside its own, and where they stand in the file."""

    @property
    def study(self) -> str: ...  # its name
    @property
    def model(self) -> Model: ...  # the base
    @property
    def train(self) -> Recipe: ...  # the recipe that variants change
    @property
    def components(self) -> Mapping[str, Patch]: ...  # by name, what designs and variants are made of
    @property
    def variants(self) -> Mapping[str, Patch]: ...  # by name, those of a design among them
    @property
    def grid(self) -> Mapping[str, object]: ...  # its axes, by path
    @property
    def ladder(self) -> object | None: ...  # its sizes, from small to large
    @property
    def match(self) -> Target | None: ...  # what variants are matched to
    @property
    def tune(self) -> Tuned | None: ...  # what is tuned
    @property
    def search(self) -> object | None: ...  # whether anything is searched
    @property
    def space(self) -> object | None: ...  # what a search varies
    @property
    def prune(self) -> object | None: ...  # what ends trials early
    @property
    def ablate(self) -> Slots | None: ...  # what two models differ in
    @property
    def cells(self) -> Sequence[str]: ...  # the names of the variants in the cells of the grid, the first of very many
    @property
    def file(self) -> Path | None: ...  # the file it came from
    @property
    def keep(self) -> Keep: ...  # which weights are kept
    @property
    def report(self) -> Baseline: ...  # what the others are compared with
    @property
    def resources(self) -> Resources: ...  # what a trial takes

    def mark(self, name: str = "") -> Mark | None:
        """Where a field was written, if it came from a file."""


class Builds(Protocol):
    """What sections need of the builder of variants."""

    @property
    def study(self) -> Question: ...  # the study whose variants are built

    def variant(self, asked: Asked, target: Variant | None, matched: bool = True) -> Variant:
        """One variant, if there is a `target` matched to it, or as it is written. Raises SpecError."""

    def build(self, asked: Asked, target: Variant | None, dataset: Dataset, recipe: Recipe) -> Built:
        """The model of a variant, matched, resolved and costed. Raises SpecError."""

    def recipe(self, settings: Iterable[Setting], rung: Rung | None = None, over: Iterable[Setting] = ()) -> Recipe:
        """The recipe with these changes, at a rung; `over` is changed last. Raises SpecError."""

    def settle(self, recipe: Recipe) -> Recipe:
        """The recipe with what it leaves open as it was settled for the study, once it was."""

    def data(self, recipe: Recipe) -> Dataset:
        """The prepared data of a recipe. Raises SpecError."""

    def given(self, path: str) -> Any:
        """What stands at a path of the base, as a condition compares it. Raises SpecError."""


class Planned(Protocol):
    """What sections need of a plan."""

    searched: dict[str, Any]  # what a search tells the record
    omitted: dict[str, str]  # combinations of a design that make no sense, and why

    @property
    def coordinates(self) -> Mapping[str, Any]: ...  # what was measured of each series of a ladder that transfers
    @property
    def parts(self) -> Sequence[object]: ...  # its sections at work
    @property
    def study(self) -> Question: ...  # the study that is planned
    @property
    def builder(self) -> Builds: ...  # what built its variants
    @property
    def variants(self) -> list[Variant]: ...  # those of the study; it grows while a search proposes
    @property
    def seeds(self) -> list[int]: ...  # the seeds that a variant's repeats have at most; the first one tunes
    @property
    def absent(self) -> list[str]: ...  # the labels of those of its data that have yet to be downloaded
    @property
    def trials(self) -> int: ...  # how many the study takes when all run to their end, with what is known to be added

    def rows(self, trials: list[dict[str, Any]]) -> list[Row]:
        """The trials that should exist, given those that do."""

    def known(self, store: Store) -> list[dict[str, Any]]:
        """The rows of those trials that are known to be wanted and stand in this store, by whichever study."""

    def record(self) -> dict[str, Any]:
        """The study record that the store keeps."""
