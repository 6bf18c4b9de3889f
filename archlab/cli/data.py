"""`archlab data`: what became of a study's text, made and shown without training; and a few corpora by name."""

from __future__ import annotations

import glob
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from archlab.arch_dsl.language.errors import SpecError, unknown
from archlab.search.data.dataset import Dataset
from archlab.search.data.downloads import CORPORA, get
from archlab.search.data.overlap import WORDS, measure, of_files, share
from archlab.search.formatting.numbers import plain_console
from archlab.search.planning.builder import Builder
from archlab.search.recipe.recipe import Recipe
from archlab.search.sections.ladder.rungs import climbed
from archlab.search.study.asked import asked_variants
from archlab.search.study.load import load_study
from archlab.search.study.study import Study


def data_of(study: Study, root: Path) -> dict[str, tuple[Dataset, Recipe]]:
    """The data sets of a study's variants and their stages by identity, made where they are not there, each with the
    first recipe that trains on it. Raises SpecError."""
    builder = Builder(study, root, fetch=True)
    found: dict[str, tuple[Dataset, Recipe]] = {}
    for asked in climbed(study.ladder, builder, asked_variants(study)):
        recipe = builder.recipe(asked.settings, asked.rung)
        first, *later = recipe.whole
        dataset = builder.datasets.of(first)
        found.setdefault(dataset.identity, (dataset, first))
        for index, (stage, own) in enumerate(zip(recipe.stages, later, strict=True)):
            dataset = builder.datasets.staged(stage, own, dataset, f"train.stages.{index}")
            found.setdefault(dataset.identity, (dataset, own))
    return found


def described(dataset: Dataset, recipe: Recipe | None, against: Mapping[str, Path]) -> dict[str, Any]:
    """All that is known of a data set, as JSON data. Epochs are those of the recipe's tokens."""
    overlaps = {**measure(dataset), **(of_files(dataset, against) if against else {})}
    density = {name: dataset.bytes_per_token(name) for name in dataset.tokens} if dataset.has_text else {}
    streams = dataset.streams()
    epochs = recipe.epochs(dataset) if recipe else [None] * len(streams)
    domains = [
        {
            "name": domain.name,
            "share": domain.share,
            "train_tokens": len(tokens) - 1,
            "epochs": each,
            "documents": {name: end - first for name, (first, end) in domain.documents.items()},
        }
        for domain, (_, tokens), each in zip(dataset.domains, streams, epochs, strict=bool(dataset.domains))
    ]
    return {
        "identity": dataset.identity,
        "folder": str(dataset.folder),
        "labels": dataset.header["labels"],
        "vocab": dataset.vocab,
        **dataset.description,
        "bytes_per_token": density,
        "epochs": sum(each or 0 for each in epochs) if recipe and len(epochs) == 1 else None,
        "domains": domains,
        "overlap": {name: {**counts, "share": share(counts)} for name, counts in overlaps.items()},
    }


def show(
    target: str, root: Path, overrides: Mapping[str, Any], plugins: bool, against: tuple[str, ...], as_json: bool
) -> None:
    """Prints what became of the data of a study's file, or of one data set of the store by the start of its identity.

    Raises SpecError.
    """
    if Path(target).suffix in (".yaml", ".yml"):
        made = data_of(load_study(target, overrides, plugins, root.parent), root)
        found: list[tuple[Dataset, Recipe | None]] = list(made.values())
    else:
        found = [(_of_identity(target, root), None)]
    files = _files(against)
    told = [described(dataset, recipe, files) for dataset, recipe in found]
    if as_json:
        print(json.dumps(told))
        return
    for each in told:
        _print(each)


def prepare(target: str, root: Path, overrides: Mapping[str, Any], plugins: bool, as_json: bool) -> None:
    """Makes the data sets of a study and says which they are. Raises SpecError."""
    found = data_of(load_study(target, overrides, plugins, root.parent), root)
    records = [dataset.record() for dataset, _ in found.values()]
    if as_json:
        print(json.dumps(records))
        return
    for record in records:
        what = f"{record['source']}, {record['tokenizer']}: {record['train_tokens']:,} training tokens"
        print(f"{record['identity']}  {what}")
    print("nothing was trained")


