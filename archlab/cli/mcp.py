"""`archlab mcp`: the referee of a study for programs and language models, over the Model Context Protocol."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import click

from archlab.cli.challenge import DISK, FALSE_KEEPS, MARGIN, SEEDS, TOGETHER
from archlab.cli.kit import ADDRESS, ALLOW, INLINE, INVALID, SET, STORE, STUDY, fail, parsed, store_folder, verb


@click.command()
@STUDY
@STORE
@SET
@ALLOW
@SEEDS
@MARGIN
@FALSE_KEEPS
@TOGETHER
@click.option("--trials", type=click.IntRange(1), help="How many all challenges of this study train at most.")
@click.option(
    "--core-seconds", type=click.FloatRange(0, min_open=True), help="How long their trials hold cores at most, in all."
)
@DISK
@ADDRESS
@INLINE
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Serve it over HTTP instead, on this port, to those who show the token.",
)
@verb
def mcp(
    study: str,
    store: str | None,
    overrides: tuple[str, ...],
    allow_plugins: bool,
    address: str | None,
    inline: bool,
    port: int | None,
    **rules: Any,
) -> None:
    """Serve the referee of a study to a program or a language model, on standard input and output.

    It speaks the Model Context Protocol: a client starts this command, or asks it at http://127.0.0.1:PORT/mcp. Limits
    hold over all challenges that this study ever had in the store, however often the server is started.
    """
    from importlib.util import find_spec

    if find_spec("mcp") is None:
        fail("`archlab mcp` needs the package `mcp`: pip install 'archlab[mcp]'", INVALID)
    from archlab.cli.referee_server.desk import Desk
    from archlab.cli.referee_server.serve import serve
    from archlab.search.challenge.work import Job

    job = Job(
        study=study,
        store=str(store_folder(store).absolute()),
        ticket="",
        overrides=parsed(overrides),
        rules={**rules, "of_life": True},
        executor="inline" if inline else "ray",
        address=address,
        allow_plugins=allow_plugins,
        command=shlex.join(["archlab", *sys.argv[1:]]),
    )
    desk = Desk(job)
    with desk.referee():  # what is wrong with the study is said before a client waits for it
        pass
    if port is None:
        serve(desk)
        return
    from archlab.cli.referee_server.over_http import serve_http
    from archlab.dashboards.errors import PortTaken, WeakToken

    try:
        serve_http(desk, port)
    except (PortTaken, WeakToken) as error:
        fail(str(error), INVALID)


VERBS = [mcp]
