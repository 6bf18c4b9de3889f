"""The verbs about models: show, diff, zoo, primitives, new-primitive, check-primitive."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from archlab.cli import completion
from archlab.cli.kit import ALLOW, JSON, PLUGIN, SET, STORE, parsed, store_folder, verb


@click.command()
@click.argument("study", type=click.Path(dir_okay=False), shell_complete=completion.models)
@click.option(
    "--variant", metavar="NAME", shell_complete=completion.variants, help="Which variant; the baseline without it."
)
@click.option("--cost", "costs", is_flag=True, help="Show a table of parameters, FLOPs and memory per node.")
@click.option("--kernels", "kernels_", is_flag=True, help="Show which kernel each node gets, and why.")
@click.option("--parameters", "names", is_flag=True, help="Show the name and shape of every parameter.")
@click.option("--dot", "as_dot", is_flag=True, help="Print a diagram for Graphviz: | dot -Tpdf > model.pdf")
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
    names: bool,
    as_dot: bool,
    device: str | None,
    store: str | None,
    overrides: tuple[str, ...],
    allow_plugins: bool,
    as_json: bool,
) -> None:
    """Show a model in its site form, as a tree with shapes, parameters and FLOPs per node.

    STUDY may also be the file of a model alone, or a NAME/SIZE of the zoo. A diagram has in colour what differs from
    the variant's baseline.
    """
    from archlab.arch_dsl import SpecError
    from archlab.search.models.find import model_alone
    from archlab.search.models.print_model import (
        Shown,
        print_dot,
        print_kernels,
        print_parameters,
        print_tree,
        variant_of,
    )
    from archlab.search.planning.plan import plan as make_plan
    from archlab.search.study.load import load_study

    if as_dot and (as_json or costs or kernels_ or names):
        raise click.UsageError(
            "--dot prints a diagram alone: it goes with none of --json, --cost, --kernels, --parameters"
        )
    alone = model_alone(study)
    if alone and (variant or overrides):
        raise SpecError.of("", f"{study} is a model, which has no variants and takes no --set")
    if alone is None:
        planned = make_plan(
            load_study(study, parsed(overrides), allow_plugins, store_folder(store)),
            store_folder(store).absolute() / "data",
        )
        wanted = variant_of(planned, variant)
        alone = Shown.of(wanted, variant_of(planned, wanted.baseline))
    chosen = alone
    if as_dot:
        print_dot(chosen, device)
    elif names:
        print_parameters(chosen, as_json)
    elif kernels_ or device:
        print_kernels(chosen, device, as_json)
    else:
        print_tree(chosen, as_json, costs)


@click.command()
@click.argument("before", metavar="A", shell_complete=completion.models)
@click.argument("after", metavar="B", shell_complete=completion.models)
@STORE
@PLUGIN
@ALLOW
@JSON
@verb
def diff(before: str, after: str, store: str | None, allow_plugins: bool, as_json: bool) -> None:
    """Show what differs between two models: FILE, STUDY.yaml:VARIANT, or a NAME/SIZE of the zoo."""
    from archlab.search.models.difference import difference, print_difference
    from archlab.search.models.find import find_model

    root = store_folder(store).absolute() / "data"
    one, other = (find_model(text, root, plugins=allow_plugins) for text in (before, after))
    print_difference(difference(one, other), as_json)


@click.command()
@click.argument("name", required=False, shell_complete=completion.primitives)
@click.option("--format", "format_", default="text", metavar="FORMAT", help="text, or md: the page of all of them.")
@PLUGIN
@JSON
@verb
def primitives(name: str | None, format_: str, as_json: bool) -> None:
    """List what a block can be made of; with a name, explain that primitive."""
    if format_ not in ("text", "md"):
        raise click.BadParameter(f"'{format_}' is not one of text, md", param_hint="--format")
    if format_ == "md":
        from archlab.arch_dsl.catalogue.page import markdown

        click.echo(markdown(), nl=False)
    else:
        from archlab.cli.printing import print_primitives

        print_primitives(name, as_json)


@click.command("new-primitive")
@click.argument("name")
@click.option(
    "--like", required=True, metavar="OTHER", shell_complete=completion.primitives, help="The primitive to begin with."
)
@verb
def new_primitive(name: str, like: str) -> None:
    """Begin a primitive of your own: NAME.py, a copy of another one, and its test.

    Both are written into this folder, and hold as they are. Then change the formula, in one and in the other.
    """
    from archlab.arch_dsl import SpecError
    from archlab.arch_dsl.catalogue.new import sources

    files = dict(zip((Path(f"{name}.py"), Path(f"test_{name}.py")), sources(name, like), strict=True))
    if taken := [str(file) for file in files if file.exists()]:
        raise SpecError.of("", f"already here: {', '.join(taken)}; nothing was written")
    for file, text in files.items():
        file.write_text(text, "utf-8")
        click.echo(f"wrote {file}")
    click.echo(f"next: change its formula, then  archlab check-primitive {name}.py  and  pytest test_{name}.py")


@click.command("check-primitive")
@click.argument("file", type=click.Path(dir_okay=False))
@PLUGIN
@JSON
@verb
def check_primitive(file: str, as_json: bool) -> None:
    """Test the primitives of a Python file as archlab tests its own."""
    from archlab.search.models.check_primitive import check_plugin

    sys.exit(0 if check_plugin(file, as_json) else 1)


@click.command()
@click.argument("action", required=False, type=click.Choice(["show"]))
@click.argument("name", required=False, metavar="[NAME[/SIZE]]", shell_complete=completion.zoo_models)
@click.option("--sizes", is_flag=True, help="A line for every published size, with our count of its parameters.")
@JSON
@verb
def zoo(action: str | None, name: str | None, sizes: bool, as_json: bool) -> None:
    """List published architectures; `zoo show NAME/SIZE` shows one."""
    from archlab.search.models.zoo_cards import print_entry, print_zoo

    if action and not name:
        raise click.UsageError("zoo show needs a NAME, or NAME/SIZE")
    if name and sizes:
        raise click.UsageError("--sizes is for the list; zoo show NAME has the sizes of one model")
    if name:
        print_entry(name, as_json)
    else:
        print_zoo(as_json, sizes)


VERBS = (show, diff, zoo, primitives, new_primitive, check_primitive)
