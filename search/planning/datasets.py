"""The data sets that the recipes of a study train on, prepared once each."""

from __future__ import annotations

import hashlib
from pathlib import Path

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data.absent import Absent
from archlab.search.data.dataset import HELD_OUT, Dataset
from archlab.search.data.prepare import prepare, require
from archlab.search.recipe.recipe import Recipe
from archlab.search.recipe.stage import Stage
from archlab.search.study.study import Study
from archlab.search.utils.canonical import canonical_json


class Datasets:
    """Those of one study, in the folder `root`; those that would have to be downloaded only if they are to `fetch`."""

    def __init__(self, study: Study, root: Path, *, fetch: bool) -> None:
        self.study, self.root, self.fetch = study, root, fetch
        self.prepared: dict[str, Dataset | SpecError] = {}
        self.test_texts: dict[str, str] = {}

    def of(self, recipe: Recipe, like: Dataset | None = None, path: str = "train") -> Dataset:
        """The prepared data of a recipe, in the tokens of another data set if there is one. Raises SpecError."""
        alike = like.identity if like else None
        key = canonical_json([canonical(recipe.data), canonical(recipe.tokenizer), alike])
        if key not in self.prepared:
            try:
                self.prepared[key] = self._made(recipe, like, path)
            except SpecError as error:
                self.prepared[key] = error  # thirty variants don't wait thirty times for a network that is not there
        found = self.prepared[key]
        if isinstance(found, SpecError):
            raise found
        return self.enough(recipe, found, path)

    def _made(self, recipe: Recipe, like: Dataset | None, path: str) -> Dataset:
        source, tokenizer = recipe.data, recipe.tokenizer
        base = self.study.file.parent if self.study.file else None
        if self.fetch or not ((like and like.absent) or source.absent(self.root)):
            return prepare(source, tokenizer, self.root, base, path, like)
        source.find(base, f"{path}.data")  # is what can be refused without it
        return Absent.of(source, tokenizer, f"{path}.tokenizer", base)

    def staged(self, stage: Stage, recipe: Recipe, before: Dataset, path: str) -> Dataset:
        """The data of a stage: its own in the tokens of that before it, or that. Raises SpecError."""
        if stage.data is None:
            return self.enough(recipe, before, path)
        if not before.has_text and not stage.data.holds_tokens:
            message = "is text, and what was trained on before is tokens, whose tokenizer is not known"
            raise SpecError.of(f"{path}.data", message, stage.mark("data"))
        found = self.of(recipe, before, path)
        if (found.vocab, found.eod) != (before.vocab, before.eod):
            what = f"{found.vocab:,} tokens, of which {found.eod} ends a document"
            message = f"has {what}; before it were {before.vocab:,} and {before.eod}, and a stage reads the same tokens"
            raise SpecError.of(f"{path}.data", message, stage.mark("data"))
        return found

    def enough(self, recipe: Recipe, dataset: Dataset, path: str = "train") -> Dataset:
        """The data set, if it holds what the recipe asks of it. Raises SpecError."""
        if dataset.absent:
            return dataset
        mark = recipe.mark("data") or self.study.mark("train")
        if recipe.objective.of_examples:
            if complaint := _not_its_examples(recipe, dataset):
                field, message = complaint
                raise SpecError.of(f"{path}.{field}", message, recipe.mark(field) or mark)
            return dataset
        require(dataset, recipe.context, recipe.sequences, path, mark)
        for split in () if recipe.objective.every else HELD_OUT:
            if (found := dataset.tokens[split] - 1) < recipe.context:
                message = f"of {recipe.context} tokens does not fit into the {split} text, which has {found:,}"
                raise SpecError.of(f"{path}.context", message, recipe.mark("context") or self.study.mark("train"))
        return dataset

    def test_text(self, recipe: Recipe, dataset: Dataset) -> str:
        """What tells one test text from another: its source, how it falls into documents, and where not all of it is
        predicted, what is."""
        source = canonical_json(recipe.data.held_out())
        if not recipe.objective.every:
            asked = [dataset.identity, recipe.context, canonical(recipe.objective)]
            source = canonical_json([source, *asked])
        if dataset.absent:
            return source
        if source not in self.test_texts:
            lengths = canonical_json(dataset.documents("test").bytes.tolist())
            self.test_texts[source] = hashlib.sha256(f"{source}{lengths}".encode()).hexdigest()[:16]
        return self.test_texts[source]


def _not_its_examples(recipe: Recipe, dataset: Dataset) -> tuple[str, str] | None:
    """The field that keeps an objective of examples from these data, and why, or None."""
    if recipe.objective.type != "answers":
        why = "targets needs examples: data whose source says with `input` what is given"
        return ("objective", why) if dataset.inputs("train") is None else None
    if dataset.answers("train") is None:
        return "objective", "answers needs a probe: data that say which of their tokens are answers"
    if recipe.context < (longest := int(dataset.documents("train").tokens.max()) - 1):
        return "context", f"must be at least {longest}, the length of the probe's sequences, found {recipe.context}"
    return None
