"""The command line: each verb shows what a function returns. Heavy imports happen inside the verb that needs them."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import click

from search import cli_bench, cli_eval, cli_generate, cli_lifecycle, cli_store
from search.cli_kit import (
    ALLOW,
    INVALID,
    JSON,
    PLUGIN,
    SET,
    STORE,
    STUDY,
    fail,
    parsed,
    store_folder,
    study_name,
    verb,
)
from search.stop import leave, leaving_early


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


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def main() -> None:
    """Architecture search and ablation for language models: write a study in YAML, get a table that can be trusted."""


@main.command()
@click.argument("path", type=click.Path(dir_okay=False, writable=True))
@verb
def init(path: str) -> None:
    """Write a commented study to start from."""
    template = Path(__file__).with_name("template.yaml").read_text()
    if Path(path).exists():
        fail(f"{path} exists; a study is never overwritten", INVALID)
    if not Path(path).parent.is_dir():
        fail(f"{Path(path).parent} is no folder", INVALID)
    name = re.sub(r"[^a-z0-9]+", "-", Path(path).stem.lower()).strip("-")[:63].rstrip("-") or "my-study"
    schema = os.path.relpath(_schema_file(), Path(path).parent)
    text = template.replace("=study.schema.json", f"={schema}", 1).replace("my-study", name, 1)
    Path(path).write_text(text)
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
    from search.estimate import refuse_too_little
    from search.planning import plan as make_plan
    from search.running import slots_at, store_root
    from search.smoke import decided
    from search.study import load_study
    from search.terminal import plan_json, print_plan

    root, loaded = store_root(store).absolute(), load_study(study, parsed(overrides), allow_plugins)
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
@click.option("--address", metavar="HOST:PORT", help="A running Ray cluster; without it Ray is started here.")
@click.option("--smoke", is_flag=True, help="First try every variant for five steps, and stop if one cannot run.")
@click.option("--inline", is_flag=True, help="Train in this process, one trial at a time, without Ray.")
@click.option("--no-track", is_flag=True, help="Do not send anything to MLflow and Optuna.")
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
    """Train what is missing. Ctrl-C and the same command goes on where it stopped."""
    from search.progress import make_progress
    from search.running import run as run_study
    from search.running import store_root

    with leaving_early(), make_progress(as_json=as_json) as progress:
        summary = run_study(
            study,
            store,
            overrides=parsed(overrides),
            executor="inline" if inline else "ray",
            address=address,
            on_event=progress.event,
            on_plan=lambda planned: progress.plan(planned.record(), planned.trials),
            track=not no_track,
            allow_plugins=allow_plugins,
            smoke=smoke,
        )
    if not as_json:
        from search.terminal import print_summary

        print_summary(summary, study, store_root(store))
    leave(summary.exit_code)


@main.command()
@click.argument("study")
@STORE
@click.option("--format", "format_", default="text", metavar="FORMAT", help="text, md, csv, latex or json.")
@JSON
@verb
def report(study: str, store: str | None, format_: str, as_json: bool) -> None:
    """Print the table of a study: means, paired differences with intervals, the learning-rate curve."""
    from search.comparison import load_comparison
    from search.reporting import FORMATS
    from search.reporting import report as render
    from search.store import Store

    if format_ not in FORMATS:
        raise click.BadParameter(f"'{format_}' is not one of {', '.join(FORMATS)}", param_hint="--format")
    with Store.open(store_folder(store), create=False) as opened:
        name = study_name(study)
        text = render(load_comparison(opened, name), "json" if as_json else format_)
        if Path(study).is_file() and Path(study).read_text() != opened.study_yaml(name):
            click.echo(f"{study} has changed since it was run; this is the table of what was run", err=True)
    click.echo(text, nl=not text.endswith("\n"))


@main.command()
@STUDY
@click.option("--variant", metavar="NAME", help="Which variant; the baseline without it.")
@click.option("--cost", "costs", is_flag=True, help="Show a table of parameters, FLOPs and memory per node.")
@click.option("--kernels", "kernels_", is_flag=True, help="Show which kernel each node gets, and why.")
@click.option("--device", default=None, metavar="DEVICE", help="cpu, cuda or sm_90; need not be present.")
@STORE
@SET
@PLUGIN
@ALLOW
@JSON
@verb
def show(
    study: str,
    variant: str | None,
    costs: bool,
    kernels_: bool,
    device: str | None,
    store: str | None,
    overrides: tuple[str, ...],
    allow_plugins: bool,
    as_json: bool,
) -> None:
    """Show a model in its site form, as a tree with shapes, parameters and FLOPs per node.

    STUDY may also be the file of a model alone, or a NAME/SIZE of the zoo.
    """
    from arch_dsl import SpecError
    from search.find_model import model_alone
    from search.planning import plan as make_plan
    from search.shown import Shown, print_kernels, print_tree, variant_of
    from search.study import load_study

    alone = model_alone(study)
    if alone and (variant or overrides):
        raise SpecError.of("", f"{study} is a model, which has no variants and takes no --set")
    if alone is None:
        planned = make_plan(
            load_study(study, parsed(overrides), allow_plugins), store_folder(store).absolute() / "data"
        )
        alone = Shown.of(variant_of(planned, variant))
    chosen = alone
    if kernels_ or device:
        print_kernels(chosen, device, as_json)
    else:
        print_tree(chosen, as_json, costs)


@main.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@STORE
@PLUGIN
@ALLOW
@JSON
@verb
def diff(before: str, after: str, store: str | None, allow_plugins: bool, as_json: bool) -> None:
    """Show what differs between two models: FILE, STUDY.yaml:VARIANT, or a NAME/SIZE of the zoo."""
    from search.find_model import find_model
    from search.model_diff import difference, print_difference

    root = store_folder(store).absolute() / "data"
    one, other = (find_model(text, root, plugins=allow_plugins) for text in (before, after))
    print_difference(difference(one, other), as_json)


@main.command()
@click.argument("name", required=False)
@click.option("--format", "format_", default="text", metavar="FORMAT", help="text, or md: the page of all of them.")
@PLUGIN
@JSON
@verb
def primitives(name: str | None, format_: str, as_json: bool) -> None:
    """List what a block can be made of; with a name, explain that primitive."""
    if format_ not in ("text", "md"):
        raise click.BadParameter(f"'{format_}' is not one of text, md", param_hint="--format")
    if format_ == "md":
        from arch_dsl.catalogue_page import markdown

        click.echo(markdown(), nl=False)
    else:
        from search.terminal import print_primitives

        print_primitives(name, as_json)


@main.command("check-primitive")
@click.argument("file", type=click.Path(dir_okay=False))
@PLUGIN
@JSON
@verb
def check_primitive(file: str, as_json: bool) -> None:
    """Hold the primitives of a Python file to what all of archlab's own are held to."""
    from search.check_primitive import check_plugin

    sys.exit(0 if check_plugin(file, as_json) else 1)


