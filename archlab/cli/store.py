"""The verbs about what a store holds and where: sync, move, delete, check."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from archlab.cli import completion
from archlab.cli.kit import JSON, STORE, STUDY_OR_NAME, TRY_AGAIN, fail, store_folder, study_name, verb
from archlab.cli.lifecycle import megabytes

if TYPE_CHECKING:
    from archlab.search.running.deletion import Deletion
    from archlab.search.running.table_damage import Damage

_LISTED = 10  # trials that a deletion names


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
    from archlab.search.running import deletion
    from archlab.search.store.store import Store

    with Store.open(store_folder(store), create=False) as opened:
        name = study_name(study)
        going = deletion.delete(opened, name) if apply else deletion.found(opened, name)
        holder = None if apply else opened.holder(name)
    if as_json:
        click.echo(json.dumps({"applied": apply, **asdict(going)}))
        return
    click.echo("\n".join(_deletion_lines(going)))
    if apply:
        click.echo(f"{name} is deleted")
        return
    click.echo(f"nothing was removed: archlab delete {shlex.quote(study)} --apply removes it for good")
    if holder is not None:
        click.echo(f"{name} is running: it can't be deleted until that ends")


def _deletion_lines(going: Deletion) -> Iterator[str]:
    """What goes, and what stays."""
    from archlab.search.formatting.numbers import duration

    own = f"{_many(going.rows, 'row')} of the trial table, {_many(going.events, 'event')}"
    yield f"record    {own}, {_many(going.decisions, 'decision')}"
    took = f"{going.complete:,} complete, {duration(going.train_s)} of training, {megabytes(going.size)}"
    yield f"trials    {_many(len(going.trials), 'trial')} that no other study has: {took}"
    for each in going.trials[:_LISTED]:
        yield f"          {each.folder}  {each.state}, {megabytes(each.size)}"
    if len(going.trials) > _LISTED:
        yield f"          and {len(going.trials) - _LISTED:,} more, which --json lists"
    if going.stay:
        yield f"stay      {_many(going.stay, 'trial')} that other studies have too"
    yield "trackers  copies in MLflow, Optuna, Weights & Biases and TensorBoard stay"


@click.command()
@STORE
@click.option("--repair", is_flag=True, help="Mend what can be. Without this nothing is changed.")
@JSON
@verb
def check(store: str | None, repair: bool, as_json: bool) -> None:
    """Read the whole store, and say what in it is damaged and what depends on that.

    No code of the store runs and no link in it is followed, so it may be somebody else's. With --repair damaged trials
    are planned again, and what is replaced is kept in the store's folder `damaged`. Exits with 1 where damage is left.
    """
    from archlab.search.running import damage
    from archlab.search.running import repair as mending
    from archlab.search.store.store import Store

    root = store_folder(store)
    with Store.open(root, create=False) as opened:
        if repair:
            found, looked, mended, aside = mending.repair(opened)
        else:
            (found, looked), mended, aside = damage.look(opened), [], None
    left = [each for each in found if each not in mended]
    if as_json:
        click.echo(
            json.dumps(
                {"looked": asdict(looked), "damaged": [asdict(each) for each in found], "left": len(left)}, default=repr
            )
        )
    else:
        for line in _damage_lines(found):
            click.echo(line)
        read = f"{_many(looked.rows, 'trial')}, {_many(looked.data_sets, 'data set')}, {megabytes(looked.bytes)} read"
        click.echo(f"{read}: {_many(len(found), 'thing')} damaged" if found else f"{read}: nothing is damaged")
        if mended:
            click.echo(f"{_many(len(mended), 'thing')} mended; what was replaced is in {aside}")
        elif any(each.mend for each in found):
            mendable = sum(each.mend is not None for each in found)
            click.echo(f"archlab check --repair mends {mendable} of them, and trains nothing")
    if left:
        raise click.exceptions.Exit(1)


def _damage_lines(found: list[Damage]) -> Iterator[str]:
    """Each thing, what is wrong with it, what is done about it, and who needs it."""
    from archlab.search.formatting.numbers import duration

    for each in found:
        yield f"{each.place}: {each.fault}"
        cost = f" ({duration(each.train_s)} of training, if it begins anew)" if each.train_s else ""
        yield f"    {each.then}{cost}"
        if each.studies:
            yield f"    wanted by {', '.join(each.studies)}"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


VERBS = (sync, move, delete, check)
