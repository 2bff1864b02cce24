"""The commands of `weft` and their options; each does its work elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft import __version__
from weft.cli.ops import list_ops, show_op
from weft.cli.run import run_script
from weft.errors import UserError
from weft.runtime.world.launch import Fleet

app = typer.Typer(
    help="Train one ordinary PyTorch model on many devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def weft(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train one ordinary PyTorch model on many devices."""


# Whatever stands behind the script belongs to the script.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="The Python script to run.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
    ] = None,
    ranks: Annotated[
        int, typer.Option("-n", "--ranks", min=1, help="Processes to start on this node.")
    ] = 1,
    nodes: Annotated[
        int, typer.Option("--nodes", "--nnodes", min=1, help="Nodes that take part.")
    ] = 1,
    rendezvous: Annotated[str, typer.Option(help="host:port of one node, for several nodes.")] = "",
    run_id: Annotated[
        str, typer.Option(help="Name of the run, the same on each node, for several nodes.")
    ] = "",
) -> None:
    """Run SCRIPT in one process for each rank; when one fails, end them all and show why."""
    if nodes > 1 and not (rendezvous and run_id):
        raise typer.BadParameter("several nodes need --rendezvous host:port and --run-id NAME")
    fleet = Fleet(ranks, nodes, rendezvous, run_id)
    raise typer.Exit(run_script(script, arguments or (), fleet))


@app.command()
def ops(
    op: Annotated[str, typer.Argument(help="An op such as aten.mm.default; all by default.")] = "",
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Example arguments: float32[8,4] for a tensor, else Python literals.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Ranks of the axis.")] = 2,
) -> None:
    """List the ops with their sharding rules, or show the signatures of OP for example arguments."""
    try:
        for line in show_op(op, arguments or (), ranks) if op else list_ops():
            typer.echo(line)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
