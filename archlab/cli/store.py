"""The verbs about a store's servers: sync, move."""

from __future__ import annotations

import json

import click

from archlab.cli import completion
from archlab.cli.kit import JSON, STORE, TRY_AGAIN, fail, store_folder, study_name, verb


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


VERBS = (sync, move)
