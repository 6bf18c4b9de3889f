"""The verbs about weights: import, export."""

from __future__ import annotations

from pathlib import Path

import click

from archlab.cli import completion
from archlab.cli.kit import ALLOW, JSON, PLUGIN, STORE, store_folder, verb


@click.command(name="import")
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
    from archlab import arch_dsl
    from archlab.arch_dsl.weights.layout import layout_of, load_layout
    from archlab.search.models.weights import import_checkpoint, print_imported

    if (zoo_ is None) == (spec is None):
        raise click.UsageError("say which model it is of: --zoo NAME/SIZE, or --spec FILE.yaml")
    if spec and not map_:
        raise click.UsageError("--spec needs a --map")
    if zoo_:
        from archlab.arch_dsl.zoo import load as load_published

        name, slash, size = zoo_.partition("/")
        model = load_published(name, size if slash else None)
    else:
        model = arch_dsl.load(str(spec))
    layout = load_layout(map_ or layout_of(str(zoo_).partition("/")[0]))
    print_imported(import_checkpoint(checkpoint, model, layout, out), as_json)


@click.command()
@click.argument("source", metavar="RUN_OR_CHECKPOINT|MODEL", shell_complete=completion.trials)
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
        from archlab.search.models.plain_python import export_python

        export_python(source, store_folder(store).absolute(), out, plugins=allow_plugins)
        return
    from archlab.arch_dsl.weights.layout import load_layout
    from archlab.search.models.weights import export_weights, print_imported

    if out is None:
        raise click.UsageError("weights need a file: -o FILE.safetensors")
    if out.suffix != ".safetensors":
        raise click.BadParameter(f"'{out}' does not end in .safetensors", param_hint="--out")
    layout = load_layout(map_) if map_ else None
    print_imported(export_weights(source, store_folder(store), layout, out), as_json)


VERBS = (import_, export)
