"""The verb about what people write beside studies and trials: note."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from archlab.cli.kit import INVALID, JSON, STORE, STUDY_OR_NAME, fail, store_folder, study_name, verb

if TYPE_CHECKING:
    from archlab.search.store.notes import Note
    from archlab.search.store.store import Store


@click.command()
@STUDY_OR_NAME
@click.argument("text", required=False)
@click.option("--trial", metavar="KEY", help="A trial of the study, by its key or the beginning of that.")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Add a tag; may be given several times.")
@click.option("--untag", "untags", multiple=True, metavar="TAG", help="Take a tag away.")
@STORE
@JSON
@verb
def note(
    study: str,
    text: str | None,
    trial: str | None,
    tags: tuple[str, ...],
    untags: tuple[str, ...],
    store: str | None,
    as_json: bool,
) -> None:
    """Write a note or tags beside a study or one of its trials. Without a text or tag it prints those that are there.

    A text takes the place of the one before, and an empty one removes it. The dashboard shows notes and tags.
    """
    from archlab.search.store.notes import checked, read_notes, write_note
    from archlab.search.store.store import Store

    with Store.open(store_folder(store), create=False) as opened:
        name = study_name(study)
        opened.study(name)
        key = None if trial is None else _key(opened, name, trial)
        kept = read_notes(opened)
        before = (kept.studies if key is None else kept.trials).get(name if key is None else key)
        if text is not None or tags or untags:
            own = before.tags if before else ()
            said = text if text is not None else before.text if before else ""
            try:
                written = checked(said, [each for each in [*own, *tags] if each not in untags])
            except ValueError as error:
                fail(str(error), INVALID)
            write_note(opened, written, name, key or "")
            kept = read_notes(opened)
        mine = dict.fromkeys(row["key"] for row in opened.study_trials(name) if key in (None, row["key"]))
        trials = {each: kept.trials[each] for each in mine if kept.trials.get(each)}
    found = kept.studies.get(name) if key is None else None
    if as_json:
        shown = {"text": "", "tags": []} if found is None else asdict(found)
        click.echo(json.dumps({"study": name, **shown, "trials": {k: asdict(each) for k, each in trials.items()}}))
        return
    lines = [_line(name, found)] if found else []
    lines += [_line(each[:12], said) for each, said in trials.items()]
    click.echo("\n".join(lines) or f"{name} has no note and no tag: archlab note {name} TEXT --tag TAG writes them")


def _key(store: Store, study: str, start: str) -> str:
    """The whole key of a trial of the study."""
    keys = {row["key"] for row in store.study_trials(study) if row["key"].startswith(start)}
    if len(keys) != 1:
        fail(f"{study} has {len(keys) or 'no'} trial{'s' * (len(keys) != 1)} whose key begins with {start!r}", INVALID)
    return str(keys.pop())


def _line(name: str, note: Note) -> str:
    tags = f"  [{', '.join(note.tags)}]" if note.tags else ""
    return f"{name}{tags}" + "".join(f"\n  {line}" for line in note.text.splitlines())


VERBS = (note,)
