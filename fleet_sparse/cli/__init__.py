"""The command `fleet-sparse`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fleet_sparse import __version__
from fleet_sparse.errors import FleetSparseError

from . import chaos, explain, export, keys, log, parity, plan, predict, shrink, snapshot, version, warm_up
from .terminal import console

__all__ = ["app", "main"]

app = typer.Typer(
    name="fleet-sparse",
    help="Parameter-server training for PaddlePaddle 3.x.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # re-wraps the paragraphs of a help text
    add_completion=False,
)
app.command()(chaos.chaos)
app.command()(explain.explain)
app.command()(export.export)
app.command()(parity.parity)
app.command()(plan.plan)
app.command()(predict.predict)
app.command()(shrink.shrink)
app.command()(warm_up.warm_up)
app.add_typer(keys.app, name="keys")
app.add_typer(log.app, name="log")
app.add_typer(snapshot.app, name="snapshot")
app.add_typer(version.app, name="version")


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"fleet-sparse {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def fleet_sparse(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Parameter-server training for PaddlePaddle 3.x."""


def main() -> None:
    """Runs the command. An error of ours is printed without a stack trace and exits with 2.

    Exit code 1 is that of commands whose answer is no: not equal, not intact.
    """
    try:
        app()
    except FleetSparseError as error:
        Console(stderr=True).print(f"[bold red]fleet-sparse:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