@main.command()
@click.argument("action", required=False, type=click.Choice(["show"]))
@click.argument("name", required=False, metavar="[NAME[/SIZE]]")
@JSON
@verb
def zoo(action: str | None, name: str | None, as_json: bool) -> None:
    """List published architectures with their sizes; `zoo show NAME/SIZE` shows one."""
    from search.zoo import print_entry, print_zoo

    if action and not name:
        raise click.UsageError("zoo show needs a NAME, or NAME/SIZE")
    if name:
        print_entry(name, as_json)
    else:
        print_zoo(as_json)


@main.command(name="import")
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--zoo", "zoo_", metavar="NAME[/SIZE]", help="The model of the zoo that the checkpoint is of.")
@click.option("--spec", metavar="FILE.yaml", type=click.Path(exists=True), help="Or a file with its spec.")
@click.option("--map", "map_", metavar="MAP", help="How its tensors are named and stored; the zoo's own without it.")
@click.option("-o", "--out", required=True, metavar="PATH", type=click.Path(path_type=Path))
@PLUGIN
@JSON
@verb
def import_(checkpoint: Path, zoo_: str | None, spec: str | None, map_: str | None, out: Path, as_json: bool) -> None:
    """Bring published weights into our form: a study can start from them and change one thing.

    CHECKPOINT is a .safetensors file, whole or the index of its shards, a file of torch, or a folder with either.
    PATH is a .safetensors file or a new folder.
    """
    import arch_dsl
    from arch_dsl.layout import layout_of, load_layout
    from search.weights import import_checkpoint, print_imported

    if (zoo_ is None) == (spec is None):
        raise click.UsageError("say which model it is of: --zoo NAME/SIZE, or --spec FILE.yaml")
    if spec and not map_:
        raise click.UsageError("--spec needs a --map")
    if zoo_:
        from arch_dsl.zoo import load as load_published

        name, slash, size = zoo_.partition("/")
        model = load_published(name, size if slash else None)
    else:
        model = arch_dsl.load(str(spec))
    layout = load_layout(map_ or layout_of(str(zoo_).partition("/")[0]))
    print_imported(import_checkpoint(checkpoint, model, layout, out), as_json)