def fetch(name: str | None, folder: Path | None, as_json: bool) -> None:
    """Downloads a corpus by name, or lists those that there are. Raises SpecError, OSError, DataError."""
    if name is None:
        rows = [
            {"name": key, "bytes": each.size, "holds": each.holds, "url": each.url} for key, each in CORPORA.items()
        ]
        if as_json:
            print(json.dumps(rows))
            return
        for key, each in CORPORA.items():
            print(f"{key:<16} {each.size / 1e6:6.1f} MB  {each.holds}")
        print("\narchlab data get NAME downloads one into data/NAME")
        return
    if name not in CORPORA:
        raise SpecError.of("", unknown(name, "corpus", CORPORA))
    files = get(CORPORA[name], folder or Path("data") / name, _progress if sys.stderr.isatty() else lambda *_: None)
    if as_json:
        print(json.dumps([str(file) for file in files]))
        return
    for file in files:
        print(file)
    print(f'\ntrain:\n  data: {{text: "{files[0]}"}}')


def _progress(done: int, size: int) -> None:
    print(f"\r{done / 1e6:.1f} of {size / 1e6:.1f} MB", end="\n" if done >= size else "", file=sys.stderr, flush=True)


def _of_identity(text: str, root: Path) -> Dataset:
    """The data set whose identity begins like that. Raises SpecError, DataError."""
    names = [file.parent.name for file in root.glob(f"{glob.escape(text)}*/data.json")]
    if len(names) != 1:
        how = (
            "is no study file (.yaml), and no data set in"
            if not names
            else f"is the start of {len(names)} data sets in"
        )
        raise SpecError.of("", f"'{text}' {how} {root}")
    return Dataset.open(root, names[0])


def _files(patterns: tuple[str, ...]) -> dict[str, Path]:
    """The files of globs by name. Raises SpecError where a glob matches none."""
    found: dict[str, Path] = {}
    for pattern in patterns:
        names = sorted(glob.glob(pattern, recursive=True))
        if not names:
            raise SpecError.of("--against", f"'{pattern}' matches no file")
        found |= {name: Path(name) for name in names if Path(name).is_file()}
    return found


def _print(told: dict[str, Any]) -> None:
    console = plain_console()
    labels = told["labels"]
    head = f"  {labels['source']}, {labels['tokenizer']} ({told['vocab']:,} tokens)"
    console.print(Text.assemble((f"data {told['identity']}", "bold"), head))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("split", "documents", "bytes", "tokens", "bytes/token"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for name, counts in told["splits"].items():
        density = f"{told['bytes_per_token'][name]:.3f}" if told["bytes_per_token"] else "\N{EN DASH}"
        size = f"{counts['bytes']:,}" if told["bytes_per_token"] else "\N{EN DASH}"
        table.add_row(name, f"{counts['documents']:,}", size, f"{counts['tokens'] - 1:,}", density)
    console.print(table)
    copies, unused = (told[name] for name in ("duplicate_bytes", "unused_bytes"))
    console.print(f"{copies:,} bytes were copies of a document, {unused:,} are held out beyond the caps")
    if told["epochs"]:
        console.print(f"a trial reads the training split {told['epochs']:.2g} times")
    _print_domains(told, console)
    for name, stages in told.get("cleaning", {}).items():
        where = f" of {name}" if name else ""
        for stage in stages:
            console.print(Text(_stage_line(stage, where)))
            for example in stage["examples"]:
                console.print(Text(f"  {example['reason']}: {example['text']}", style="dim"))
    for name, counts in told["overlap"].items():
        console.print(
            Text(
                f"{name}: {counts['share']:.1%} of its {counts['ngrams']:,} {WORDS}-grams of words are in the training "
                f"text; {counts['documents_shared']:,} of {counts['documents']:,} documents have one"
            )
        )


def _print_domains(told: dict[str, Any], console: Any) -> None:
    if not told["domains"]:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("domain", "share", "training tokens", "epochs of a trial", "test documents"):
        table.add_column(name, justify="left" if name == "domain" else "right")
    for domain in told["domains"]:
        epochs = "\N{EN DASH}" if domain["epochs"] is None else f"{domain['epochs']:.2g}"
        tokens, documents = f"{domain['train_tokens']:,}", f"{domain['documents']['test']:,}"
        table.add_row(domain["name"], f"{domain['share']:.1%}", tokens, epochs, documents)
    console.print(table)


def _stage_line(stage: dict[str, Any], where: str) -> str:
    """`clean gopher: 62 → 60 documents, 31,022 → 30,911 bytes (2 fewer than 50 words)`"""
    (before, after), (size, left) = stage["documents"], stage["bytes"]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in stage["reasons"].items())
    changed = f", {stage['changed']:,} of them changed" if stage["changed"] else ""
    what = f"{before:,} → {after:,} documents{changed}, {size:,} → {left:,} bytes"
    return f"clean{where} {stage['stage']['type']}: {what}" + (f" ({reasons})" if reasons else "")
