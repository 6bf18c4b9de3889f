"""How much of what it was trained on a model can be made to say again."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch

from archlab.arch_dsl.compiler.generation import stream
from archlab.arch_dsl.language.spec import Count, added
from archlab.search.data import mixing
from archlab.search.data.batches import IGNORE, windows
from archlab.search.data.documents.draws import Ints
from archlab.search.evaluation.downstream.text_model import TextModel, not_continued, text_model
from archlab.search.evaluation.family import About, Curve, Found, Measure, Subject
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.module import seeds_of
from archlab.search.trial.trial import Trial


@Measure.register("memorisation")
class Memorisation(Measure):
    """The share of training windows that can be extracted: given their first `prompt` tokens, the likeliest next
    `continuation` tokens, one after another, are exactly theirs (arXiv:2202.07646, section 3.1).

    `sequences` windows are asked about, evenly spaced over those that the trial read, and as many of the test text,
    which it did not read: what can be guessed. `repeats` is how often the trial read its training text.
    """

    in_all = False
    prompt: Count = added(default=50)
    continuation: Count = added(default=50)
    sequences: Count = added(default=200)

    @property
    def ending(self) -> str:
        return self.unusual("prompt", continuation="for", sequences="of")

    def refusal(self, about: About) -> str | None:
        if why := not_continued(about):
            return why
        if about.recipe.objective.of_examples:
            return "examples have their own lengths: there are no windows of training text"
        if self.prompt + self.continuation > about.recipe.context:
            return f"{self.prompt} + {self.continuation} tokens are more than a window has, {about.recipe.context}"
        if about.dataset.tokens["test"] - 1 < self.prompt + self.continuation:
            return "the test text is shorter than one of its windows"
        return None

    def compute(self, subject: Subject) -> Found:
        about, recipe = subject.about, subject.about.recipe
        model = text_model(subject, recipe.context)
        rows, read = recipe.rows_before(recipe.steps), sum(len(stream) for _, stream in about.dataset.streams())
        own = self._matched(model, _trained_on(subject, _spaced(rows, self.sequences)))
        others = self._matched(model, self._held_out(about))
        length = np.arange(1, self.continuation + 1)
        curves = {}
        for name, matched in (("extracted_by_length", own), ("extracted_by_length_held_out", others)):
            share = [float((matched >= each).mean()) for each in length]
            curves[name] = Curve(length.tolist(), list(share), [len(matched)] * len(length))
        values = {
            "extracted": float((own == self.continuation).mean()),
            "extracted_held_out": float((others == self.continuation).mean()),
            "repeats": rows * recipe.context / read,
        }
        return Found(values, curves).with_ending(self.ending)

    def _held_out(self, about: About) -> Ints:
        """Windows of the test text `[windows, prompt + continuation]`, evenly spaced."""
        length = self.prompt + self.continuation
        inputs, targets = windows(about.dataset.split("test"), length)
        whole = np.flatnonzero((targets != IGNORE).all(1))
        found: Ints = inputs[whole[_spaced(len(whole), self.sequences)]]
        return found

    def _matched(self, model: TextModel, rows: Ints) -> Ints:
        """How many tokens after its prompt each row is continued by as it goes on itself."""
        found = []
        size = max(1, model.at_once // (self.prompt + self.continuation))
        for part in np.split(rows, range(size, len(rows), size)):
            with model.computing() as device:
                given = torch.from_numpy(part[:, : self.prompt]).to(device)
                said = []
                for tokens in islice(stream(model.model, given), self.continuation):
                    model.tick()
                    said.append(tokens.cpu().numpy())
            same = np.stack(said, 1) == part[:, self.prompt : self.prompt + self.continuation]
            found.append(np.cumprod(same, 1).sum(1))
        return np.concatenate(found)


def _spaced(total: int, count: int) -> Ints:
    """At most `count` of so many places, evenly spaced, each once."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))


def _trained_on(subject: Subject, places: Ints) -> Ints:
    """Rows of training `[rows, context + 1]` by their places in the order in which the trial's last stage read them."""
    assert subject.folder is not None
    trial = Trial.from_json((subject.folder / "trial.json").read_text())
    recipe, streams = subject.about.recipe, subject.about.dataset.streams()
    order = seeds_of(trial, recipe).data + len(load_recipe(trial.recipe, "recipe").stages)
    return np.concatenate([mixing.rows(streams, order, int(place), 1, recipe.context) for place in places])
