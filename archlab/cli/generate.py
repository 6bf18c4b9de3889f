"""The verb that shows what a trained model writes: generate."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from archlab.cli import completion
from archlab.cli.kit import JSON, PLUGIN, STORE, store_folder, verb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from archlab.search.evaluation.downstream.text_model import TextModel
    from archlab.search.store.store import Store


@click.command()
@click.argument("trial", metavar="TRIAL", shell_complete=completion.trials)
@click.option("--prompt", default="", help="What it goes on from; - reads it from stdin, nothing begins a document.")
@click.option("--tokens", default=100, show_default=True, type=click.IntRange(min=1), help="How many at most.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0: the likeliest.")
@click.option("--top-k", type=click.IntRange(min=1), help="Draw from so many of the likeliest tokens.")
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), help="Draw from the likeliest that have this share."
)
@click.option("--samples", default=1, show_default=True, type=click.IntRange(min=1), help="How many texts.")
@click.option("--seed", default=0, show_default=True, help="The same seed draws the same texts.")
@STORE
@PLUGIN
@JSON
@verb
def generate(
    trial: str,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    samples: int,
    seed: int,
    store: str | None,
    as_json: bool,
) -> None:
    """Continue a text with the model of a finished trial, until the document ends.

    TRIAL is STUDY/VARIANT[/SEED], or the start of a trial's key. At temperature 0 every token is the likeliest one.
    """
    from archlab.arch_dsl.compiler.generation import Sampling, seed_of
    from archlab.search.store.store import Store

    given = sys.stdin.read() if prompt == "-" else prompt
    with Store.open(store_folder(store).absolute(), create=False) as opened:
        model = _model(opened, trial)
    begun = model.encode(given) or [model.codec.eod]
    for told in _cut(len(begun), tokens, model.context):
        click.echo(told, err=True)
    seeds = [seed_of("generate", seed, place) for place in range(samples)]
    texts = model.continued([begun] * samples, tokens, (), Sampling(temperature, top_k, top_p), seeds)
    for place, text in enumerate(texts):
        if as_json:
            click.echo(json.dumps({"prompt": given, "text": text, "sample": place}))
        else:
            click.echo(("\n---\n" if place else "") + given + text)


def _cut(prompt: int, tokens: int, context: int) -> Iterator[str]:
    """What does not fit in a window of `context` tokens."""
    most = min(tokens, context - 1)
    if most < tokens:
        yield f"at most {most} tokens: the model was trained on windows of {context}, a prompt's last token among them"
    if prompt > context - most:
        yield f"of the prompt's {prompt} tokens the last {context - most} are read; fewer --tokens leave room for more"


def _model(store: Store, name: str) -> TextModel:
    """The model of a trial that came to its end. Raises SpecError where it cannot continue a text."""
    import torch

    from archlab.arch_dsl import SpecError
    from archlab.search.evaluation.downstream.text_model import not_continued, text_model
    from archlab.search.evaluation.family import About, Subject
    from archlab.search.evaluation.job import final_weights
    from archlab.search.models.weights import folder_of
    from archlab.search.trial.trial import Trial

    folder: Path = folder_of(name, store.root)
    known = store.known([folder.name])[folder.name]
    if known["state"] != "complete":
        raise SpecError.of(name, "is not complete: only a trial that came to its end has a model")
    trial = Trial.from_json(store.spec(folder.name))
    about = About.of(trial, store.root / "data")
    if why := not_continued(about):
        raise SpecError.of(name, why)
    try:
        weights = final_weights(folder, trial, known["result"]["step"])
    except ValueError as error:
        raise SpecError.of(name, str(error)) from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return text_model(Subject(about, device, weights, lambda: None), about.recipe.context)


VERBS = (generate,)
