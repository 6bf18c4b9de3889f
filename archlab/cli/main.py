"""The command line: each verb shows what a function returns. Heavy imports happen inside the verb that needs them."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from archlab.cli import bench, calibrate, challenge, eval, generate, lifecycle, mcp, models, note, paper, store, weights
from archlab.cli.groups import Grouped, next_steps
from archlab.cli.kit import (
    ADDRESS,
    ALLOW,
    INLINE,
    INVALID,
    JSON,
    PLUGIN,
    SET,
    STORE,
    STUDY,
    fail,
    failures,
    parsed,
    store_folder,
    study_name,
    verb,
)
from archlab.search.utils.exits import leave, leaving_early

if TYPE_CHECKING:
    from archlab.search.planning.plan import Plan


def _version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    """The installed version; the checkout knows none."""
    from importlib.metadata import PackageNotFoundError, version

    if not wanted:
        return
    try:
        click.echo(f"archlab {version('archlab')}")
    except PackageNotFoundError:
        click.echo("archlab, not installed: used from its folder")
    context.exit()


@click.group(cls=Grouped, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
@click.pass_context
def main(context: click.Context) -> None:
    """Architecture search and ablation for language models: write a study in YAML, get a table that can be trusted."""
    if context.invoked_subcommand is None:
        with failures():
            click.echo(f"Next, in this folder:\n\n{next_steps(Path.cwd(), store_folder(None))}")


@main.command()
@click.argument("path", metavar="[FILE]", type=click.Path(dir_okay=False, writable=True), default="my_study.yaml")
@verb
def init(path: str) -> None:
    """Write a commented study to start from: my_study.yaml, unless you name another file."""
    from archlab.search.study.files import new_study

    if Path(path).exists():
        fail(f"{path} exists; a study is never overwritten", INVALID)
    if not Path(path).parent.is_dir():
        fail(f"{Path(path).parent} is no folder", INVALID)
    Path(path).write_text(new_study(Path(path)))
    shown = shlex.quote(path)
    click.echo(f"wrote {path}\n\n  archlab plan {shown}\n  archlab run {shown}\n  archlab report {shown}")


@main.command()
@STUDY
@STORE
@SET
@PLUGIN
@ALLOW
@JSON
@click.option("--address", metavar="HOST:PORT", help="For a running Ray cluster; without it for this machine.")
@verb
def plan(
    study: str,
    store: str | None,
    overrides: tuple[str, ...],
    allow_plugins: bool,
    as_json: bool,
    address: str | None,
) -> None:
    """Show what a study would run: variants, sizes, trials, an estimate of the time. Trains nothing."""
    from archlab.search.planning.estimate import refuse_too_little
    from archlab.search.planning.page import plan_json, print_plan
    from archlab.search.planning.plan import plan as make_plan
    from archlab.search.running.run import slots_at
    from archlab.search.running.smoke import decided
    from archlab.search.study.load import load_study

    root = store_folder(store).absolute()
    loaded = load_study(study, parsed(overrides), allow_plugins, root)
    slots = slots_at(address, root, loaded.resources)
    planned = make_plan(loaded, root / "data", decided(root, loaded.study))
    if address is None:
        refuse_too_little(planned)
    if as_json:
        click.echo(json.dumps(plan_json(planned, root, slots)))
    else:
        print_plan(planned, root, slots)


@main.command()
@STUDY
@STORE
@SET
@PLUGIN
@ALLOW
@JSON
@ADDRESS
@click.option("--smoke", is_flag=True, help="First try every variant for five steps, and stop if one cannot run.")
@INLINE
@click.option("--no-track", is_flag=True, help="Do not send anything to the trackers.")
@verb
def run(
    study: str,
    store: str | None,
    overrides: tuple[str, ...],
    allow_plugins: bool,
    as_json: bool,
    address: str | None,
    smoke: bool,
    inline: bool,
    no_track: bool,
) -> None:
    """Train the trials of a study that have no result yet. Ctrl-C and the same command goes on where it stopped."""
    from archlab.search.running.progress import make_progress
    from archlab.search.running.run import run as run_study
    from archlab.tables import send

    root = store_folder(store)
    name = shown = study  # what the commands that read a store find it by: a scale has a name of its own

    def begin(planned: Plan) -> None:
        nonlocal name, shown
        name = planned.study.study
        shown = study if name == study_name(study) else name
        progress.plan(planned.record(), planned.trials)

    with leaving_early(), make_progress(as_json=as_json) as progress:
        summary = run_study(
            study,
            root,
            overrides=parsed(overrides),
            executor="inline" if inline else "ray",
            address=address,
            on_event=progress.event,
            on_plan=begin,
            track=not no_track,
            allow_plugins=allow_plugins,
            smoke=smoke,
        )
        if not no_track and summary.exit_code in (0, 1, 3):  # it came to its end
            send(root.absolute(), name)
    if not as_json:
        from archlab.cli.printing import print_summary

        print_summary(summary, shown, root)
    leave(summary.exit_code)


@main.command()
@click.argument("action", type=click.Choice(["show", "prepare", "get"]))
@click.argument("what", required=False, metavar="[STUDY|IDENTITY|NAME]")
@click.option("--against", multiple=True, metavar="FILES", help="Text files whose overlap is counted too (show).")
@click.option("-o", "--out", metavar="FOLDER", type=click.Path(path_type=Path), help="Where to (get); data/NAME.")
@STORE
@SET
@PLUGIN
@ALLOW
@JSON
@verb
def data(
    action: str,
    what: str | None,
    against: tuple[str, ...],
    out: Path | None,
    store: str | None,
    overrides: tuple[str, ...],
    allow_plugins: bool,
    as_json: bool,
) -> None:
    """Show what became of a study's text, prepare it without training, or get a corpus by name.

    `show` prints splits, bytes per token, domains, what cleaning removed, and how much of the held-out text is in the
    training text too. `get` without a NAME lists the corpora that there are.
    """
    from archlab.cli import data as data_command

    root = store_folder(store).absolute() / "data"
    if action == "get":
        data_command.fetch(what, out, as_json)
    elif what is None:
        raise click.UsageError(f"data {action} needs a STUDY.yaml")
    elif action == "show":
        data_command.show(what, root, parsed(overrides), allow_plugins, against, as_json)
    else:
        data_command.prepare(what, root, parsed(overrides), allow_plugins, as_json)


@main.command()
@PLUGIN
@verb
def schema() -> None:
    """Print the JSON Schema of a study, for editors and other programs."""
    from archlab.search.study.schema import schema_text

    click.echo(schema_text(), nl=False)


@main.command()
@click.argument("study", required=False, type=click.Path(exists=True, dir_okay=False))
@STORE
@JSON
@verb
def doctor(study: str | None, store: str | None, as_json: bool) -> None:
    """Say what this machine has, and what it means for a study: how many trials of STUDY run at once."""
    from dataclasses import asdict

    from archlab.cli.doctor import doctor as examine
    from archlab.cli.printing import print_findings
    from archlab.search.executors.resources import resources_in

    found = examine(store_folder(store), resources_in(study) if study else None)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found]))
    else:
        print_findings(found)
    sys.exit(1 if any(finding.status == "fail" for finding in found) else 0)


@main.command()
@STORE
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", default=None, type=click.IntRange(0, 65535), help="The port; the first free one from 8050 without it."
)
@click.option("--open", "open_browser", is_flag=True, help="Open the page in a browser.")
@click.option("--read-only", is_flag=True, help="Its pages write no note, save no study and start nothing.")
@verb
def dashboard(store: str | None, host: str, port: int | None, open_browser: bool, read_only: bool) -> None:
    """Show the studies of a store in a browser, on this machine alone unless told otherwise.

    A --host other than loopback asks for a token, which is printed: that of ARCHLAB_TOKEN, or a new one.
    """
    from archlab import dashboards

    try:
        dashboards.serve(store_folder(store), host=host, port=port, open_browser=open_browser, read_only=read_only)
    except (dashboards.PortTaken, dashboards.WeakToken) as error:
        fail(str(error), INVALID)


for group in (calibrate, challenge, mcp, lifecycle, models, weights, store, eval, generate, paper, note, bench):
    for each in group.VERBS:
        main.add_command(each)
