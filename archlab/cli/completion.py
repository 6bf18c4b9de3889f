"""What a shell completes: studies of the folder and the store, variants, models of the zoo, primitives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem


def studies(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Study files of the folder that is being typed, and the studies of the store."""
    return [*_studies_of_store(ctx, typed), *files(ctx, parameter, typed)]


def files(_ctx: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Study files of the folder that is being typed, and the folders in it."""
    from archlab.search.study.files import studies_in

    given = Path(typed)
    folder = given if typed.endswith("/") else given.parent
    if not folder.is_dir():
        return []
    names = [*map(str, studies_in(folder)), *(f"{path.name}/" for path in folder.iterdir() if _shown(path))]
    return _starting(typed, (name if str(folder) == "." else f"{folder}/{name}" for name in sorted(names)))


def trials(ctx: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """STUDY/VARIANT of the store."""
    from archlab.search.store.store import Store, StoreError

    study, slash, _ = typed.partition("/")
    if not slash:
        return [CompletionItem(f"{item.value}/") for item in _studies_of_store(ctx, typed)]
    try:
        with Store.open(_root(ctx), create=False) as store:
            variants = [variant["name"] for variant in store.study(study)["variants"]]
    except StoreError:
        return []
    return _starting(typed, (f"{study}/{name}" for name in variants))


def variants(ctx: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The variants that the study's file writes, or that the store has of it."""
    from archlab.arch_dsl.language.errors import SpecError
    from archlab.arch_dsl.language.include import read_whole
    from archlab.search.store.store import Store, StoreError

    study = str(ctx.params.get("study") or next(iter(ctx.args), ""))  # the latter while an option has no value yet
    try:
        if study.endswith((".yaml", ".yml")):
            written = read_whole(study).plain().get("variants") or {}
            return _starting(typed, map(str, written))
        with Store.open(_root(ctx), create=False) as store:
            return _starting(typed, (variant["name"] for variant in store.study(study)["variants"]))
    except (StoreError, SpecError, OSError):
        return []


def zoo_models(_ctx: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The models of the zoo, and once a slash is there their sizes."""
    from archlab.arch_dsl import zoo

    name, slash, _ = typed.partition("/")
    if slash:
        return _starting(typed, (f"{name}/{size}" for size in zoo.entry(name).sizes) if name in zoo.names() else ())
    return _starting(typed, zoo.names())


def models(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """A study's file, or a model of the zoo."""
    return [*files(ctx, parameter, typed), *zoo_models(ctx, parameter, typed)]


def primitives(_ctx: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The names of primitives."""
    from archlab.arch_dsl.catalogue.describe import families

    return _starting(typed, sorted({name for members in families().values() for name in members}))


def _studies_of_store(ctx: click.Context, typed: str) -> list[CompletionItem]:
    from archlab.search.store.store import Store, StoreError

    try:
        with Store.open(_root(ctx), create=False) as store:
            return _starting(typed, (row["name"] for row in store.studies()))
    except StoreError:
        return []


def _root(ctx: click.Context) -> Path:
    from archlab.search.store.addresses import store_root

    return store_root(ctx.params.get("store"))


def _starting(typed: str, names: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(typed)]


def _shown(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith((".", "__"))
