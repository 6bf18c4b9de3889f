"""The verbs about studies that run or have run: status, watch, stop, retry, gc."""

from __future__ import annotations

import json

import click

from archlab.cli import completion
from archlab.cli.kit import INTERRUPTED, JSON, STORE, STUDY_OR_NAME, TRY_AGAIN, fail, store_folder, study_name, verb
from archlab.search.utils.exits import leave


@click.command()
@click.argument("study", required=False, shell_complete=completion.studies)
@STORE
@JSON
@verb
def status(study: str | None, store: str | None, as_json: bool) -> None:
    """Show the studies of a store, how far they are, and who is running them."""
    from archlab.search.running.status import lines, status_of

    found = status_of(store_folder(store), study_name(study) if study else None)
    click.echo(json.dumps(found) if as_json else "\n".join(lines(found)))


@click.command()
@STUDY_OR_NAME
@STORE
@JSON
@verb
def watch(study: str, store: str | None, as_json: bool) -> None:
    """Show live what another process runs, until it ends. Ctrl-C leaves it running.

    Exits with 0 when every trial has a result, 1 when some failed, 75 when nobody runs what is left.
    """
    from archlab.search.running.progress import make_progress
    from archlab.search.running.watch import follow

    try:
        with make_progress(as_json=as_json) as progress:
            summary = follow(store_folder(store), study_name(study), progress)
    except KeyboardInterrupt:
        fail(f"no longer watched; who runs {study_name(study)} goes on", INTERRUPTED)
    if as_json:
        event = {"event": "summary", "exit_code": summary.exit_code, "counts": summary.counts}
        click.echo(json.dumps({**event, "message": summary.message}))
    else:
        from archlab.cli.printing import print_summary

        print_summary(summary, study, store_folder(store))
    leave(summary.exit_code)


@click.command()
@STUDY_OR_NAME
@STORE
@JSON
@verb
def stop(study: str, store: str | None, as_json: bool) -> None:
    """Ask who runs a study to let its trials write a checkpoint and to end. Once more ends it at once."""
    from archlab.search.running.status import status_of, told
    from archlab.search.running.stop_and_retry import WAIT_S, stop_study
    from archlab.search.store.store import Store

    root, name = store_folder(store), study_name(study)
    with Store.open(root, create=False) as opened:
        opened.study(name)  # or there is none
    if not as_json:
        click.echo(f"asking {name} to stop; its trials write a checkpoint first (Ctrl-C leaves it to itself)", err=True)
    done = stop_study(root, name)
    (now,) = status_of(root, name)
    if as_json:
        click.echo(json.dumps({**done, "counts": now["counts"]}))
    elif done["holder"] is None:
        click.echo(f"nobody runs {name}: {told(now['counts'])}")
    elif done["ended"]:
        click.echo(f"{name} has stopped: {told(now['counts'])}; archlab run goes on from here")
    if not done["ended"]:
        who = f"process {done['holder'].get('pid')} on {done['holder'].get('host')}"
        fail(f"{name} is still run by {who} after {WAIT_S:.0f} s; archlab status shows when it has ended", TRY_AGAIN)


@click.command()
@STUDY_OR_NAME
@STORE
@click.option("--failed", is_flag=True, help="The failed ones, which are all that can be tried again.")
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="NAME",
    shell_complete=completion.variants,
    help="Those of this variant alone.",
)
@JSON
@verb
def retry(study: str, store: str | None, failed: bool, variants: tuple[str, ...], as_json: bool) -> None:
    """Plan failed trials of a study again, after mending the cause. The next run, or the one that runs, trains them."""
    from archlab.search.running.stop_and_retry import retry as plan_again
    from archlab.search.store.lock import holder_of
    from archlab.search.store.store import Store

    root, name = store_folder(store), study_name(study)
    with Store.open(root, create=False) as opened:
        counts = plan_again(opened, name, variants)
    total = sum(counts.values())
    if as_json:
        click.echo(json.dumps({"study": name, "planned": total, "variants": counts}))
        return
    if not total:
        click.echo(f"no trial of {name} has failed{' of these variants' if variants else ''}: nothing to try again")
        return
    shown = ", ".join(f"{variant} {count}" for variant, count in counts.items())
    following = "the process that runs it" if holder_of(root, name) is not None else "archlab run"
    click.echo(f"{total} trial{'s' * (total > 1)} of {name} planned again ({shown}); {following} goes on with them")


@click.command()
@STORE
@click.option("--apply", is_flag=True, help="Remove it. Without this nothing is changed.")
@JSON
@verb
def gc(store: str | None, apply: bool, as_json: bool) -> None:
    """List what a store could do without, and how much that frees. Results and journals always stay."""
    from archlab.search.running.garbage import clean, compiled_layers, final_weights, look, summed
    from archlab.search.store.store import Store

    with Store.open(store_folder(store), create=False) as opened:
        found, stayed = clean(opened) if apply else (look(opened), [])
        (trials, held), layers, going = final_weights(opened), compiled_layers(opened), found.waste
    if as_json:
        kept = [{"files": list(map(str, waste.paths)), "reason": reason} for waste, reason in stayed]
        weights = {"trials": trials, "bytes": held}
        told = {"applied": apply, "what": summed(going), "kept": kept}
        click.echo(json.dumps({**told, "final_weights": weights, "compiled_layers": {"bytes": layers}}))
        return
    lines = [
        f"{each['kind']:<12} {megabytes(each['bytes']):>10}  {each['files']:,} {each['why']}" for each in summed(going)
    ]
    total = sum(waste.size for waste in going)
    click.echo("\n".join(lines) if lines else "nothing can go")
    if not found.whole:
        click.echo("left: what trials keep or share, as rows of the trial table are damaged, or were mended and their")
        click.echo("  study has not run since; archlab check says which")
    for waste, reason in stayed:
        click.echo(f"left: {waste.paths[0]}{' and more' if len(waste.paths) > 1 else ''}: {reason}")
    if apply and lines:
        click.echo(f"freed {megabytes(total)}")
    elif lines:
        click.echo(f"{megabytes(total)} in all; nothing was removed: archlab gc --apply removes it")
    if trials:
        click.echo(f"{trials:,} complete trials have their final weights, {megabytes(held)}, for archlab eval")
    if layers and "compiled" not in {waste.kind for waste in going}:
        click.echo(f"compiled layers, {megabytes(layers)}, wait for trials that are still to train")


def megabytes(size: int) -> str:
    """Bytes in the megabytes of disks, such as 12.3 MB."""
    return f"{size / 1e6:,.1f} MB"


VERBS = (status, watch, stop, retry, gc)
