"""A model by what a user types: a model's YAML file, a study's file with or without `:variant`, a name of the zoo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.arch_dsl.language.errors import SpecError, nearest, shorten
from archlab.arch_dsl.language.source import read
from archlab.arch_dsl.model.model import Model
from archlab.search.models.print_model import Shown, variant_of
from archlab.search.planning.plan import plan
from archlab.search.study.load import load_study

_SHOWN = 12  # names of the zoo that an error lists


@dataclass(frozen=True)
class Found:
    """A model with the name that it is shown by. Only one of a study has all its sizes."""

    name: str
    model: Model


def find_model(text: str, data_root: Path, *, plugins: bool = False) -> Found:
    """The model that a text names: `model.yaml`, `study.yaml`, `study.yaml:variant`, `gpt2`, `gpt2/medium`.

    A study's model is that of its baseline, or of the variant, with its sizes solved. Raises SpecError.
    """
    file, colon, variant = text.partition(":")
    if Path(text).is_file():
        file, colon, variant = text, "", ""
    if Path(file).is_file():
        if _is_study(file):
            chosen = variant_of(
                plan(load_study(file, None, plugins, data_root.parent), data_root), variant if colon else None
            )
            return Found(f"{Path(file).stem}:{chosen.name}", chosen.model)
        if colon:
            raise SpecError.of("", f"{file} holds a model, which has no variants; found ':{variant}'")
        return Found(Path(file).stem, arch_dsl.load(file))
    name, slash, size = text.partition("/")
    if name in zoo.names():
        return Found(text, zoo.load(name, size if slash else None))
    raise SpecError.of("", _no_model(text, name))


def model_alone(text: str) -> Shown | None:
    """The model of a file without a study, or of the zoo, with examples of the sizes that it leaves open; None for a
    study. Raises SpecError."""
    name = text.partition("/")[0]
    if not Path(text).exists() and Path(text).suffix not in (".yaml", ".yml") and name not in zoo.names():
        raise SpecError.of("", _no_model(text, name))
    if _is_study(text) if Path(text).is_file() else name not in zoo.names():
        return None
    return Shown.alone(text, find_model(text, Path()).model)


def _is_study(file: str) -> bool:
    """Whether a YAML file holds a study, not a model alone."""
    fields = read(file).value
    return isinstance(fields, dict) and ("study" in fields or "train" in fields)


def _no_model(text: str, name: str) -> str:
    names = zoo.names()
    meant = nearest(name, names)
    hint = f"; did you mean '{meant}'?" if meant else ""
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"'{shorten(text)}' is no file, and no model of the zoo{hint} ({listed})"