@main.command()
@click.argument("source", metavar="RUN_OR_CHECKPOINT|MODEL")
@click.option("--map", "map_", metavar="MAP", help="Names and forms of another library; ours without it.")
@click.option("--python", is_flag=True, help="Write the code of MODEL instead: one file of plain PyTorch.")
@click.option("-o", "--out", metavar="FILE", type=click.Path(path_type=Path), help="Code is printed without it.")
@STORE
@ALLOW
@PLUGIN
@JSON
@verb
def export(
    source: str,
    map_: str | None,
    python: bool,
    out: Path | None,
    store: str | None,
    allow_plugins: bool,
    as_json: bool,
) -> None:
    """Write trained or imported weights as safetensors, or a model as plain PyTorch.

    RUN_OR_CHECKPOINT is STUDY/VARIANT or STUDY/VARIANT/SEED of the store, the start of a trial's key, a trial's folder,
    a checkpoint file, or what `archlab import` wrote. MODEL, with --python, is one of these, a model's FILE,
    STUDY.yaml:VARIANT, or a NAME/SIZE of the zoo; the file that is written needs torch alone, and loads the weights
    that this command writes.
    """
    if python:
        if map_ or as_json:
            raise click.UsageError("--python writes code, which has no --map and no --json")
        from search.plain import export_python

        export_python(source, store_folder(store).absolute(), out, plugins=allow_plugins)
        return
    from arch_dsl.layout import load_layout
    from search.weights import export_weights, print_imported

    if out is None:
        raise click.UsageError("weights need a file: -o FILE.safetensors")
    if out.suffix != ".safetensors":
        raise click.BadParameter(f"'{out}' does not end in .safetensors", param_hint="--out")
    layout = load_layout(map_) if map_ else None
    print_imported(export_weights(source, store_folder(store), layout, out), as_json)


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
    from search import data_command

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
    from search.study_schema import schema_text

    click.echo(schema_text(), nl=False)


@main.command()
@click.argument("study", required=False, type=click.Path(exists=True, dir_okay=False))
@STORE
@JSON
@verb
def doctor(study: str | None, store: str | None, as_json: bool) -> None:
    """Say what this machine has, and what it means for a study: how many trials of STUDY run at once."""
    from dataclasses import asdict

    from search.doctor import doctor as examine
    from search.resources import resources_in
    from search.terminal import print_findings

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
@verb
def dashboard(store: str | None, host: str, port: int | None, open_browser: bool) -> None:
    """Show the studies of a store in a browser, on this machine alone unless told otherwise."""
    import dashboards

    try:
        dashboards.serve(store_folder(store), host=host, port=port, open_browser=open_browser)
    except dashboards.PortTaken as error:
        fail(str(error), INVALID)


for each in (*cli_lifecycle.VERBS, *cli_store.VERBS, *cli_eval.VERBS, *cli_generate.VERBS, *cli_bench.VERBS):
    main.add_command(each)


def _schema_file() -> Path:
    """The JSON Schema of studies, in the checkout or beside the installed package."""
    checkout = Path(__file__).parents[1] / "docs" / "study.schema.json"
    return checkout if checkout.exists() else Path(__file__).with_name("study.schema.json")
