"""What `archlab import` and `archlab export` do: weights into our form, and out of it or into another library's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import Model, SpecError
from archlab.arch_dsl.compiler.modules import stored
from archlab.arch_dsl.compiler.shapes import stored_shapes
from archlab.arch_dsl.language.errors import unknown
from archlab.arch_dsl.model.model import kept
from archlab.arch_dsl.weights.conversion import export_tensors, import_tensors
from archlab.arch_dsl.weights.files import MODEL, read_checkpoint, read_weights, write_tensors, write_weights
from archlab.arch_dsl.weights.layout import Layout
from archlab.search.store.store import Store
from archlab.search.trial import checkpoint
from archlab.search.trial.kept_weights import WEIGHTS
from archlab.search.trial.trial import Trial

_KEY_DIGITS = 6  # of a trial's key, at least, where it is named by its start


@dataclass(frozen=True)
class Imported:
    """What an import wrote: the file, its digest, what it holds, and which of their tensors are no parameters."""

    file: Path
    sha256: str
    parameters: int
    tensors: int
    fresh: list[str]
    ignored: list[str]


def import_checkpoint(source: Path, model: Model, layout: Layout, out: Path) -> Imported:
    """Reads a checkpoint in a layout and writes it as ours, a YAML of the spec beside it.

    `out` is a .safetensors file or a new folder. Raises SpecError where the checkpoint is not of this model, and where
    `out` exists.
    """
    file = _new(out if out.suffix == ".safetensors" else out / MODEL)
    resolved = arch_dsl.resolve(model)
    given = read_checkpoint(source)
    found = import_tensors(layout, resolved, given)
    if found.fresh:
        module = arch_dsl.compile(resolved)
        values = stored(module)
        found.tensors.update({name: values[name].detach() for name in found.fresh})
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = write_weights(file, resolved, found.tensors)
    file.with_suffix(".yaml").write_text(arch_dsl.dump(resolved))
    count = sum(value.numel() for value in found.tensors.values())
    return Imported(file, digest, count, len(given), found.fresh, found.ignored)


def export_weights(source: str, store: Path, layout: Layout | None, out: Path) -> Imported:
    """Writes the weights of a trial, a checkpoint or an imported model: as ours, or in a layout of another library.

    `source` is a file, a folder, `STUDY/VARIANT[/SEED]` or the start of a trial's key. Raises SpecError.
    """
    file = _new(out)
    model, tensors = weights_of(source, store)
    model = kept(model)
    tensors = {name: tensors[name] for name in stored_shapes(model)}  # what layers share once
    count = sum(value.numel() for value in tensors.values())
    file.parent.mkdir(parents=True, exist_ok=True)
    if layout is None:
        digest = write_weights(file, model, tensors)
        file.with_suffix(".yaml").write_text(arch_dsl.dump(model))
        return Imported(file, digest, count, len(tensors), [], [])
    theirs = export_tensors(layout, model, tensors)
    return Imported(file, write_tensors(file, theirs, {"format": "pt"}), count, len(theirs), [], [])


def _new(file: Path) -> Path:
    """A path that nothing is written over."""
    for path in (file, file.with_suffix(".yaml")):
        if path.exists():
            raise SpecError.of(str(path), "exists; weights are never overwritten")
    return file


def weights_of(source: str, store: Path) -> tuple[Model, Mapping[str, Tensor]]:
    """The resolved model and the weights of a run, a trial, a checkpoint, or what `archlab import` wrote.

    Raises SpecError, StoreRefused where there is no store, ValueError for a study that it does not have.
    """
    path = Path(source)
    if path.suffix == ".safetensors" or (path / MODEL).is_file():
        return read_weights(path)
    if path.suffix == ".pt" and path.is_file():
        step = path.stem.rpartition("-")[2]
        folder = path.parent.parent if path.parent.name == WEIGHTS else path.parent
        return _of_trial(folder, int(step) if step.isdigit() else None, path.parent)
    return _of_trial(path if (path / "trial.json").is_file() else folder_of(source, store), None)


def _of_trial(folder: Path, step: int | None, held: Path | None = None) -> tuple[Model, Mapping[str, Tensor]]:
    """The model of a trial and its weights after a step, or at the last checkpoint, from the folder that holds them."""
    held = held or folder
    if not (folder / "trial.json").is_file():
        raise SpecError.of(str(folder), "is no folder of a trial: it has no trial.json")
    steps = [step] if step is not None else checkpoint.steps_in(held)
    if not steps:
        raise SpecError.of(
            str(folder), "has no checkpoint: the trial has not been trained, it diverged, or its study keeps none"
        )
    trial = Trial.from_json((folder / "trial.json").read_text())
    try:
        state = checkpoint.load(held, steps[0])
    except (ValueError, OSError) as error:
        raise SpecError.of(str(checkpoint.path_of(held, steps[0])), f"can't be used: {error}") from error
    return arch_dsl.resolve(arch_dsl.load(trial.model)), state["model"]


def folder_of(source: str, store: Path) -> Path:
    """The folder of `STUDY/VARIANT[/SEED]`, or of the trial whose key starts so."""
    with Store.open(store, create=False) as opened:
        study, slash, rest = source.partition("/")
        if not slash:
            found = opened.keys_from(source) if len(source) >= _KEY_DIGITS else []
            if len(found) != 1:
                message = "is no file, no folder, no STUDY/VARIANT and not the start of one trial's key"
                raise SpecError.of(source, message)
            return opened.trial_folder(found[0])
        opened.study(study)  # or there is none
        rows = [row for row in opened.study_trials(study) if row["role"] == "repeat" and row["state"] == "complete"]
    variant, slash, seed = rest.rpartition("/")
    if not slash or not seed.isdigit():
        variant, seed = rest, "0"
    names = sorted({row["variant"] for row in rows})
    if variant not in names:
        raise SpecError.of(source, unknown(variant, f"variant of {study} with a result", names))
    chosen = [row for row in rows if row["variant"] == variant and row["seed"] == int(seed)]
    if not chosen:
        raise SpecError.of(source, f"{variant} has no result with seed {seed}")
    return Path(chosen[0]["folder"])


def print_imported(done: Imported, as_json: bool) -> None:
    """What was written, as JSON or as lines."""
    if as_json:
        print(json.dumps({**asdict(done), "file": str(done.file)}))
        return
    print(f"wrote {done.file}: {done.parameters:,} parameters from {done.tensors} tensors, sha256 {done.sha256[:16]}…")
    for name in done.fresh:
        print(f"  freshly initialised: {name}")
    if done.ignored:
        print(f"  left out, as they are no parameters: {', '.join(done.ignored)}")
