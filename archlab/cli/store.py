"""The verbs about what a store holds and where: sync, move, delete."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from archlab.cli import completion
from archlab.cli.kit import JSON, STORE, STUDY_OR_NAME, TRY_AGAIN, fail, store_folder, study_name, verb


@click.command()
@click.argument("study", required=False, shell_complete=completion.studies)
@STORE
@JSON
@verb
def sync(study: str | None, store: str | None, as_json: bool) -> None:
    """Send to the trackers what did not arrive while a study ran, of one study or of all.

    Exits with 0 when everything has arrived, 75 when something is left for later.
    """
    from archlab.search.trackers.shipper import sync as ship
    from archlab.tables import send

    left = ship(store_folder(store), study_name(study) if study else None)
    for name in left:
        send(store_folder(store).absolute(), name)
    if as_json:
        click.echo(json.dumps(left))
    for name, points in left.items() if not as_json else ():
        click.echo(f"{name}: {f'{points} points and news are left' if points else 'everything has arrived'}")
    if any(left.values()):
        fail("not everything has arrived: run this again when the tracker answers", TRY_AGAIN)


@click.command()
@STORE
@JSON
@verb
def move(store: str | None, as_json: bool) -> None:
    """Move the trial table of a store from its file to the PostgreSQL server that ARCHLAB_DATABASE names."""
    from archlab.search.store.move import to_server

    root = store_folder(store)
    moved = to_server(root)
    told = f"{moved['trial']} trials of {moved['study']} studies moved; {root}/trials.db.moved is no longer read"
    click.echo(json.dumps(moved) if as_json else told)


@click.command()
@STUDY_OR_NAME
@STORE
@click.option("--apply", is_flag=True, help="Remove it. Without this nothing is changed.")
@JSON
@verb
def delete(study: str, store: str | None, apply: bool, as_json: bool) -> None:
    """List what goes with a study that is deleted: its record, and the trials that no other study has.

    What trackers have of it stays there. A study that runs is left alone.
    """
    from archlab.search.formatting.numbers import duration
    from archlab.search.running import deletion
    from archlab.search.store.store import Store

    with Store.open(store_folder(store), create=False) as opened:
        name = study_name(study)
        going = deletion.delete(opened, name) if apply else deletion.found(opened, name)
    if as_json:
        click.echo(json.dumps({"applied": apply, **asdict(going)}))
        return
    count = len(going.keys)
    told = f"{count} trial{'s' * (count != 1)}, {going.complete} of them complete"
    told += f": {duration(going.train_s)} of training, {going.size / 1e6:,.1f} MB"
    click.echo(f"{name} is deleted: {told}" if apply else f"with {name} would go: {told}")
    if going.stay:
        click.echo(f"{going.stay} more stay, as other studies have them too")
    click.echo("what trackers have of it stays there" if apply else "nothing was removed: --apply removes it for good")


VERBS = (sync, move, delete)
